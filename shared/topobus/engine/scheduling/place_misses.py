"""Which places of a node were tried for claims that must lie together, and what each of them lacks:
the nearest miss first, places that lack the same as one.

A summary comes first. Machines have a place for each switch, and most of them lack the same:
without the grouping, the facts of eight switches filled a condition and hid the switch that lacked
a single device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topobus.engine.allocation.miss_reasons import UNCOUNTED, lacking, summarize
from topobus.values.outcome import Fact, Reason

__all__ = ["PlaceMiss", "describe_place_misses", "miss_of"]

# A condition is for a person: it shows this number of groups, and of names in each.
_SHOWN = 8
_SHOWN_NAMES = 4
# Stands between what a request wants and what there is of it.
_THERE_IS = ", found "


@dataclass(frozen=True)
class PlaceMiss:
    """One place that does not hold all of the claims."""

    place: str
    """`switch 0000:10:00.0`, `NUMA node 1`."""
    why: str
    lacking: int = UNCOUNTED
    """Devices that the first request without enough of them lacks there; the least is the nearest
    miss."""


def miss_of(node: str, place: str, reasons: Sequence[Reason]) -> PlaceMiss:
    """Describe what a place lacks without naming the place, so that places can be compared.

    >>> facts = {"wanted": 2, "found": 1}
    >>> miss_of("n", "NUMA node 0", [Reason(code="too-few-devices", message="node n: gpus wants 2, found 1 of 4", facts=facts)])
    PlaceMiss(place='NUMA node 0', why='gpus wants 2, found 1 of 4', lacking=1)
    """  # noqa: E501
    return PlaceMiss(place, summarize(reasons).removeprefix(f"node {node}: "), lacking(reasons))


def describe_place_misses(node: str, wish: str, misses: Sequence[PlaceMiss]) -> tuple[Reason, ...]:
    """Turn the misses of one node into reasons: the wish and the nearest miss, then what the others
    lack.

    Shapes: misses — in the order in which the places were tried; of equals the first comes first.
    """
    groups: dict[str, list[PlaceMiss]] = {}
    for miss in sorted(misses, key=lambda miss: miss.lacking):
        groups.setdefault(miss.why, []).append(miss)
    names = tuple(miss.place for miss in misses)
    facts: dict[str, Fact] = {
        "node": node,
        "wished": wish,
        "tried": len(misses),
        "domains": names[:_SHOWN],
    }
    if not misses:
        message = f"node {node}: {wish} cannot be kept: this node reports no such domain"
        return (Reason(code="locality-not-met", message=message, facts=facts),)
    # All are about one request, as a rule, so it is named once.
    request, there_is, _ = next(iter(groups)).partition(_THERE_IS)
    whys = [
        why if number == 0 else why.removeprefix(f"{request}, " if there_is else "")
        for number, why in enumerate(groups)
    ]
    texts = [(members, f"{_named(members)}: {why}") for members, why in zip(groups.values(), whys, strict=True)]
    head = f"nearest of {len(misses)} places: " if len(misses) > 1 else ""
    reasons = [
        Reason(
            code="locality-not-met",
            message=f"node {node}: nothing holds all of it by {wish}; {head}{texts[0][1]}",
            facts=facts,
        )
    ]
    reasons += [
        Reason(
            code="domain-misses",
            message=text,
            facts={"node": node, "domain": members[0].place, "domains": tuple(miss.place for miss in members[:_SHOWN])},
        )
        for members, text in texts[1:_SHOWN]
    ]
    more = sum(len(members) for members, _ in texts[_SHOWN:])
    if more:
        reasons.append(
            Reason(code="more-domains", message=f"and {more} more places", facts={"node": node, "count": more})
        )
    return tuple(reasons)


def _named(members: Sequence[PlaceMiss]) -> str:
    shown = ", ".join(miss.place for miss in members[:_SHOWN_NAMES])
    return f"{shown} and {len(members) - _SHOWN_NAMES} more" if len(members) > _SHOWN_NAMES else shown
