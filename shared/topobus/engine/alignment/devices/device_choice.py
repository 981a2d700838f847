"""Choose k devices of one class: an exact, deterministic choice that asks no driver.

Goal, the first difference decides: (1) fewest degraded devices; (2) widest bottleneck link among
the chosen; (3) highest total bandwidth; (4) closest to the devices of other classes in the same
container, chosen or still to be chosen; (5) least damage to what can be asked for later, single
devices included; (6) the smallest names, of groups that are alike the one with the smallest name
giving most. A class whose devices report no links puts (4) before (2): a NIC belongs next to its
GPU, not next to another NIC. An unknown link is the worst. With `is_from_end` (6) is reversed: the
largest names. For a single device, which has no link to compare, (6) then goes before (5).

The search walks counts for each symmetry class, not subsets, and cuts branches that cannot win. It
is exact up to `SEARCH_BUDGET` count vectors. Beyond, the best of those walked (the dense ones come
first) is taken and `Choice.is_exact` is False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from topobus.engine.alignment.devices.device_groups import Group, Links, Neighbours, form_groups, interchangeable
from topobus.engine.alignment.devices.proximity import FARTHEST, LINK_CLASSES, Reach, Site, matching
from topobus.values.device import Device, LinkClass
from topobus.values.idset import NodeSet

__all__ = ["SEARCH_BUDGET", "Choice", "Neighbours", "Split", "choose_devices", "split_by_affinity"]

SEARCH_BUDGET = 20_000
"""Count vectors scored at most in one choice; 16 devices of which no two are alike need 12,870 at
most."""

# Sets that workloads ask for (powers of two); damage is counted in how many of each fit under
# one switch, root and NUMA node.
_LATER_SIZES = (8, 4, 2)
_LATER_LEVELS = (1, 2, 3)


class Split(Struct, frozen=True, kw_only=True):
    """Devices by kubelet's buckets, each sorted by name."""

    aligned: tuple[str, ...]
    unaligned: tuple[str, ...]
    no_affinity: tuple[str, ...]


class Choice(Struct, frozen=True, kw_only=True):
    """The chosen devices and the reason for the choice."""

    names: tuple[str, ...]
    bottleneck: LinkClass | None = None
    """The worst link among them; None for fewer than two."""
    bandwidth_gbps: float = 0.0
    pairs: tuple[int, ...] = ()
    """Pairs made with devices of other classes, by rank from same switch to farthest."""
    tied: int = 0
    """How many other choices were as good and lost by name; choices that differ only in groups that
    are alike count once."""
    is_exact: bool = True


def split_by_affinity(devices: Iterable[Device], nodes: NodeSet | None) -> Split:
    """Split devices into aligned, unaligned and without affinity, as kubelet does.

    A device is aligned when any of its nodes is in the mask.

    Shapes: nodes — the affinity; None puts all devices into "without affinity".
    Order: each bucket is sorted by name, whatever the order of devices.
    Source: kubelet 1.36 devicemanager/manager.go, filterByAffinity.

    >>> split_by_affinity([Device(name="a", device_class="gpu", numa_nodes=NodeSet(0)), Device(name="b", device_class="gpu")], NodeSet(1))
    Split(aligned=(), unaligned=('a',), no_affinity=('b',))
    """  # noqa: E501
    buckets: tuple[list[str], list[str], list[str]] = ([], [], [])
    for device in devices:
        if nodes is None or not device.numa_nodes:
            buckets[2].append(device.name)
        else:
            buckets[1 if device.numa_nodes.isdisjoint(nodes) else 0].append(device.name)
    aligned, unaligned, rest = (tuple(sorted(bucket)) for bucket in buckets)
    return Split(aligned=aligned, unaligned=unaligned, no_affinity=rest)


