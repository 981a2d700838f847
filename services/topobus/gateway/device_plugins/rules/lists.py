"""Builds the lists of a class's devices that kubelet gets: ListAndWatch of the device plugin, and
DRA health.

Lists are complete and sorted by name. Two rules of kubelet shape them: a held id must stay in the
list (kubelet would count a missing one as healthy), and each list replaces the previous one as a
whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

from msgspec import Struct, structs

from topobus.engine.alignment.planning.claims_only import claims_only
from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.replicas import ShareHolders, replica_entries, replica_holders, shares_of
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.health import HealthState
from topobus.values.ledger import Allocation, Holders, changed_owners
from topobus.values.names import is_dns_label
from topobus.values.pools import resource_split
from topobus.values.request import Owner, OwnerKind
from topobus.values.vendor_profiles import VendorProfile, profile_in, resource_in_profile

__all__ = [
    "DraHealth",
    "HealthEntry",
    "ListEntry",
    "first_that_fit",
    "health_list",
    "health_of_shapes",
    "holders_of",
    "is_resource_of",
    "ledgers_by_class",
    "plugin_lists",
    "sharers_of",
]


class DraHealth(IntEnum):
    """The health states of kubelet's DRA API."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


class HealthEntry(Struct, frozen=True, kw_only=True):
    """One device in the DRA health stream."""

    device: str
    health: DraHealth
    message: str = ""


def holders_of(ledger: Holders | None, device_class: str) -> dict[str, Owner]:
    """Return the holder of each held device of a class.

    CPUs are listed by their device names, together with the groups that they were chosen from. Of
    several owners with a share, one that is not a claim is preferred.
    """
    holders: dict[str, Owner] = {}
    if ledger is None:
        return holders
    for allocation in ledger.allocations.values():
        for holding in allocation.holdings:
            for name in (
                *holding.devices.get(device_class, ()),
                *(holding.groups if device_class == CPU_RESOURCE else ()),
            ):
                if allocation.owner.kind is not OwnerKind.CLAIM or name not in holders:
                    holders[name] = allocation.owner
            if device_class == CPU_RESOURCE:
                holders.update({f"cpu-{cpu}": allocation.owner for cpu in holding.cpus})
    return holders


def ledgers_by_class(earlier: Mapping[str, Holders], before: Holders, after: Holders) -> dict[str, Holders]:
    """Return the ledger for each class in which a holding has changed.

    Shapes: earlier — what this function returned for earlier ledgers, up to `before`; result —
    class to a ledger with the allocations that hold some of it, owners by key.
    Cost: O(owners) for finding those that changed, and O(owners with devices of their classes).
    """
    changed = changed_owners(before, after)
    old = {key: _classes_held(before.allocations.get(key)) for key in changed}
    new = {key: _classes_held(after.allocations.get(key)) for key in changed}
    ledgers: dict[str, Holders] = {}
    for device_class in sorted(frozenset[str]().union(*old.values(), *new.values())):
        kept = earlier[device_class].allocations if device_class in earlier else {}
        allocations = {key: allocation for key, allocation in kept.items() if key not in changed}
        allocations |= {key: after.allocations[key] for key, classes in new.items() if device_class in classes}
        ledgers[device_class] = structs.replace(after, allocations=dict(sorted(allocations.items())))
    return ledgers


def _classes_held(allocation: Allocation | None) -> frozenset[str]:
    holdings = allocation.holdings if allocation is not None else ()
    return frozenset(
        device_class
        for holding in holdings
        for device_class in (*holding.devices, *((CPU_RESOURCE,) if holding.cpus else ()))
    )


def sharers_of(ledger: Holders | None) -> dict[tuple[str, str], frozenset[Owner]]:
    """Return the owners with a share, by class and device."""
    sharers: dict[tuple[str, str], frozenset[Owner]] = {}
    for allocation in ledger.allocations.values() if ledger is not None else ():
        for holding in allocation.holdings:
            for device_class in (*holding.shared, *((CPU_RESOURCE,) if holding.groups else ())):
                for name in shares_of(holding, device_class):
                    sharers[device_class, name] = sharers.get((device_class, name), frozenset()) | {allocation.owner}
    return sharers


