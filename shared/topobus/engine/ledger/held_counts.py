"""Counts held devices by class, from the count of the previous ledger and what has changed since.

The ledger is written for each pod of a node, and counting everything each time was more than half
of the work that follows a write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from topobus.engine.alignment.planning.node_view import CPU_CLASS
from topobus.values.ledger import Allocation, Holders, changed_owners

__all__ = ["next_counts"]


def next_counts(counts: Mapping[str, int], before: Holders, after: Holders) -> dict[str, int]:
    """Count the devices that a ledger holds.

    Shapes: counts — of `before`, class to devices; result — the same of `after`, without classes of
            which nothing is held. A device with two sharers counts twice.
    Cost: O(owners) for finding those that changed, and O(what these hold).
    """
    changed = Counter(counts)
    for key in changed_owners(before, after):
        changed.subtract(_sizes(before.allocations.get(key)))
        changed.update(_sizes(after.allocations.get(key)))
    return dict(+changed)


def _sizes(allocation: Allocation | None) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for holding in allocation.holdings if allocation is not None else ():
        for device_class, names in holding.devices.items():
            sizes[device_class] += len(names)
        sizes[CPU_CLASS] += len(holding.cpus)
    return sizes
