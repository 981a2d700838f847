"""Choose k devices of one class: an exact, deterministic choice that asks no driver.

Goal, the first difference decides: (1) fewest degraded devices; (2) widest bottleneck link among the chosen; (3) highest total bandwidth; (4) closest to
the devices of other classes in the same container, chosen or still to be chosen; (5) least damage to what can be asked for later, single devices
included; (6) the smallest names. A class whose devices report no links puts (4) before (2): a NIC belongs next to its GPU, not next to another NIC.
An unknown link is the worst.

Devices that nothing tells apart but their names form one symmetry class, so the search walks counts a class, not subsets. It is exact up to
`SEARCH_BUDGET` count vectors; beyond, the best of those walked (the dense ones come first) is taken and `Choice.is_exact` is False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from topobus.domain.alignment.locality import FARTHEST, LINK_CLASSES, Reach, Site, link_between, matching
from topobus.domain.device import Device, LinkClass
from topobus.domain.health import HealthState
from topobus.domain.idset import NodeSet

__all__ = ["SEARCH_BUDGET", "Choice", "Company", "Split", "choose_devices", "split_by_affinity"]

SEARCH_BUDGET = 20_000
"""Count vectors scored at most in one choice; 16 devices of which no two are alike need 12,870 at most."""

# Sets that workloads ask for (powers of two); damage is counted in how many of each fit under one switch, root and NUMA node.
_LATER_SIZES = (8, 4, 2)


class Split(Struct, frozen=True, kw_only=True):
    """Devices by kubelet's buckets, each sorted by name."""

    aligned: tuple[str, ...]
    unaligned: tuple[str, ...]
    no_affinity: tuple[str, ...]


class Company(Struct, frozen=True):
    """Another class in the same container: where its devices sit, and how many of them there will be."""

    sites: Mapping[Site, int]
    count: int


class Choice(Struct, frozen=True, kw_only=True):
    """The devices chosen and what decided."""

    names: tuple[str, ...]
    bottleneck: LinkClass | None = None
    """The worst link among them; None for fewer than two."""
    bandwidth_gbps: float = 0.0
    pairs: tuple[int, ...] = ()
    """Pairs made with devices of other classes, by rank from same switch to farthest."""
    tied: int = 0
    """How many other choices were as good and lost by name."""
    is_exact: bool = True


def split_by_affinity(devices: Iterable[Device], nodes: NodeSet | None) -> Split:
    """Split devices into aligned, unaligned and without affinity, as kubelet does; a device is aligned when any of its nodes is in the mask.

    Source: kubelet 1.36 devicemanager filterByAffinity; without a mask all are "without affinity".
    """
    buckets: tuple[list[str], list[str], list[str]] = ([], [], [])
    for one in devices:
        if nodes is None or not one.numa_nodes:
            buckets[2].append(one.name)
        else:
            buckets[1 if one.numa_nodes.isdisjoint(nodes) else 0].append(one.name)
    aligned, unaligned, rest = (tuple(sorted(one)) for one in buckets)
    return Split(aligned=aligned, unaligned=unaligned, no_affinity=rest)


def choose_devices(
    candidates: Sequence[Device],
    sites: Mapping[str, Site],
    count: int,
    *,
    must_include: Sequence[Device] = (),
    company: Sequence[Company] = (),
    free: Sequence[Device] = (),
) -> Choice:
    """Choose `count` devices, those that must be included among them.

    Shapes:  candidates — may or may not hold `must_include`; sites — of all devices named; free — all free devices of the class, for the damage.
    Result:  `count` names, sorted; fewer only when there are fewer.
    """
    musts = {one.name for one in must_include}
    pool = [*must_include, *(one for one in candidates if one.name not in musts)]
    count = max(len(musts), min(count, len(pool)))
    if count == len(pool) or count == 0:
        return _report(pool[:count] if count else [], sites, company)
    groups = _symmetry_classes(pool, musts, sites)
    return _Search(groups, sites, count, company, free or pool).run()


class _Group(Struct, frozen=True):
    """Devices that nothing tells apart but their names, smallest names first; the first `musts` of them are wanted in any case."""

    devices: tuple[Device, ...]
    musts: int
    site: Site
    is_degraded: bool


