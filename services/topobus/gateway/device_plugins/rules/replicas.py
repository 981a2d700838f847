"""Replicas of shared devices as kubelet lists them: their list entries, what a choice of them takes
in the ledger, and which of them are preferred.

A replica is `<device>::<number>`. For a device of which claims have shares, only as many replicas
are healthy as are left. A held replica never leaves the list. Source: SharedDevicesAllocationPolicy
and failRequestsGreaterThanOne of NVIDIA/k8s-device-plugin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.values.cpu_groups import GROUP_CAPACITY
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare, SharePolicy
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner
from topobus.values.shares import device_of_replica, free_replicas, number_of_replica, replica_id, replica_share

__all__ = [
    "Chosen",
    "ShareHolders",
    "chosen_of",
    "fault_of_many",
    "ids_of",
    "may_ask_ahead",
    "prefer_replicas",
    "replica_entries",
    "replica_holders",
    "share_holders",
    "shares_of",
]

ShareHolders = Mapping[str, tuple[tuple[Owner, HeldShare], ...]]
"""Device to the owners with a share of it, and what they have. Amounts and replicas are empty
where the ledger does not have them."""


class Chosen(Struct, frozen=True, kw_only=True):
    """Kubelet's choice in our terms."""

    devices: tuple[str, ...]
    """Each once, sorted."""
    shares: dict[str, HeldShare] = {}
    """Those of the devices that are chosen by replicas, with the replicas' worth."""

    @property
    def amounts(self) -> dict[str, dict[str, int]]:
        """Return how much of each shared device is chosen."""
        return {name: share.amounts for name, share in self.shares.items()}


def share_holders(ledger: Holders | None, device_class: str) -> dict[str, tuple[tuple[Owner, HeldShare], ...]]:
    """Return the owners with shares of each device of a class, owners by key."""
    holders: dict[str, list[tuple[Owner, HeldShare]]] = {}
    for _, allocation in sorted(ledger.allocations.items()) if ledger is not None else ():
        for holding in allocation.holdings:
            for name, share in shares_of(holding, device_class).items():
                holders.setdefault(name, []).append((allocation.owner, share))
    return {name: tuple(sharers) for name, sharers in sorted(holders.items())}


def shares_of(holding: Holding, device_class: str) -> dict[str, HeldShare]:
    """Return the devices of a class of which a holding has a share, and how much.

    CPUs that were chosen from a group are a share of the group.
    """
    amounts = holding.shares.get(device_class, {})
    shares = {name: amounts.get(name, HeldShare()) for name in holding.shared.get(device_class, ())}
    if device_class == CPU_RESOURCE:
        shares |= {name: HeldShare(amounts={GROUP_CAPACITY: len(cpus)}) for name, cpus in holding.groups.items()}
    return shares


def replica_entries(
    entry: ListEntry, device: Device, sharers: Sequence[tuple[Owner, HeldShare]], whole: Owner | None
) -> tuple[ListEntry, ...]:
    """List the replicas of a device in its shared pool.

    Shapes: entry — the device as it would be listed whole; sharers — the owners with a share; whole
    — the owner of the device as a whole, from before it was shared.
    """
    if device.sharing is None:
        return ()
    holders = replica_holders(device.name, sharers)
    free = free_replicas(device, {owner.key: share for owner, share in sharers}) if whole is None else 0
    entries: list[ListEntry] = []
    for number in sorted({*range(device.sharing.replicas), *(number_of_replica(name) or 0 for name in holders)}):
        name = replica_id(device.name, number)
        reason = entry.reason
        if number >= device.sharing.replicas:
            reason = reason or f"{device.name} has {device.sharing.replicas} replicas now"
        elif name not in holders:
            free -= 1
            if free < 0:
                reason = reason or (
                    f"{whole} holds {device.name} whole"
                    if whole is not None
                    else f"the rest of {device.name} is held by claims"
                )
        entries.append(structs.replace(entry, id=name, is_healthy=not reason, reason=reason, is_held=name in holders))
    return tuple(entries)


def replica_holders(device: str, sharers: Iterable[tuple[Owner, HeldShare]]) -> dict[str, Owner]:
    """Return the owner of each held replica of a device."""
    return {replica_id(device, number): owner for owner, share in sharers for number in share.replicas}