def choose_devices(
    candidates: Sequence[Device],
    sites: Mapping[str, Site],
    count: int,
    *,
    must_include: Sequence[Device] = (),
    neighbours: Sequence[Neighbours] = (),
    free: Sequence[Device] = (),
    is_from_end: bool = False,
) -> Choice:
    """Choose `count` devices, those that must be included among them.

    Shapes: candidates — may or may not hold `must_include`; sites — of all devices named; free —
            all free devices of the class, for the damage; neighbours — the devices of the
            container's other classes, chosen or still to be chosen; is_from_end — ties are won by
            the largest names instead of the smallest.
    Units: bandwidths in Gbit/s.
    Order: independent of the order of candidates.
    Result: `count` names, sorted. Fewer only when there are fewer.
    Errors: raises nothing. A search that its bound cut has `is_exact` False.
    Cost: at most `SEARCH_BUDGET` vectors of counts for each symmetry class, about 5 ms for 16
            devices of which no two are alike.
    """
    musts = {device.name for device in must_include}
    pool = [*must_include, *(candidate for candidate in candidates if candidate.name not in musts)]
    count = max(len(musts), min(count, len(pool)))
    links = Links(pool)
    if count == len(pool) or count == 0:
        return _report(pool[:count] if count else [], sites, neighbours, links)
    order = {name: place for place, name in enumerate(sorted((device.name for device in pool), reverse=is_from_end))}
    groups = form_groups(pool, musts, sites, links, order)
    return _Search(
        groups, sites, count, neighbours, free or pool, links, order, is_order_first=is_from_end and count == 1
    ).run()


