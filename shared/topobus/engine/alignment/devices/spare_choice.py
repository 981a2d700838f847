"""Chooses the spares of a class: fit, free devices that are withheld to replace an equal one that
gets sick.

Equal devices are those of one driver, vendor, model, role and pool, within a node, a NUMA node or a
switch, as the operator sets it. A sick device counts once: as long as a device of a group is not
fit, one spare fewer of the group is withheld. Only whole devices are spares: a part of a card, or a
share, is of no use when the card gets sick.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from topobus.engine.alignment.devices.proximity import site_of, site_rank
from topobus.values.device import Device, DeviceRole

__all__ = ["SpareSettings", "odd_spares", "with_spares"]

_Group = tuple[str, ...]


class SpareSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that are withheld to replace one that gets sick; class cpu has none."""

    count: Annotated[int, Meta(ge=0)] = 0
    """How many of equal devices (same model, pool and use) no new owner gets, as long as none of
    them is sick or withheld by an operator; each that is releases one spare. At least one of equal
    devices is always offered. 0: a spare is idle, which is the operator's decision."""
    per: Literal["node", "numa", "switch"] = "node"
    """Within what they are counted: the node, each NUMA node, or each PCIe switch (each root
    complex, where there is no switch). `node`: fewest devices are idle, and the spare nearest to
    the sick device is released."""


def with_spares(
    devices: Sequence[Device],
    before: Iterable[Device],
    *,
    held: Collection[str] | None,
    settings: SpareSettings,
    sockets: Mapping[int, int],
) -> tuple[Device, ...]:
    """Mark the spares among the devices of a class, and unmark what is none any more.

    A spare stays one until an owner has it, it gets sick, or fewer are wanted: then those nearest
    to the devices that got sick since are released. New ones are the last by name, because claims
    are given the first. At least one device of a group is offered.

    Shapes: before — the devices of the previous step, with its spares; held — devices that an owner
            has, None while that is unknown (then no device becomes a spare); sockets — as
            `socket_of_nodes` returns them.
    Order: devices as they came, which is by name.
    Errors: raises nothing.
    Cost: O(devices), and O(spares of the group) for each device that got sick.
    """
    groups: dict[_Group, list[Device]] = {}
    for device in devices if settings.count else ():
        if _is_whole(device):
            groups.setdefault(_group_of(device, settings), []).append(device)
    earlier = tuple(before)
    kept = {device.name for device in earlier if device.is_spare}
    was_fit = {device.name for device in earlier if device.is_fit}
    names: set[str] = set()
    for group in groups.values():
        sick = [device for device in group if not device.is_fit]
        count = max(0, min(settings.count, len(group) - 1) - len(sick))
        free = [device for device in reversed(group) if device.is_fit and device.name not in (held or ())]
        spares = [device for device in free if device.name in kept]
        if held is not None:
            spares += [device for device in free if device.name not in kept][: max(0, count - len(spares))]
        for device in sick if len(spares) > count else ():
            if device.name in was_fit and len(spares) > count:
                place = site_of(device, sockets)
                spares.remove(min(spares, key=lambda spare: (site_rank(site_of(spare, sockets), place), spare.name)))
        names |= {device.name for device in spares[:count]}
    return tuple(
        device if device.is_spare == (device.name in names) else structs.replace(device, is_spare=device.name in names)
        for device in devices
    )


def odd_spares(devices: Sequence[Device], settings: SpareSettings) -> tuple[str, ...]:
    """Report that no device can ever be a spare though the operator wants some."""
    groups = [_group_of(device, settings) for device in devices if _is_whole(device)]
    if not settings.count or not devices or len(set(groups)) < len(groups):
        return ()
    place = {"node": "this node", "numa": "a NUMA node", "switch": "a PCIe switch"}[settings.per]
    return (f"spares: no two whole devices of {place} are equal, so none is withheld",)


def _is_whole(device: Device) -> bool:
    is_part = device.parent or device.partition_of or device.consumes
    is_shared = device.allows_multiple or device.sharing is not None
    return not is_part and not is_shared and device.role is not DeviceRole.MANAGEMENT


def _group_of(device: Device, settings: SpareSettings) -> _Group:
    places = {"node": "", "numa": device.numa_nodes, "switch": device.pcie_switch or device.pcie_root}
    return (device.driver, device.vendor, device.model, device.role, device.pool, str(places[settings.per]))
