"""Places every PCI function of a profile: address, folder, port type. Pure and deterministic.

A host bridge is `bus:00.0`. Each slot or switch gets a root port `bus:01.0`, `bus:02.0` …, and bus
numbers grow depth first from the root's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from topobus.simulation.machines.profile import (
    Card,
    CardFunction,
    Nic,
    Profile,
    Root,
    load_cards,
)
from topobus.values.errors import ConfigError
from topobus.values.pci import PciAddress

__all__ = ["PlacedFunction", "PortKind", "lay_out"]


class PortKind(Enum):
    """PCI Express device/port types (PCIe base specification, PCI Express Capabilities register,
    bits 7:4).
    """

    ENDPOINT = 0
    ROOT_PORT = 4
    UPSTREAM = 5
    DOWNSTREAM = 6
    INTEGRATED = 9


@dataclass(frozen=True, kw_only=True)
class PlacedFunction:
    """One function at its place. `folder` is its device folder, relative to the tree."""

    address: PciAddress
    folder: str
    numa_node: int
    port: PortKind
    function: CardFunction
    card: str = ""
    secondary_bus: int = 0
    """The bus below a bridge."""
    last_bus: int = 0
    """The highest bus below a bridge."""
    physfn: PciAddress | None = None
    vf_index: int = 0
    group: PciAddress
    """The address that identifies the IOMMU group: functions of one card share one."""


# Ids of ports and host bridges, by processor vendor (pci.ids): vendor, root port, host bridge.
_CHIPSETS = {
    "GenuineIntel": (0x8086, 0x352A, 0x09A2),
    "AuthenticAMD": (0x1022, 0x1483, 0x1480),
    "ARM": (0x10DE, 0x22B8, 0x22B0),
}
_BRIDGE = 0x060400
_HOST_BRIDGE = 0x060000
# Broadcom PEX890xx, the switch of many 8-GPU machines.
_SWITCH = (0x1000, 0xC030)


def lay_out(profile: Profile) -> tuple[PlacedFunction, ...]:
    """Place all PCI functions, sorted by address.

    Errors: raises ConfigError for a card that cards.toml lacks or an address used twice.
    """
    cards = {**load_cards(), **profile.cards}
    placed = [placed_function for root in profile.roots for placed_function in _lay_out_root(profile, root, cards)]
    seen: set[PciAddress] = set()
    for placed_function in placed:
        if placed_function.address in seen:
            raise ConfigError(
                f"profile {profile.name}: two functions at {placed_function.address}",
                next_step="give the roots bus numbers further apart",
            )
        seen.add(placed_function.address)
    placed = [_close(placed_function, placed) for placed_function in placed]
    return tuple(sorted(placed, key=lambda placed_function: placed_function.address))


def _close(bridge: PlacedFunction, placed: list[PlacedFunction]) -> PlacedFunction:
    """Set a bridge's highest bus below it."""
    if not bridge.secondary_bus:
        return bridge
    below = [
        max(placed_function.address.bus, placed_function.secondary_bus)
        for placed_function in placed
        if placed_function.folder.startswith(f"{bridge.folder}/")
    ]
    return replace(bridge, last_bus=max(below, default=bridge.secondary_bus))


def _lay_out_root(profile: Profile, root: Root, cards: dict[str, Card]) -> Iterator[PlacedFunction]:
    domain, first = (int(part, 16) for part in root.bus.split(":"))
    base = f"sys/devices/pci{domain:04x}:{first:02x}"
    vendor, port_device, host_device = _CHIPSETS.get(profile.cpu.vendor, _CHIPSETS["GenuineIntel"])
    node = root.numa_node
    bus = first

    def port(address: PciAddress, parent: str, kind: PortKind, ids: tuple[int, int], below: int) -> PlacedFunction:
        function = CardFunction(
            vendor=ids[0], device=ids[1], class_code=_BRIDGE, driver="pcieport", speed_gts=32.0, width=16
        )
        folder = f"{parent}/{address}"
        return PlacedFunction(
            address=address,
            folder=folder,
            numa_node=node,
            port=kind,
            function=function,
            secondary_bus=below,
            group=address,
        )

    host = PciAddress(domain, first, 0, 0)
    host_function = CardFunction(vendor=vendor, device=host_device, class_code=_HOST_BRIDGE)
    yield PlacedFunction(
        address=host,
        folder=f"{base}/{host}",
        numa_node=node,
        port=PortKind.INTEGRATED,
        function=host_function,
        group=host,
    )
    number = 0
    for slot in root.slots:
        card = _card(cards, slot.card, profile)
        if card.is_integrated:
            at = PciAddress.parse(f"{root.bus}:{slot.at or f'{16 + number:02x}.0'}")
            yield from _lay_out_card(slot.card, card, at, base, node)
            continue
        number += 1
        bus += 1
        root_port = port(PciAddress(domain, first, number, 0), base, PortKind.ROOT_PORT, (vendor, port_device), bus)
        yield root_port
        yield from _lay_out_card(slot.card, card, PciAddress(domain, bus, 0, 0), root_port.folder, node)
    for switch in root.switches:
        number += 1
        bus += 1
        root_port = port(PciAddress(domain, first, number, 0), base, PortKind.ROOT_PORT, (vendor, port_device), bus)
        upstream = port(PciAddress(domain, bus, 0, 0), root_port.folder, PortKind.UPSTREAM, _SWITCH, bus + 1)
        yield root_port
        yield upstream
        inner = bus + 1
        bus += 1
        for index, name in enumerate(switch.cards):
            bus += 1
            down = port(PciAddress(domain, inner, index, 0), upstream.folder, PortKind.DOWNSTREAM, _SWITCH, bus)
            yield down
            yield from _lay_out_card(
                name, _card(cards, name, profile), PciAddress(domain, bus, 0, 0), down.folder, node
            )


def _lay_out_card(name: str, card: Card, at: PciAddress, parent: str, node: int) -> Iterator[PlacedFunction]:
    kind = PortKind.INTEGRATED if card.is_integrated else PortKind.ENDPOINT
    next_function = at.function + len(card.functions)
    for index, function in enumerate(card.functions):
        address = PciAddress(at.domain, at.bus, at.device, at.function + index)
        yield PlacedFunction(
            address=address,
            folder=f"{parent}/{address}",
            numa_node=node,
            port=kind,
            function=function,
            card=name,
            group=at,
        )
        for number in range(function.nic.num_vfs if function.nic else 0):
            assert function.nic is not None
            vf = PciAddress(at.domain, at.bus, at.device + next_function // 8, next_function % 8)
            next_function += 1
            virtual = CardFunction(
                vendor=function.vendor,
                device=function.nic.vf_device,
                subsystem_vendor=function.subsystem_vendor,
                subsystem_device=function.subsystem_device,
                class_code=function.class_code,
                revision=function.revision,
                driver=function.nic.vf_driver or function.driver,
                nic=Nic(speed_mbps=function.nic.speed_mbps, has_carrier=function.nic.has_carrier),
            )
            yield PlacedFunction(
                address=vf,
                folder=f"{parent}/{vf}",
                numa_node=node,
                port=PortKind.ENDPOINT,
                function=virtual,
                card=name,
                physfn=address,
                vf_index=number,
                group=vf,
            )


def _card(cards: dict[str, Card], name: str, profile: Profile) -> Card:
    if name not in cards:
        raise ConfigError(
            f"profile {profile.name}: no card {name!r} in cards.toml",
            next_step=f"use one of {', '.join(sorted(cards))}",
        )
    return cards[name]