class _Search:
    """Walk count vectors over the groups, dense ones first, and keep the best."""

    def __init__(
        self,
        groups: Sequence[Group],
        sites: Mapping[str, Site],
        count: int,
        neighbours: Sequence[Neighbours],
        free: Sequence[Device],
        links: Links,
        order: Mapping[str, int],
        *,
        is_order_first: bool,
    ) -> None:
        self.order = order
        self.is_order_first = is_order_first
        self.groups = groups
        self.sites = sites
        self.count = count
        self.neighbours = neighbours
        self.all_links = links
        self.links_first = not links.is_empty or not neighbours
        self.reach = [[self._reach(group, other) for other in groups] for group in groups]
        counted = Counter(sites[device.name] for device in free)
        self.twin = interchangeable(groups, self.reach, neighbours, counted)
        self.damage = _Damage(groups, counted)
        self.room = [0] * (len(groups) + 1)
        self.owed = [0] * (len(groups) + 1)
        for place in reversed(range(len(groups))):
            self.room[place] = self.room[place + 1] + len(groups[place].devices)
            self.owed[place] = self.owed[place + 1] + groups[place].musts
        self.bound = _Bound(groups, self.reach)
        self.budget = SEARCH_BUDGET
        self.best: tuple[object, ...] | None = None
        self.best_links: tuple[int, int, float] | None = None
        self.best_damage: tuple[int, ...] = ()
        self.best_counts: tuple[int, ...] = ()
        self.best_places: tuple[int, ...] = ()
        self.ties = 0

    def run(self) -> Choice:
        """Search and report."""
        self._walk(0, self.count, [], 0, 0, 0.0, [0.0] * len(self.groups))
        chosen = [
            device
            for group, count in zip(self.groups, self.best_counts, strict=True)
            for device in group.devices[:count]
        ]
        report = _report(chosen, self.sites, self.neighbours, self.all_links)
        return Choice(
            names=report.names,
            bottleneck=report.bottleneck,
            bandwidth_gbps=report.bandwidth_gbps,
            pairs=report.pairs,
            tied=self.ties,
            is_exact=self.budget > 0,
        )

    def _reach(self, first: Group, second: Group) -> Reach:
        if first is second and len(first.devices) < 2:
            return Reach(0, 0.0)
        peer = first.devices[1] if first is second else second.devices[0]
        return self.all_links.between(first.devices[0].name, peer.name, first.site, second.site)

    def _walk(
        self,
        place: int,
        left: int,
        counts: list[int],
        degraded: int,
        rank: int,
        bandwidth: float,
        gains: Sequence[float],
    ) -> None:
        """Take some of group `place`.

        Shapes: gains — each group's bandwidth to the devices taken so far.
        """
        if left == 0 and self.owed[place] == 0:
            self._score((*counts, *([0] * (len(self.groups) - place))), degraded, rank, bandwidth)
            return
        if (
            place == len(self.groups)
            or self.budget <= 0
            or self._is_hopeless(place, left, counts, degraded, rank, bandwidth, gains)
        ):
            return
        group, row = self.groups[place], self.reach[place]
        most = min(len(group.devices), left - self.owed[place + 1])
        if self.twin[place] >= 0:
            most = min(most, counts[self.twin[place]])
        for count in range(most, max(group.musts, left - self.room[place + 1]) - 1, -1):
            new_rank, new_bandwidth, new_gains = rank, bandwidth, gains
            if count:
                new_rank = max(
                    rank,
                    row[place].rank if count > 1 else 0,
                    *(row[e].rank for e, taken in enumerate(counts) if taken),
                    0,
                )
                new_bandwidth += row[place].bandwidth_gbps * count * (count - 1) / 2 + gains[place] * count
                new_gains = [gain + reach.bandwidth_gbps * count for gain, reach in zip(gains, row, strict=True)]
            counts.append(count)
            self._walk(
                place + 1,
                left - count,
                counts,
                degraded + (count if group.is_degraded else 0),
                new_rank,
                new_bandwidth,
                new_gains,
            )
            counts.pop()

    def _is_hopeless(
        self,
        place: int,
        left: int,
        counts: Sequence[int],
        degraded: int,
        rank: int,
        bandwidth: float,
        gains: Sequence[float],
    ) -> bool:
        """Say whether no branch below can win, by the sums that only grow on the way down and by
        the bandwidth still to be had.
        """
        if self.best_links is None:
            return False
        best_degraded, best_rank, best_bandwidth = self.best_links
        if degraded != best_degraded:
            return degraded > best_degraded
        if not self.links_first or rank < best_rank:
            return False
        reachable = bandwidth + self.bound.above(place, left, gains)
        if rank > best_rank or reachable < best_bandwidth:
            return True
        # With links at best equal the damage decides, and damage only grows on the way down.
        return (
            not self.neighbours
            and not self.is_order_first
            and reachable <= best_bandwidth * (1 + 1e-9)
            and self.damage.of(counts) > self.best_damage
        )

    def _taken(self, counts: Sequence[int]) -> dict[Site, int]:
        taken: dict[Site, int] = {}
        for group, count in zip(self.groups, counts, strict=False):
            if count:
                taken[group.site] = taken.get(group.site, 0) + count
        return taken

    def _score(self, counts: tuple[int, ...], degraded: int, rank: int, bandwidth: float) -> None:
        self.budget -= 1
        if (
            self.links_first
            and self.best_links is not None
            and (degraded, rank, -bandwidth) > (*self.best_links[:2], -self.best_links[2])
        ):
            return
        closeness = _closeness(self._taken(counts), self.neighbours)
        head = (degraded, rank, -bandwidth, closeness) if self.links_first else (degraded, closeness, rank, -bandwidth)
        damage = self.damage.of(counts)
        # The order of single devices leaves no ties, so the damage after it never decides.
        key = head if self.is_order_first else (*head, damage)
        if self.best is not None and key > self.best:
            return
        chosen = (
            device.name for group, count in zip(self.groups, counts, strict=True) for device in group.devices[:count]
        )
        places = tuple(sorted(self.order[name] for name in chosen))
        is_tie = self.best is not None and key == self.best
        self.ties = self.ties + 1 if is_tie else 0
        if not is_tie or places < self.best_places:
            self.best, self.best_counts, self.best_places = key, counts, places
            self.best_links, self.best_damage = (degraded, rank, bandwidth), damage