def _symmetry_classes(pool: Sequence[Device], musts: Collection[str], sites: Mapping[str, Site]) -> list[_Group]:
    """Group twins: same place, same health, and the same links to every third device."""
    rows = {one.name: _row(one, pool) for one in pool}
    groups: list[list[Device]] = []
    by_kind: dict[tuple[Site, bool], list[list[Device]]] = {}
    for one in sorted(pool, key=lambda device: (device.name not in musts, device.name)):
        kind = (sites[one.name], one.health.state is HealthState.DEGRADED)
        for group in by_kind.setdefault(kind, []):
            if _are_twins(rows[group[0].name], rows[one.name], group[0].name, one.name) and _keeps_inner(group, one, rows):
                group.append(one)
                break
        else:
            group = [one]
            by_kind[kind].append(group)
            groups.append(group)
    return [
        _Group(tuple(group), sum(one.name in musts for one in group), sites[group[0].name], group[0].health.state is HealthState.DEGRADED)
        for group in groups
    ]


def _row(device: Device, pool: Sequence[Device]) -> dict[str, tuple[int, float]]:
    """What a device's links say, both directions seen from it."""
    if not device.links and not any(one.links for one in pool):
        return {}
    row: dict[str, tuple[int, float]] = {}
    for other in pool:
        if other.name == device.name:
            continue
        found = [link for holder, peer in ((device, other.name), (other, device.name)) for link in holder.links if link.peer == peer]
        if found:
            mine = sum(link.bandwidth_gbps for link in device.links if link.peer == other.name)
            theirs = sum(link.bandwidth_gbps for link in other.links if link.peer == device.name)
            row[other.name] = (min(LINK_CLASSES.index(link.kind) for link in found), max(mine, theirs))
    return row


def _are_twins(one: Mapping[str, tuple[int, float]], other: Mapping[str, tuple[int, float]], one_name: str, other_name: str) -> bool:
    if len(one) != len(other):
        return False
    return all(name == other_name or other.get(name) == link for name, link in one.items())


def _keeps_inner(group: Sequence[Device], one: Device, rows: Mapping[str, Mapping[str, tuple[int, float]]]) -> bool:
    """Inside a class of three or more every pair must be linked alike."""
    return all(rows[a.name].get(b.name) == rows[a.name].get(one.name) for a, b in pairwise(group))


