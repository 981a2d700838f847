"""Devices that differ only in their names, and how groups of them reach each other: what the search
for a set walks on.

Two devices are alike when they have the same place, the same health and the same links to every
third device. Groups are interchangeable when, besides, their neighbourhoods look the same from
every side: then the earlier one may always take more, which halves the search for each such pair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from topobus.engine.alignment.devices.proximity import LINK_CLASSES, Reach, Site, site_rank
from topobus.values.device import Device
from topobus.values.health import HealthState

__all__ = ["Group", "Links", "Neighbours", "form_groups", "interchangeable"]


class Neighbours(Struct, frozen=True):
    """Another class in the same container: the places of its devices, and how many of them there
    will be.
    """

    sites: Mapping[Site, int]
    count: int


class Group(Struct, frozen=True):
    """Like devices, in the order in which they are taken.

    The first `musts` of them are wanted in any case.
    """

    devices: tuple[Device, ...]
    musts: int
    site: Site
    is_degraded: bool


class Links:
    """The links that a pool of devices reports, by pair.

    A link that only one side reports counts.
    """

    __slots__ = ("_by_pair",)

    def __init__(self, pool: Sequence[Device]) -> None:
        names = {device.name for device in pool}
        sums: dict[tuple[str, str], Reach] = {}
        for device in pool:
            for link in device.links:
                if link.peer in names:
                    old = sums.get((device.name, link.peer))
                    rank = LINK_CLASSES.index(link.kind)
                    sums[device.name, link.peer] = (
                        Reach(rank, link.bandwidth_gbps)
                        if old is None
                        else Reach(min(old.rank, rank), old.bandwidth_gbps + link.bandwidth_gbps)
                    )
        self._by_pair: dict[str, dict[str, Reach]] = {device.name: {} for device in pool}
        for (name, peer), own_total in sums.items():
            other_total = sums.get((peer, name), own_total)
            both = Reach(
                min(own_total.rank, other_total.rank), max(own_total.bandwidth_gbps, other_total.bandwidth_gbps)
            )
            self._by_pair[name][peer] = both
            self._by_pair[peer][name] = both

    @property
    def is_empty(self) -> bool:
        """Say whether no device reports a link."""
        return not any(self._by_pair.values())

    def of(self, name: str) -> Mapping[str, Reach]:
        """The links of one device, by peer."""
        return self._by_pair[name]

    def between(self, first: str, second: str, one_site: Site, other_site: Site) -> Reach:
        """A reported link where it is closer than the place, else the place."""
        place = site_rank(one_site, other_site)
        link = self._by_pair[first].get(second)
        return Reach(place, 0.0) if link is None else Reach(min(place, link.rank), link.bandwidth_gbps)


def form_groups(
    pool: Sequence[Device], musts: Collection[str], sites: Mapping[str, Site], links: Links, order: Mapping[str, int]
) -> list[Group]:
    """Put like devices together.

    Shapes: order — the position of each name. Where nothing else decides, the first ones are taken
            first.
    """
    groups: list[list[Device]] = []
    by_kind: dict[tuple[Site, bool], list[list[Device]]] = {}
    for device in sorted(pool, key=lambda device: (device.name not in musts, order[device.name])):
        kind = (sites[device.name], device.health.state is HealthState.DEGRADED)
        for group in by_kind.setdefault(kind, []):
            if links.is_empty or (
                _are_alike(links, group[0].name, device.name) and _are_linked_alike(links, group, device)
            ):
                group.append(device)
                break
        else:
            group = [device]
            by_kind[kind].append(group)
            groups.append(group)
    formed = [
        Group(
            tuple(group),
            sum(device.name in musts for device in group),
            sites[group[0].name],
            group[0].health.state is HealthState.DEGRADED,
        )
        for group in groups
    ]
    return sorted(
        formed,
        key=lambda each_group: (
            each_group.is_degraded,
            -each_group.musts,
            -len(each_group.devices),
            order[each_group.devices[0].name],
        ),
    )


def _are_alike(links: Links, first: str, second: str) -> bool:
    own_reaches, other_reaches = links.of(first), links.of(second)
    return len(own_reaches) == len(other_reaches) and all(
        name == second or other_reaches.get(name) == link for name, link in own_reaches.items()
    )


def _are_linked_alike(links: Links, group: Sequence[Device], device: Device) -> bool:
    """Inside a group of three or more every pair must be linked alike."""
    return all(links.of(a.name).get(b.name) == links.of(a.name).get(device.name) for a, b in pairwise(group))


def interchangeable(
    groups: Sequence[Group],
    reach: Sequence[Sequence[Reach]],
    neighbours: Sequence[Neighbours],
    free: Mapping[Site, int],
) -> list[int]:
    """For each group the latest earlier group that it could change places with, or -1."""
    looks = [_neighbourhood(group, neighbours, free) for group in groups]
    before: list[int] = []
    for place, row in enumerate(reach):
        twin = next(
            (
                earlier
                for earlier in range(place - 1, -1, -1)
                if looks[earlier] == looks[place]
                and row[place] == reach[earlier][earlier]
                and all(
                    row[other] == reach[earlier][other] for other in range(len(groups)) if other not in (place, earlier)
                )
            ),
            -1,
        )
        before.append(twin)
    return before


def _neighbourhood(group: Group, neighbours: Sequence[Neighbours], free: Mapping[Site, int]) -> tuple[object, ...]:
    """What a group's neighbourhood looks like from outside, names and addresses aside."""
    site = group.site
    levels: list[int] = []
    for sites in (free, *(neighbours.sites for neighbours in neighbours)):
        for key in ("switch", "root", "parent"):
            place = getattr(site, key)
            levels.append(sum(count for other, count in sites.items() if getattr(other, key) == place) if place else -1)
    return (len(group.devices), group.musts, group.is_degraded, site.numa, site.sockets, tuple(levels))