def chosen_of(names: Iterable[str], inventory: Inventory | None) -> Chosen:
    """Convert kubelet's choice.

    A replica of a device that is not shared (any more) has no counted worth.
    """
    numbers: dict[str, list[int]] = {}
    devices: set[str] = set()
    for name in names:
        devices.add(device_of_replica(name))
        number = number_of_replica(name)
        if number is not None:
            numbers.setdefault(device_of_replica(name), []).append(number)
    by_name = {device.name: device for device in (inventory.devices if numbers and inventory is not None else ())}
    shares = {
        name: replica_share(by_name[name], replicas) if name in by_name else HeldShare(replicas=tuple(sorted(replicas)))
        for name, replicas in sorted(numbers.items())
    }
    return Chosen(devices=tuple(sorted(devices)), shares=shares)


def may_ask_ahead(inventory: Inventory, chosen: Chosen, asked_in_vain: Collection[str]) -> bool:
    """Return whether these devices may be prepared before the ledger has an owner for them: their
    drivers can detect that it changes nothing, and have not refused one of them for that reason.

    Shapes: asked_in_vain — devices that were refused, in this generation of the inventory.
    """
    drivers = {device.name: device.driver for device in inventory.devices if device.name in chosen.devices}
    return (
        not chosen.shares
        and {*drivers} == {*chosen.devices}
        and {*drivers.values()} <= {*inventory.reading_drivers}
        and not {*asked_in_vain} & {*chosen.devices}
    )


def fault_of_many(resource: str, names: Sequence[str], inventory: Inventory | None) -> str:
    """Return why one container may not have so many replicas. Empty when it may.

    >>> fault_of_many("topobus.dev/gpu-shared", ["gpu-0::0"], None)
    ''
    """
    if len(names) < 2 or inventory is None:
        return ""
    strict = sorted(
        {
            name
            for name in map(device_of_replica, names)
            if (device := inventory.device(name)) and device.sharing and device.sharing.refuses_many
        }
    )
    if not strict:
        return ""
    return (
        f"{resource}: a container asks for {len(names)} shares ({', '.join(sorted(names))}), wanted 1: shares "
        "of one device are no further devices, and more of them"
        " is not more of it. Ask for 1; for a larger part make a claim with the memory that is needed, or "
        "let the operator set refuses_many = false"
    )


def prefer_replicas(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    inventory: Inventory | None,
    *,
    is_from_end: bool = False,
) -> tuple[str, ...]:
    """Choose replicas by their devices' policy, one after the other.

    Shapes: available — what kubelet has free; result — with all that must be included.
    Order: spread — the device with the fewest replicas in use, including those chosen here; pack —
    with the most; among equals by name, with `is_from_end` the last.
    """
    devices = {device.name: device for device in (inventory.devices if inventory is not None else ())}
    free: dict[str, list[str]] = {}
    for name in sorted(
        {*available} - {*must_include}, key=lambda name: (device_of_replica(name), number_of_replica(name) or 0)
    ):
        free.setdefault(device_of_replica(name), []).append(name)
    order = {name: index for index, name in enumerate(sorted(free, reverse=is_from_end))}
    chosen = sorted(set(must_include))

    def rank(name: str) -> tuple[int, int]:
        device = devices.get(name)
        sharing = device.sharing if device is not None else None
        used = (sharing.replicas if sharing is not None else 0) - len(free[name])
        return (-used if sharing is not None and sharing.policy is SharePolicy.PACK else used, order[name])

    while len(chosen) < size and any(free.values()):
        best = min((name for name, names in free.items() if names), key=rank)
        chosen.append(free[best].pop(0))
    return tuple(sorted(chosen))


def ids_of(allocation: Allocation) -> frozenset[str]:
    """Return the ids by which kubelet knows an allocation: devices, or replicas of them."""
    names: set[str] = set()
    for holding in allocation.holdings:
        for device_class, devices in holding.devices.items():
            shares = holding.shares.get(device_class, {})
            for name in devices:
                replicas = shares[name].replicas if name in shares else ()
                names |= {replica_id(name, number) for number in replicas} or {name}
        names |= {f"cpu-{cpu}" for cpu in holding.cpus}
    return frozenset(names)
