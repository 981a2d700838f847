"""Makes counters for the ways in which a card can be cut, so that parts of two ways are never held
together, and all parts of one way can be.

A way lists the names of its devices. The card as a whole is a way with one.

A counter that all parts share cannot do it: two ways of two parts and more would each leave room
for one of the other. So each part has a counter of its own, of which it takes everything and each
part of the later ways 1. The parts of the last way need none: a card in 1, 2, 4 and 8 parts has 1 +
2 + 4 counters, not one for each of the 70 pairs. Limits: resource.k8s.io/v1, 32 counters in a set,
2 sets for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.values.counters import CounterSet, CounterUse

__all__ = ["count_ways"]

_MAX_COUNTERS = 32
_MAX_SETS = 2
_WHOLE = "whole"


def count_ways(
    card: str, ways: Sequence[Sequence[str]]
) -> tuple[tuple[CounterSet, ...], Mapping[str, tuple[CounterUse, ...]]]:
    """Count the ways of one card.

    Shapes: card — the name of the card, and of its counter set; ways — names of devices, a part's
    begins with the card's; result — sets, and by device what it takes.
    Errors: raises ValueError for ways that need more than 64 counters.

    >>> sets, uses = count_ways("gpu-0", [["gpu-0"], ["gpu-0-dpx-0", "gpu-0-dpx-1"]])
    >>> sets[0].counters, [(use.counter, use.amount) for use in uses["gpu-0"]], [(use.counter, use.amount) for use in uses["gpu-0-dpx-1"]]
    ({'whole': 2}, [('whole', 2)], [('whole', 1)])
    """  # noqa: E501
    ordered = sorted(ways, key=lambda way: (len(way), tuple(way)))
    most = max(map(len, ordered), default=0)
    owned = [(index, part) for index, way in enumerate(ordered[:-1]) for part in way]
    if len(owned) > _MAX_COUNTERS * _MAX_SETS:
        raise ValueError(
            f"{card} can be cut in so many ways that {len(owned)} counters are needed, wanted at most "
            f"{_MAX_COUNTERS * _MAX_SETS}"
        )
    places = {
        part: (card if number < _MAX_COUNTERS else f"{card}-more", part.removeprefix(card).removeprefix("-") or _WHOLE)
        for number, (_, part) in enumerate(owned)
    }
    counters: dict[str, dict[str, int]] = {}
    for counter_set, counter in places.values():
        counters.setdefault(counter_set, {})[counter] = most
    uses: dict[str, tuple[CounterUse, ...]] = {}
    for index, way in enumerate(ordered):
        for device in way:
            taken = [
                (places[part], most if part == device else 1) for at, part in owned if part == device or at < index
            ]
            uses[device] = tuple(
                CounterUse(counter_set=place[0], counter=place[1], amount=amount) for place, amount in taken
            )
    return tuple(CounterSet(name=name, counters=counters[name]) for name in sorted(counters)), uses
