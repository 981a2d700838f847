"""Devices for tests of partitions and shares: a card with its partitions, a NIC that several claims
may have.
"""

from __future__ import annotations

from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import Device

__all__ = ["SHARED_NIC", "SLICES", "card", "counters_of"]

SLICES = 7
"""Slices of a card."""

SHARED_NIC = Device(
    name="nic-0",
    device_class="nic",
    capacity={"bandwidth": 10_000},
    allows_multiple=True,
    capacity_policies={"bandwidth": CapacityPolicy(default=1_000, minimum=1_000, step=1_000)},
)


def card(name: str = "gpu-0", sizes: tuple[int, ...] = (4, 3, 3), *, device_class: str = "gpu") -> tuple[Device, ...]:
    """A card as a whole, then its partitions `a`, `b` and so on of these sizes."""

    def part(device: str, slices: int, partition_of: str = "") -> Device:
        uses = (CounterUse(counter_set=name, counter="slices", amount=slices),)
        return Device(
            name=device,
            device_class=device_class,
            consumes=uses,
            partition_of=partition_of,
            attributes={"slices": slices},
            model="T4",
        )

    parts = [part(f"{name}-part-{chr(ord('a') + index)}", slices, name) for index, slices in enumerate(sizes)]
    return (part(name, SLICES), *parts)


def counters_of(*names: str) -> tuple[CounterSet, ...]:
    """The counter sets of cards."""
    return tuple(CounterSet(name=name, counters={"slices": SLICES}) for name in sorted(names))