def plugin_lists(
    device_class: str,
    own: str,
    inventory: Inventory | None,
    holders: Mapping[str, Owner],
    *,
    previous: Mapping[str, tuple[ListEntry, ...]] = MappingProxyType({}),
    classes: Collection[str] = (),
    profiles: Collection[VendorProfile] = (),
    sharers: ShareHolders = MappingProxyType({}),
) -> dict[str, tuple[ListEntry, ...]]:
    """Build the complete lists of a class's resources: its own, one for each pool, and those that
    vendors' profiles name.

    A device that its operator has shared is listed by replicas, only in its shared pool. A device
    that is held in another way (by a claim, a placed pod, another resource) is listed as not
    healthy, so that kubelet does not choose it. A device held by kubelet's own allocation of this
    resource keeps its real health. kubelet knows neither shares nor counters, so devices that only
    claims can request are not listed unless they are held, and neither are those that an operator
    excludes. A held device is also listed in the resource through which it is held, whatever pool
    it is in now. A held device that left the inventory stays in its list, not healthy.

    Shapes: own — the class's own resource; holders — device to owner; previous — resource to what
    was listed before; classes — all of this node's; sharers — device to those who have a share of
    it.
    """
    lists: dict[str, dict[str, ListEntry]] = {own: {}, **{resource: {} for resource in previous}}
    present = inventory.devices if inventory is not None else ()
    withheld = claims_only(map(_whole, present), inventory.counter_sets) if inventory is not None else frozenset()
    replicated = {name for name, shares in sharers.items() if any(share.replicas for _, share in shares)}
    for pool, devices in resource_split(present, classes).items():
        by_pool = _resource(own, device_class, pool)
        for device in devices:
            if not is_dns_label(device.name) or (
                device.name not in holders and (device.name in withheld or device.is_excluded)
            ):
                continue
            resource = resource_in_profile(device, "" if pool == device_class else pool, profiles) or by_pool
            list_entries = lists.setdefault(resource, {})
            shown = _entry(device, is_held=device.name in holders, is_withheld=device.name in withheld)
            if device.sharing is None:
                list_entries[device.name] = shown
                if device.name in replicated:
                    _keep_replicas(lists, list_entries, device.name, sharers[device.name])
                continue
            whole = holders.get(device.name) if device.name not in sharers else None
            list_entries.update(
                (entry.id, entry) for entry in replica_entries(shown, device, sharers.get(device.name, ()), whole)
            )
            through = _through(whole, device_class, own, profiles) if whole is not None else None
            if through is not None:
                # kubelet gave it as a whole before it was shared, and knows it by that id.
                lists.setdefault(through, {})[device.name] = structs.replace(shown, is_held=True)
    for name in replicated - {device.name for device in present}:
        _keep_replicas(lists, {name: _gone(name)}, name, sharers[name])
    by_replicas = replicated | {device.name for device in present if device.sharing is not None}
    for name, holder in holders.items():
        if name not in by_replicas:
            through = _through(holder, device_class, own, profiles)
            _keep_whole(lists, name, holder, through=through, own=own, previous=previous)
    return {resource: tuple(entries[name] for name in sorted(entries)) for resource, entries in sorted(lists.items())}


def _gone(name: str) -> ListEntry:
    return ListEntry(id=name, is_healthy=False, reason="it is held but no longer in the inventory")


def _keep_whole(
    lists: dict[str, dict[str, ListEntry]],
    name: str,
    holder: Owner,
    *,
    through: str | None,
    own: str,
    previous: Mapping[str, tuple[ListEntry, ...]],
) -> None:
    """List a held device in the resource through which it is held, not healthy in its own one if
    that is another, and where it was listed before if it left the inventory.
    """
    home = next((resource for resource, entries in lists.items() if name in entries), None)
    if home is None:
        before = ((resource, entry) for resource, entries in previous.items() for entry in entries if entry.id == name)
        was_in, earlier = next(before, (own, _gone(name)))
        entry = structs.replace(_gone(name), nodes=earlier.nodes, is_held=True)
        lists.setdefault(through or was_in, {})[name] = entry
        return
    entry = structs.replace(lists[home][name], is_held=True)
    if through is not None:
        lists.setdefault(through, {})[name] = entry
    if through != home:
        lists[home][name] = structs.replace(entry, is_healthy=False, reason=entry.reason or f"{holder} holds it")


def _whole(device: Device) -> Device:
    """Return a shared device as if it were not shared, because kubelet can have it by replicas."""
    return device if device.sharing is None else structs.replace(device, allows_multiple=False)


def _through(holder: Owner, device_class: str, own: str, profiles: Collection[VendorProfile]) -> str | None:
    """Return the resource through which kubelet gave a device to its holder.

    None: it was given in another way.
    """
    is_ours = (
        is_resource_of(holder.name, device_class, own) or profile_in(holder.name, device_class, profiles) is not None
    )
    return holder.name if holder.kind is OwnerKind.DEVICE_PLUGIN and is_ours else None


