"""Holdings as sets: what two of them have in common, what one lacks of another, what is left of
one.

In devices by class a CPU is a device `cpu-<id>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import structs

from topobus.engine.alignment.planning.node_view import cpu_name, cpu_of_name
from topobus.values.device_sharing import HeldShare
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding, changed_owners
from topobus.values.outcome import Placement, Refusal, refuse
from topobus.values.request import PodRequest
from topobus.values.shares import share_without

__all__ = [
    "common",
    "holding_of",
    "holds_any",
    "meets",
    "missing",
    "names_of",
    "next_counts",
    "placed_holdings",
    "without",
]


def holding_of(
    devices: Mapping[str, Iterable[str]],
    shared: Mapping[str, Iterable[str]] = MappingProxyType({}),
    shares: Mapping[str, Mapping[str, HeldShare]] = MappingProxyType({}),
) -> Holding | Refusal:
    """Read devices by class as one holding without a container's name.

    Shapes: shared — those of `devices` that are held by share; shares — how much of them. Shares of
            devices that are not in `shared` are ignored.
    Errors: raises nothing; Refusal code unknown-device for a CPU whose name is not `cpu-<id>`.
    """
    kept: dict[str, tuple[str, ...]] = {}
    cpus: list[int] = []
    for device_class, names in sorted(devices.items()):
        if device_class != CPU_CLASS:
            kept[device_class] = tuple(sorted(set(names)))
            continue
        for name in names:
            cpu = cpu_of_name(name)
            if cpu is None:
                message = f"there is no CPU device named {name!r}, wanted cpu-<id>"
                return refuse("unknown-device", message, resource=CPU_CLASS, device=name)
            cpus.append(cpu)
    by_share = {
        device_class: names
        for device_class, given in sorted(shared.items())
        if (names := tuple(sorted(set(given) & set(kept.get(device_class, ())))))
    }
    amounts = {
        device_class: counted
        for device_class, names in by_share.items()
        if (counted := {name: share for name in names if (share := shares.get(device_class, {}).get(name)) is not None})
    }
    return Holding(
        devices={device_class: names for device_class, names in kept.items() if names},
        cpus=CpuSet.of(cpus),
        shared=by_share,
        shares=amounts,
    )


def placed_holdings(request: PodRequest, placement: Placement) -> tuple[Holding, ...]:
    """Read a placement as the holdings of its containers.

    Devices with admin access are not held.
    """
    shared = {
        (container.name, device.device_class, name)
        for container in request.containers
        for device in container.devices
        if device.is_shared
        for name in device.names
    }
    by_share: dict[tuple[str, str], dict[str, HeldShare]] = {}
    for container in request.containers:
        for device in container.devices:
            if device.by_share:
                shares = {name: HeldShare(amounts=device.amounts.get(name, {})) for name in device.names}
                by_share.setdefault((container.name, device.device_class), {}).update(shares)
    memory = {container.name: container.memory_bytes for container in request.containers}
    return tuple(
        Holding(
            container=container.name,
            devices={
                device_class: kept
                for device_class, names in sorted(container.devices.items())
                if (kept := tuple(name for name in names if (container.name, device_class, name) not in shared))
            },
            cpus=container.cpus,
            memory_bytes=memory.get(container.name, 0),
            memory=container.memory,
            shared={
                device_class: names
                for device_class in sorted(container.devices)
                if (names := tuple(sorted(by_share.get((container.name, device_class), ()))))
            },
            shares={
                device_class: counted
                for device_class in sorted(container.devices)
                if (
                    counted := {
                        name: share
                        for name, share in sorted(by_share.get((container.name, device_class), {}).items())
                        if share.amounts
                    }
                )
            },
        )
        for container in placement.containers
    )


def common(allocation: Allocation, wanted: Holding) -> tuple[str, ...]:
    """Name the devices that an allocation holds and a holding also wants.

    Left out are those of which both have only a share, and not the same replica.
    """
    common_names: set[str] = set()
    for holding in allocation.holdings:
        for device_class, names in holding.devices.items():
            both_share = set(holding.shared.get(device_class, ())) & set(wanted.shared.get(device_class, ()))
            beside = {name for name in both_share if not _has_replica_of(holding, wanted, device_class, name)}
            common_names |= set(names) & set(wanted.devices.get(device_class, ())) - beside
        common_names |= {cpu_name(cpu) for cpu in holding.cpus & wanted.cpus}
    return tuple(sorted(common_names))


def missing(allocation: Allocation | None, wanted: Holding) -> tuple[str, ...]:
    """Name the devices that a holding wants and an allocation lacks."""
    for held in allocation.holdings if allocation is not None else ():
        wanted = without(wanted, held)
    return tuple(
        sorted({name for names in wanted.devices.values() for name in names} | {cpu_name(cpu) for cpu in wanted.cpus})
    )


def without(holding: Holding, taken: Holding) -> Holding:
    """Return what is left of a holding when another one takes its own out of it.

    Of a shared device the replicas are left that the other does not name.
    """
    shares: dict[str, dict[str, HeldShare]] = {}
    for device_class, held in holding.shares.items():
        for name, share in held.items():
            taken_share = taken.shares.get(device_class, {}).get(name)
            is_taken = name in taken.devices.get(device_class, ())
            left = share if not is_taken else share_without(share, taken_share) if taken_share is not None else None
            if left is not None:
                shares.setdefault(device_class, {})[name] = left
    devices = {
        device_class: kept
        for device_class, names in holding.devices.items()
        if (
            kept := tuple(
                name
                for name in names
                if name not in taken.devices.get(device_class, ()) or name in shares.get(device_class, {})
            )
        )
    }
    shared = {
        device_class: kept
        for device_class, names in holding.shared.items()
        if (kept := tuple(name for name in names if name in devices.get(device_class, ())))
    }
    groups = {name: rest for name, cpus in holding.groups.items() if (rest := cpus - taken.cpus)}
    return structs.replace(
        holding, devices=devices, cpus=holding.cpus - taken.cpus, shared=shared, shares=shares, groups=groups
    )


def holds_any(holding: Holding) -> bool:
    """Say whether it contains a device or a CPU."""
    return bool(holding.devices or holding.cpus)


def meets(allocation: Allocation, wanted: Holding) -> bool:
    """Say whether an allocation holds something that a holding wants."""
    for holding in allocation.holdings:
        if wanted.cpus and holding.cpus and not wanted.cpus.isdisjoint(holding.cpus):
            return True
        for device_class, names in wanted.devices.items():
            held = holding.devices.get(device_class)
            # Asked of every allocation for each adoption: most have nothing in common, which is
            # seen without building anything.
            if held is not None and not frozenset(names).isdisjoint(held) and common(allocation, wanted):
                return True
    return False


def names_of(allocation: Allocation) -> dict[str, tuple[str, ...]]:
    """List all that an allocation holds.

    Shapes: result — class to the devices' names, without repetition; CPUs are devices of class
            `cpu`.
    Order: classes and names sorted, CPUs by their numbers.
    """
    devices: dict[str, set[str]] = {}
    for holding in allocation.holdings:
        for device_class, names in holding.devices.items():
            devices.setdefault(device_class, set()).update(names)
        if holding.cpus:
            devices.setdefault(CPU_CLASS, set()).update(cpu_name(cpu) for cpu in holding.cpus)
    return {
        device_class: tuple(sorted(names, key=lambda name: (cpu_of_name(name) or 0, name)))
        for device_class, names in sorted(devices.items())
    }


def _has_replica_of(holding: Holding, wanted: Holding, device_class: str, name: str) -> bool:
    """Say whether both have the same replica of a device."""
    held, asked = holding.shares.get(device_class, {}).get(name), wanted.shares.get(device_class, {}).get(name)
    return held is not None and asked is not None and not set(held.replicas).isdisjoint(asked.replicas)


def next_counts(counts: Mapping[str, int], before: Holders, after: Holders) -> dict[str, int]:
    """Count the devices that a ledger holds, from the count of the previous ledger.

    The ledger is written for each pod of a node, and counting everything each time was more than
    half of the work that follows a write.

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