class _Bound:
    """The most bandwidth that the groups from a position on can add: for each device its links to
    the devices taken, and half of its best links to others.
    """

    def __init__(self, groups: Sequence[Group], reach: Sequence[Sequence[Reach]]) -> None:
        self.sizes = [len(group.devices) for group in groups]
        self.is_idle = not any(reach_.bandwidth_gbps for row in reach for reach_ in row)
        self._reach = reach
        self._rows: dict[tuple[int, int], list[float]] = {}

    def above(self, place: int, left: int, gains: Sequence[float]) -> float:
        """The bound for taking `left` more devices out of groups from `place` on."""
        if self.is_idle:
            return 0.0
        worth: list[float] = []
        for group in range(place, len(self.sizes)):
            rank = gains[group] + self._best_links(place, group, left - 1) / 2
            worth += [rank] * min(self.sizes[group], left)
        worth.sort(reverse=True)
        # A hair above the sum: bandwidths are floats, and adding them in
        # another order must not cut a tie.
        return sum(worth[:left]) * (1 + 1e-12)

    def _best_links(self, place: int, group: int, count: int) -> float:
        """The sum of the `count` best links of one device of the group to devices of groups from
        `place` on.
        """
        key = (place, group)
        sums = self._rows.get(key)
        if sums is None:
            row: list[float] = []
            for other in range(place, len(self.sizes)):
                row += [self._reach[group][other].bandwidth_gbps] * (self.sizes[other] - (other == group))
            row.sort(reverse=True)
            sums = [0.0]
            for amount in row:
                sums.append(sums[-1] + amount)
            self._rows[key] = sums
        return sums[min(count, len(sums) - 1)]


class _Damage:
    """The device sets that remain possible later: sets of 8, 4, 2 that still fit under one switch,
    one root, one NUMA node.

    The fewer are lost the better. Tables by group, so that the search pays a few additions per set.
    """

    def __init__(self, groups: Sequence[Group], free: Mapping[Site, int]) -> None:
        self.levels: list[tuple[list[int], list[list[tuple[int, ...]]]]] = []
        """A level: each group's room (-1: unknown), and each room's losses by how many are taken
        there."""
        for level in _LATER_LEVELS:
            rooms: dict[str | int, int] = {}
            for site, count in free.items():
                if key := site.key(level):
                    rooms[key] = rooms.get(key, 0) + count
            places = {key: place for place, key in enumerate(rooms)}
            losses = [
                [tuple(had // size - (had - taken) // size for size in _LATER_SIZES) for taken in range(had + 1)]
                for had in rooms.values()
            ]
            self.levels.append(([places.get(group.site.key(level), -1) for group in groups], losses))

    def of(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The sets lost, by size (the largest first) and level, when so many of each group are
        taken.
        """
        rows: list[tuple[int, ...]] = []
        for homes, losses in self.levels:
            taken = [0] * len(losses)
            for place, count in enumerate(counts):
                if count and homes[place] >= 0:
                    taken[homes[place]] += count
            # A must that is held already is not among the free: it loses nothing more.
            rows_left = [losses[room][min(count, len(losses[room]) - 1)] for room, count in enumerate(taken) if count]
            rows.append(tuple(map(sum, zip(*rows_left, strict=True))) if rows_left else (0,) * len(_LATER_SIZES))
        return tuple(row[size] for size in range(len(_LATER_SIZES)) for row in rows)


def _closeness(taken: Mapping[Site, int], neighbours: Sequence[Neighbours]) -> tuple[int, ...]:
    """Counts of pairs by rank, the farthest first, over all other classes, so that fewer far pairs
    sort first.

    Pairs that cannot be made are not counted.
    """
    if not neighbours:
        return ()
    total = [0] * FARTHEST
    count = sum(taken.values())
    for other in neighbours:
        for rank, pairs in enumerate(matching(taken, other.sites, min(count, other.count))):
            total[rank] += pairs
    return tuple(reversed(total))


def _report(
    chosen: Sequence[Device], sites: Mapping[str, Site], neighbours: Sequence[Neighbours], links: Links
) -> Choice:
    rank = -1
    bandwidth = 0.0
    for place, device in enumerate(chosen):
        for other in chosen[place + 1 :]:
            link = links.between(device.name, other.name, sites[device.name], sites[other.name])
            rank = max(rank, link.rank)
            bandwidth += link.bandwidth_gbps
    taken = Counter(sites[device.name] for device in chosen)
    return Choice(
        names=tuple(sorted(device.name for device in chosen)),
        bottleneck=LINK_CLASSES[rank] if rank >= 0 else None,
        bandwidth_gbps=bandwidth,
        pairs=tuple(reversed(_closeness(taken, neighbours))),
    )
