"""Describes the partitions of an AMD card as devices: those that it has, and those that it would
have in a mode that it can be brought into.

A partition that is made on demand is described only by facts that no mode of the card changes: an
equal share of memory and compute units, and no id of its own. So a switch of modes changes no
ResourceSlice.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from topobus.devicekit.pci import pci_device, pci_device_name
from topobus.gpu.amd.amd_cards import AmdCard, AmdPartition
from topobus.sysfs.kfd import KfdNode
from topobus.values.device import AttributeValue, Device, Link
from topobus.values.machine import PciDevice

__all__ = [
    "PARTITION",
    "CardFacts",
    "facts_of_whole",
    "partition_name",
    "possible_parts",
    "present_parts",
    "share",
    "target_of",
]

PARTITION = "partition"
"""The attribute `type` of a part."""
# The kernel gives partitions whole pages.
_PAGE_BYTES = 4096


class CardFacts(Struct, frozen=True, kw_only=True):
    """What all parts of a card have in common."""

    function: PciDevice
    driver: str
    name: str
    """Of the whole card."""
    model: str
    uuid: str
    memory_bytes: int
    memory_mode: str


def present_parts(
    facts: CardFacts, card: AmdCard, share_bytes: int, links: Mapping[str, tuple[Link, ...]]
) -> list[Device]:
    """Describe the partitions that a card has now, each by its own KFD node."""
    devices: list[Device] = []
    # Newer kernels give each partition its own id. An id that all of them share identifies none.
    ids = [part.node.unique_id for part in card.partitions]
    for part in card.partitions:
        node = part.node
        units = node.simd_count // node.simd_per_cu if node.simd_per_cu else 0
        unique = node.unique_id if ids.count(node.unique_id) == 1 else 0
        attributes = {**target_of(node), **_common(facts, card.mode, part.index, units)}
        memory_bytes = node.memory_bytes or share_bytes
        name = f"{facts.name}-{card.mode.lower() or 'xcp'}-{part.index}"
        devices.append(_part(facts, name, attributes, memory_bytes, links, uuid=f"GPU-{unique:016x}" if unique else ""))
    return devices


def possible_parts(
    facts: CardFacts, card: AmdCard, mode: str, count: int, links: Mapping[str, tuple[Link, ...]]
) -> list[Device]:
    """Describe the partitions that a card has in a mode, whether it is in that mode or not."""
    units = _units_of(card)
    target = target_of(card.nodes[0]) if card.nodes else {}
    return [
        _part(
            facts,
            f"{facts.name}-{mode.lower()}-{index}",
            {**target, **_common(facts, mode, index, units // count)},
            share(facts.memory_bytes, count),
            links,
        )
        for index in range(count)
    ]


def share(card_bytes: int, parts: int) -> int:
    """Divide a card's memory where KFD publishes no memory banks.

    Each partition gets the same, in whichever memory mode, also where KFD lists fewer partitions
    than there are.
    """
    return card_bytes // parts // _PAGE_BYTES * _PAGE_BYTES


def partition_name(device_class: str, card: AmdCard, partition: AmdPartition) -> str:
    """Name a partition after its card and mode, because a partition of another mode is another
    device.
    """
    return f"{pci_device_name(device_class, card.address)}-{card.mode.lower() or 'xcp'}-{partition.index}"


def facts_of_whole(card: AmdCard) -> dict[str, AttributeValue]:
    """Return the attributes of a whole card that KFD publishes: the compiler's target, and how many
    compute units it has.
    """
    units = _units_of(card)
    return {**(target_of(card.nodes[0]) if card.nodes else {}), **({"computeUnits": units} if units else {})}


def target_of(node: KfdNode) -> dict[str, AttributeValue]:
    """Return the attribute that names the compiler's target. Empty where KFD has no version."""
    return {"gfxTarget": _gfx_name(node.gfx_version)} if node.gfx_version else {}


def _units_of(card: AmdCard) -> int:
    return sum(node.simd_count // node.simd_per_cu for node in card.nodes if node.simd_per_cu)


def _common(facts: CardFacts, mode: str, index: int, units: int) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"type": PARTITION, "partitionIndex": index}
    if mode:
        attributes["partitionMode"] = mode
    if facts.memory_mode:
        attributes["memoryMode"] = facts.memory_mode[:64]
    if facts.uuid:
        attributes["parentUuid"] = facts.uuid[:64]
    if units:
        attributes["computeUnits"] = units
    return attributes


def _part(
    facts: CardFacts,
    name: str,
    attributes: dict[str, AttributeValue],
    memory_bytes: int,
    links: Mapping[str, tuple[Link, ...]],
    *,
    uuid: str = "",
) -> Device:
    return pci_device(
        facts.function,
        device_class="gpu",
        driver=facts.driver,
        vendor="amd",
        model=facts.model,
        name=name,
        uuid=uuid,
        parent=facts.name,
        partition_of=facts.name,
        links=links.get(name, ()),
        attributes=attributes,
        capacity={"memory": memory_bytes} if memory_bytes else {},
    )


def _gfx_name(version: int) -> str:
    """Turn KFD's number into the compiler's target: 90010 is gfx90a (decimal major, then minor and
    hexadecimal stepping).

    >>> _gfx_name(90010), _gfx_name(110000)
    ('gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
