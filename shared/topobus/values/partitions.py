"""Partitions: which devices of one class and node can be held at once, since they take from the
same counters.

A device counts once, however many owners hold a share of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device
from topobus.values.names import is_dns_label

__all__ = ["MAX_PARTS", "PARTS", "Partitions", "Shortage", "partitioned"]

MAX_PARTS = 1024
"""Parts that a device may have by `partition_of` alone; a physical function has 256 virtual ones at
most in practice. The number is fixed, so that one part more changes neither the parent nor its
counter."""
PARTS = "topobus-parts"
"""The counter for a device that is held whole or in parts, where its driver counts nothing. No
driver may use this name."""
# The limits of resource.k8s.io/v1.
_MAX_SETS_OF_DEVICE = 2
_MAX_COUNTERS = 32

_Key = tuple[str, str]


class Shortage(Struct, frozen=True, kw_only=True):
    """A counter that is short."""

    counter_set: str
    counter: str
    total: int
    """0 when there is no such counter."""
    in_use: int
    wanted: int
    devices: tuple[str, ...] = ()
    """Held devices that use it, sorted."""


class Partitions:
    """What the devices of one class and node take from their counters. It never changes."""

    def __init__(self, devices: Iterable[Device], counter_sets: Iterable[CounterSet]) -> None:
        """Read what each device uses.

        A set or a counter that is not declared has nothing to give.
        """
        self._totals: dict[_Key, int] = {
            (counter_set.name, counter): total
            for counter_set in counter_sets
            for counter, total in counter_set.counters.items()
        }
        self._uses: dict[str, dict[_Key, int]] = {
            device.name: _amounts(device.consumes) for device in devices if device.consumes
        }

    def __bool__(self) -> bool:
        """Say whether any device uses a counter."""
        return bool(self._uses)

    def shortage(self, held: Collection[str], wanted: Iterable[str]) -> Shortage | None:
        """Find the first counter, by name, that is short when `wanted` is held besides `held`.

        None when all of it fits. A wanted device that is already held takes nothing more. Counters
        that `wanted` does not touch are ignored, though they may be overdrawn.
        """
        more = sorted({name for name in wanted if name in self._uses and name not in held})
        asked = _sum(self._uses[name] for name in more)
        holding = sorted({name for name in held if name in self._uses})
        for key in sorted(asked):
            users = [name for name in holding if key in self._uses[name]]
            in_use = sum(self._uses[name][key] for name in users)
            total = self._totals.get(key, 0)
            if asked[key] + in_use > total or key not in self._totals:
                return Shortage(
                    counter_set=key[0],
                    counter=key[1],
                    total=total,
                    in_use=in_use,
                    wanted=asked[key],
                    devices=tuple(users),
                )
        return None

    def blocked(self, held: Collection[str]) -> dict[str, Shortage]:
        """Find the devices that do not fit beside what is held, with the counter that is short.

        Order: by name.
        """
        if not any(name in self._uses for name in held):
            return {}
        shortages = {name: self.shortage(held, (name,)) for name in sorted(self._uses) if name not in held}
        return {name: shortage for name, shortage in shortages.items() if shortage is not None}

    def rivals(self) -> frozenset[str]:
        """Find the devices that cannot be allocated without counting: they use a counter that
        cannot serve all of its users at once.
        """
        asked = _sum(self._uses.values())
        short = {key for key, amount in asked.items() if amount > self._totals.get(key, 0) or key not in self._totals}
        return frozenset(name for name, uses in self._uses.items() if not short.isdisjoint(uses))

    def together(self, devices: Sequence[Device]) -> frozenset[str]:
        """Choose devices of which any number fit at once: first those that are no part of another,
        then by name.

        All devices without counters are included.
        """
        kept: set[str] = set()
        for device in sorted(devices, key=lambda device: (bool(device.partition_of), device.name)):
            if self.shortage(kept, (device.name,)) is None:
                kept.add(device.name)
        return frozenset(kept)


def partitioned(
    devices: Sequence[Device], counter_sets: Sequence[CounterSet]
) -> tuple[tuple[Device, ...], tuple[CounterSet, ...], dict[str, str]]:
    """Check the partitions that a driver reports, and add counters where it names none.

    A device with `partition_of` and no counters gets a counter set with its parent's name. The
    parent takes all of that set and each part takes 1, so any number of parts are possible at once,
    but never beside the whole. Counters that an earlier call added this way are replaced.
    Shapes: result — the devices without fault in the order given, all counter sets that are in use
            by name, and name to fault of the others.
    """
    faults: dict[str, str] = {}
    sets: dict[str, CounterSet] = {}
    for counter_set in counter_sets:
        # A faulty set is dropped. The devices that use it are reported by name.
        if not _fault_of_set(counter_set) and counter_set.name not in sets and PARTS not in counter_set.counters:
            sets[counter_set.name] = counter_set
    devices = [_uncounted(device) for device in devices]
    by_name = {device.name: device for device in devices}
    parts: dict[str, int] = {}
    changed: dict[str, Device] = {}
    for device in devices:
        fault = _fault_of_uses(device, sets) or _fault_of_parent(device, by_name, sets)
        if not fault and device.partition_of in by_name and not device.consumes:
            parts[device.partition_of] = parts.get(device.partition_of, 0) + 1
            fault = (
                f"{device.partition_of} has more than {MAX_PARTS} parts"
                if parts[device.partition_of] > MAX_PARTS
                else ""
            )
            changed[device.name] = structs.replace(device, consumes=(_part_of(device.partition_of, 1),))
        if fault:
            faults[device.name] = fault
    made = {name: CounterSet(name=name, counters={PARTS: MAX_PARTS}) for name in sorted(parts)}
    for name in made:
        changed[name] = structs.replace(by_name[name], consumes=(_part_of(name, MAX_PARTS),))
    good = tuple(changed.get(device.name, device) for device in devices if device.name not in faults)
    used = {use.counter_set for device in good for use in device.consumes}
    return good, tuple(({**sets, **made})[name] for name in sorted(used)), faults


def _uncounted(device: Device) -> Device:
    """Remove the counters that `partitioned` added for `partition_of` alone."""
    if any(use.counter == PARTS for use in device.consumes):
        return structs.replace(device, consumes=tuple(use for use in device.consumes if use.counter != PARTS))
    return device


def _part_of(parent: str, amount: int) -> CounterUse:
    return CounterUse(counter_set=parent, counter=PARTS, amount=amount)


def _amounts(uses: Iterable[CounterUse]) -> dict[_Key, int]:
    amounts: dict[_Key, int] = {}
    for use in uses:
        key = (use.counter_set, use.counter)
        amounts[key] = amounts.get(key, 0) + use.amount
    return amounts


def _sum(amounts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: dict[_Key, int] = {}
    for uses in amounts:
        for key, amount in uses.items():
            total[key] = total.get(key, 0) + amount
    return total


def _fault_of_set(counter_set: CounterSet) -> str:
    if not is_dns_label(counter_set.name) or not all(map(is_dns_label, counter_set.counters)):
        return "its name, or that of a counter, is no DNS label"
    if not 1 <= len(counter_set.counters) <= _MAX_COUNTERS:
        return f"it has {len(counter_set.counters)} counters, wanted 1 to {_MAX_COUNTERS}"
    return "a counter is negative" if min(counter_set.counters.values()) < 0 else ""


def _fault_of_uses(device: Device, sets: Mapping[str, CounterSet]) -> str:
    keys = [(use.counter_set, use.counter) for use in device.consumes]
    if len(set(keys)) != len(keys):
        return "consumes names one counter twice"
    if len({name for name, _ in keys}) > _MAX_SETS_OF_DEVICE:
        return f"consumes names {len({name for name, _ in keys})} counter sets, wanted at most {_MAX_SETS_OF_DEVICE}"
    for use in device.consumes:
        total = sets[use.counter_set].counters.get(use.counter) if use.counter_set in sets else None
        if total is None:
            return f"consumes names counter {use.counter_set}/{use.counter}, which its driver does not have"
        if not 0 <= use.amount <= total:
            return f"consumes {use.amount} of {use.counter_set}/{use.counter}, wanted 0 to {total}"
    return ""


def _fault_of_parent(device: Device, by_name: Mapping[str, Device], sets: Mapping[str, CounterSet]) -> str:
    """Explain why a device and its parent do not exclude each other, as they must. Empty when they
    do.

    A parent that is not there excludes nothing.
    """
    parent = by_name.get(device.partition_of)
    if parent is None:
        return ""
    if parent.name == device.name:
        return "partition_of names itself"
    if not device.consumes:
        if parent.consumes or parent.partition_of:
            return f"partition_of names {parent.name}, which counts or is a partition itself: wanted consumes"
        return (
            f"partition_of names {parent.name}, and so does a counter set: wanted consumes"
            if parent.name in sets
            else ""
        )
    if Partitions((device, parent), sets.values()).shortage((parent.name,), (device.name,)) is None:
        return f"partition_of names {parent.name}, and its counters let both be held at once"
    return ""