class _Search:
    """Walk count vectors over the symmetry classes, dense ones first, and keep the best."""

    def __init__(
        self, groups: Sequence[_Group], sites: Mapping[str, Site], count: int, company: Sequence[Company], free: Sequence[Device]
    ) -> None:
        self.groups = sorted(groups, key=lambda one: (one.is_degraded, -one.musts, -len(one.devices), one.devices[0].name))
        self.sites = sites
        self.count = count
        self.company = company
        self.free = Counter(sites[one.name] for one in free)
        self.has_links = any(device.links for group in groups for device in group.devices)
        self.links = [[self._link(one, other) for other in self.groups] for one in self.groups]
        self.widest = max((link.bandwidth_gbps for row in self.links for link in row), default=0.0)
        self.room = [0] * (len(self.groups) + 1)
        self.owed = [0] * (len(self.groups) + 1)
        for place in reversed(range(len(self.groups))):
            self.room[place] = self.room[place + 1] + len(self.groups[place].devices)
            self.owed[place] = self.owed[place + 1] + self.groups[place].musts
        self.budget = SEARCH_BUDGET
        self.best: tuple[object, ...] | None = None
        self.best_counts: tuple[int, ...] = ()
        self.best_names: tuple[str, ...] = ()
        self.ties = 0

    def run(self) -> Choice:
        """Search and report."""
        self._walk(0, self.count, [], 0, 0, 0.0)
        chosen = [device for group, count in zip(self.groups, self.best_counts, strict=True) for device in group.devices[:count]]
        report = _report(chosen, self.sites, self.company)
        return Choice(
            names=report.names,
            bottleneck=report.bottleneck,
            bandwidth_gbps=report.bandwidth_gbps,
            pairs=report.pairs,
            tied=self.ties,
            is_exact=self.budget > 0,
        )

    def _link(self, one: _Group, other: _Group) -> Reach:
        if one is other:
            if len(one.devices) < 2:
                return Reach(0, 0.0)
            return link_between(one.devices[0], one.devices[1], one.site, one.site)
        return link_between(one.devices[0], other.devices[0], one.site, other.site)

    def _walk(self, place: int, left: int, counts: list[int], degraded: int, rank: int, bandwidth: float) -> None:
        if left == 0 and self.owed[place] == 0:
            self._score((*counts, *([0] * (len(self.groups) - place))), degraded, rank, bandwidth)
            return
        if place == len(self.groups) or self.budget <= 0 or self._is_hopeless(left, degraded, rank, bandwidth):
            return
        group = self.groups[place]
        most = min(len(group.devices), left - self.owed[place + 1])
        least = max(group.musts, left - self.room[place + 1])
        for count in range(most, least - 1, -1):
            inner = self.links[place][place]
            new_rank, new_bandwidth = rank, bandwidth
            if count > 1:
                new_rank = max(new_rank, inner.rank)
                new_bandwidth += inner.bandwidth_gbps * count * (count - 1) / 2
            if count:
                for earlier, taken in enumerate(counts):
                    if taken:
                        link = self.links[place][earlier]
                        new_rank = max(new_rank, link.rank)
                        new_bandwidth += link.bandwidth_gbps * count * taken
            counts.append(count)
            self._walk(place + 1, left - count, counts, degraded + (count if group.is_degraded else 0), new_rank, new_bandwidth)
            counts.pop()

    def _is_hopeless(self, left: int, degraded: int, rank: int, bandwidth: float) -> bool:
        """Say whether nothing below can win: only the parts of the key that grow on the way down are looked at."""
        if self.best is None:
            return False
        best_degraded = self.best[0]
        if not isinstance(best_degraded, int) or degraded != best_degraded:
            return isinstance(best_degraded, int) and degraded > best_degraded
        if not self._links_first():
            return False
        best_rank, best_bandwidth = self.best[1], self.best[2]
        if not isinstance(best_rank, int) or not isinstance(best_bandwidth, float):
            return False
        taken = self.count - left
        reach = bandwidth + (taken * left + left * (left - 1) / 2) * self.widest
        return rank > best_rank or (rank == best_rank and -reach > best_bandwidth)

    def _links_first(self) -> bool:
        return self.has_links or not self.company

    def _score(self, counts: tuple[int, ...], degraded: int, rank: int, bandwidth: float) -> None:
        self.budget -= 1
        links: tuple[object, ...] = (rank, -bandwidth)
        if self._links_first() and self.best is not None and (degraded, *links) > self.best[:3]:
            return
        taken: dict[Site, int] = {}
        for group, count in zip(self.groups, counts, strict=True):
            if count:
                taken[group.site] = taken.get(group.site, 0) + count
        closeness = _closeness(taken, self.company)
        head = (degraded, *links, closeness) if self._links_first() else (degraded, closeness, *links)
        key = (*head, _damage(self.free, taken))
        if self.best is not None and key > self.best:
            return
        names = tuple(sorted(one.name for group, count in zip(self.groups, counts, strict=True) for one in group.devices[:count]))
        is_tie = self.best is not None and key == self.best
        self.ties = self.ties + 1 if is_tie else 0
        if not is_tie or names < self.best_names:
            self.best, self.best_counts, self.best_names = key, counts, names


def _closeness(taken: Mapping[Site, int], company: Sequence[Company]) -> tuple[int, ...]:
    """Fewer far pairs first: counts of pairs by rank, the farthest first, over all other classes; pairs that cannot be made are no one's fault."""
    total = [0] * FARTHEST
    mine = sum(taken.values())
    for other in company:
        for rank, pairs in enumerate(matching(taken, other.sites, min(mine, other.count))):
            total[rank] += pairs
    return tuple(reversed(total))


def _damage(free: Mapping[Site, int], taken: Mapping[Site, int]) -> tuple[int, ...]:
    """What is left for later: sets of 8, 4, 2 that still fit under one switch, one root, one NUMA node; more is better, so negative counts."""
    left = {site: count - taken.get(site, 0) for site, count in free.items()}
    rows: list[int] = []
    for size in _LATER_SIZES:
        for level in (1, 2, 3):
            rooms: dict[str | int, int] = {}
            for site, count in left.items():
                key = site.key(level)
                if key:
                    rooms[key] = rooms.get(key, 0) + count
            rows.append(-sum(count // size for count in rooms.values()))
    return tuple(rows)


def _report(chosen: Sequence[Device], sites: Mapping[str, Site], company: Sequence[Company]) -> Choice:
    rank = -1
    bandwidth = 0.0
    for place, one in enumerate(chosen):
        for other in chosen[place + 1 :]:
            link = link_between(one, other, sites[one.name], sites[other.name])
            rank = max(rank, link.rank)
            bandwidth += link.bandwidth_gbps
    taken = Counter(sites[one.name] for one in chosen)
    pairs = tuple(reversed(_closeness(taken, company))) if company else ()
    return Choice(
        names=tuple(sorted(one.name for one in chosen)),
        bottleneck=LINK_CLASSES[rank] if rank >= 0 else None,
        bandwidth_gbps=bandwidth,
        pairs=pairs,
    )
