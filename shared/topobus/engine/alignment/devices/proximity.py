"""How close two devices are: by the links that drivers report, else by the devices' places in the
PCIe tree and among NUMA nodes.

An unknown place never counts as close: two devices without a switch are not under the same switch,
a device without a NUMA node is near nothing. The ranks are the positions of `LinkClass`, 0 (fabric)
being the closest and 5 (across the system, or unknown) the farthest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from topobus.values.device import Device, LinkClass
from topobus.values.view import CoreView

__all__ = [
    "FARTHEST",
    "LINK_CLASSES",
    "Reach",
    "Site",
    "matching",
    "pairs_by_switch",
    "site_of",
    "site_rank",
    "socket_of_nodes",
]

LINK_CLASSES: tuple[LinkClass, ...] = tuple(LinkClass)
"""Widest first; a rank is a position here."""
FARTHEST = len(LINK_CLASSES) - 1

_SWITCH, _ROOT, _NUMA, _SOCKET = (
    LINK_CLASSES.index(link_class)
    for link_class in (LinkClass.SWITCH, LinkClass.ROOT, LinkClass.NUMA, LinkClass.SOCKET)
)


class Site(Struct, frozen=True):
    """A device's place, one key for each level. Empty or None is unknown.

    Devices with equal sites are equally close to everything by place.
    """

    switch: str
    root: str
    numa: int
    """Bits of the NUMA nodes that the device is local to; 0 is unknown."""
    sockets: int
    parent: str = ""

    def key(self, level: int) -> str | int:
        """The key at a level (a rank). Falsy when unknown."""
        if level == _SWITCH:
            return self.switch or self.parent
        if level == _ROOT:
            return self.root
        return self.numa if level == _NUMA else self.sockets


class Reach(Struct, frozen=True):
    """How two devices reach each other."""

    rank: int
    bandwidth_gbps: float


def socket_of_nodes(cores: Iterable[CoreView]) -> dict[int, int]:
    """Map each NUMA node that has CPUs to the bits of its sockets. Cost: O(cores)."""
    sockets: dict[int, int] = {}
    for core in cores:
        if core.numa_node is not None and core.socket is not None:
            sockets[core.numa_node] = sockets.get(core.numa_node, 0) | 1 << core.socket
    return sockets


def site_of(device: Device, sockets: Mapping[int, int]) -> Site:
    """Return a device's place.

    Shapes: sockets — node id to bits of socket ids, from `socket_of_nodes`. An unknown part of the
            place is empty or 0, and near to nothing.
    """
    bits = 0
    for node in device.numa_nodes or ():
        bits |= sockets.get(node, 0)
    return Site(
        switch=str(device.pcie_switch) if device.pcie_switch is not None else "",
        root=device.pcie_root,
        numa=device.numa_nodes.bits if device.numa_nodes is not None else 0,
        sockets=bits,
        # Parts of one card are as close as the card is to itself, also
        # where there is no switch above it.
        parent=f"{device.device_class}/{device.parent}" if device.parent else "",
    )


def site_rank(first: Site, second: Site) -> int:
    """Rank the distance of two places. Unknown is the farthest.

    >>> site_rank(Site("", "pci0000:17", 1, 1), Site("", "pci0000:17", 1, 1)) == LINK_CLASSES.index(LinkClass.ROOT)
    True
    """
    if (first.switch and first.switch == second.switch) or (first.parent and first.parent == second.parent):
        return _SWITCH
    if first.root and first.root == second.root:
        return _ROOT
    if first.numa & second.numa:
        return _NUMA
    return _SOCKET if first.sockets & second.sockets else FARTHEST


def matching(counts: Mapping[Site, int], others: Mapping[Site, int], pairs: int) -> tuple[int, ...]:
    """Pair devices of two classes, as close as possible.

    Return how many pairs are made at each rank from switch to farthest. Places nest (switch in root
    in NUMA node in socket), so pairing at the closest level first is optimal.

    >>> here, there = Site("s1", "r1", 1, 1), Site("s2", "r2", 1, 1)
    >>> matching({here: 2}, {here: 1, there: 1}, 2)
    (1, 0, 1, 0, 0)
    """
    left, right = dict(counts), dict(others)
    pairs_by_rank: list[int] = []
    wanted = pairs
    for level in (_SWITCH, _ROOT, _NUMA, _SOCKET):
        count = 0
        for key, sites in _by_key(left, level).items():
            facing = [site for site in right if right[site] and _is_common(site.key(level), key)]
            for site in sites:
                for peer in facing:
                    moved = min(left[site], right[peer], wanted - count)
                    left[site] -= moved
                    right[peer] -= moved
                    count += moved
        pairs_by_rank.append(count)
        wanted -= count
    pairs_by_rank.append(min(wanted, sum(left.values()), sum(right.values())))
    return tuple(pairs_by_rank)


def _by_key(sites: Mapping[Site, int], level: int) -> dict[str | int, list[Site]]:
    grouped: dict[str | int, list[Site]] = {}
    for site, count in sites.items():
        key = site.key(level)
        if count and key:
            grouped.setdefault(key, []).append(site)
    return grouped


def _is_common(first: str | int, second: str | int) -> bool:
    if isinstance(first, int) and isinstance(second, int):
        return bool(first & second)
    return bool(first) and first == second


def pairs_by_switch(
    devices: Sequence[tuple[str, Site]], others: Sequence[tuple[str, Site]]
) -> tuple[tuple[str, str, str], ...]:
    """List (our device, their device, switch) for pairs under the same switch, each device in at
    most one pair, by name.
    """
    free = list(others)
    pairs: list[tuple[str, str, str]] = []
    for name, site in devices:
        peer = next((other for other in free if site.switch and other[1].switch == site.switch), None)
        if peer is not None:
            free.remove(peer)
            pairs.append((name, peer[0], site.switch))
    return tuple(pairs)