def _keep_replicas(
    lists: dict[str, dict[str, ListEntry]],
    home: dict[str, ListEntry],
    name: str,
    sharers: Sequence[tuple[Owner, HeldShare]],
) -> None:
    """Keep held replicas of a device that is no longer shared in the lists through which they are
    held, and do not offer the device itself.
    """
    entry = home[name]
    for replica, owner in replica_holders(name, sharers).items():
        lists.setdefault(owner.name, {})[replica] = structs.replace(entry, id=replica, is_held=True)
    home[name] = structs.replace(
        entry, is_healthy=False, is_held=True, reason=entry.reason or "shares of it are held, from when it was shared"
    )


def is_resource_of(resource: str, device_class: str, own: str) -> bool:
    """Return whether a resource is a class's own or could be one of its pools: a pool's name begins
    with the class's.

    >>> [is_resource_of(name, "gpu", "topobus.dev/gpu") for name in ("topobus.dev/gpu", "topobus.dev/gpu-h100", "old.dev/gpu", "topobus.dev/nic")]
    [True, True, False, False]
    """  # noqa: E501
    domain, _, name = resource.partition("/")
    return resource == own or (own == f"{domain}/{device_class}" and name.startswith(f"{device_class}-"))


def first_that_fit(entries: Sequence[ListEntry], sizes_bytes: Sequence[int], limit_bytes: int) -> tuple[int, ...]:
    """Choose the entries to send when a list is too large for one message: those that are held,
    then by name.

    Returns positions, ascending.

    Shapes: sizes_bytes — of each entry in the message, with its framing.
    """
    kept: list[int] = []
    left = limit_bytes
    for position in sorted(range(len(entries)), key=lambda place: (not entries[place].is_held, entries[place].id)):
        left -= sizes_bytes[position]
        if left < 0:
            break
        kept.append(position)
    return tuple(sorted(kept))


def health_list(inventory: Inventory | None, holders: Mapping[str, Owner]) -> tuple[HealthEntry, ...]:
    """Build the complete health of a class.

    A held device that left the inventory is unhealthy, not forgotten.
    """
    entries = {device.name: _health(device) for device in (inventory.devices if inventory else ())}
    for name in holders.keys() - entries.keys():
        entries[name] = HealthEntry(device=name, health=DraHealth.UNHEALTHY, message="not in the inventory any more")
    return tuple(entries[name] for name in sorted(entries))


def health_of_shapes(parts: Mapping[str, tuple[str, ...]], entries: Iterable[HealthEntry]) -> tuple[HealthEntry, ...]:
    """Give each shape the health of its worst part, and that part's message.

    >>> sick = HealthEntry(device="gpu-1", health=DraHealth.UNHEALTHY, message="xid")
    >>> [(shape.health.name, shape.message) for shape in health_of_shapes({"shape-0": ("gpu-0", "gpu-1")}, [sick])]
    [('UNHEALTHY', 'gpu-1: xid')]
    """
    by_name = {entry.device: entry for entry in entries}
    order = (DraHealth.UNHEALTHY, DraHealth.UNKNOWN, DraHealth.HEALTHY)
    shapes = []
    for shape, names in parts.items():
        of_parts = [by_name[name] for name in names if name in by_name]
        worst = min(of_parts, key=lambda entry: order.index(entry.health), default=None)
        if worst is not None:
            message = f"{worst.device}: {worst.message}" if worst.message else ""
            shapes.append(HealthEntry(device=shape, health=worst.health, message=message))
    return tuple(shapes)


def _resource(own: str, device_class: str, pool: str) -> str:
    """Return the resource of a pool, or of the class, which has the name of its first pool."""
    return own if pool == device_class else f"{own.rpartition('/')[0]}/{pool}"


def _entry(device: Device, *, is_held: bool, is_withheld: bool) -> ListEntry:
    nodes = device.numa_nodes.ids if device.numa_nodes else None
    reason = ""
    # A spare that was given in the moment before it became one is well.
    if not (device.is_fit if is_held else device.is_allocatable):
        reason = f"it is {device.why_not}"
    elif is_withheld:
        reason = "it is shared, or excludes other devices: it is given by claims only"
    return ListEntry(id=device.name, is_healthy=not reason, nodes=nodes, reason=reason)


def _health(device: Device) -> HealthEntry:
    state = device.health.state
    if device.health.is_allocatable:
        health = DraHealth.HEALTHY
    elif state is HealthState.UNKNOWN:
        health = DraHealth.UNKNOWN
    else:
        health = DraHealth.UNHEALTHY
    worst = device.health.worst
    message = ""
    if worst is not None:
        message = f"{worst.reason}: {worst.message}" if worst.message else worst.reason
    return HealthEntry(device=device.name, health=health, message=message)
