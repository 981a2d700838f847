"""What kubelet is told of the devices of one class: the device plugin's list, and DRA health.

Flows in: the inventory, who holds what, what was told before. Flows out: complete lists, sorted by name. Two rules of kubelet's shape them: an id
that somebody holds must never leave the list (kubelet would call it healthy), and a list replaces the one before as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct

from topobus.domain.device import Device, Inventory
from topobus.domain.health import HealthState
from topobus.domain.ledger import Ledger
from topobus.domain.request import Owner, OwnerKind

__all__ = ["DraHealth", "HealthEntry", "ListEntry", "health_list", "holders_of", "plugin_list"]


class ListEntry(Struct, frozen=True, kw_only=True):
    """One device in the device plugin's list. `nodes` None: no topology is sent, which is not node 0."""

    id: str
    is_healthy: bool
    nodes: tuple[int, ...] | None = None
    reason: str = ""
    """Why it is not healthy, for the error of an Allocate; kubelet has no field for it."""


class DraHealth(IntEnum):
    """Health as kubelet's DRA API counts it."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


class HealthEntry(Struct, frozen=True, kw_only=True):
    """One device in the DRA health stream."""

    device: str
    health: DraHealth
    message: str = ""


def holders_of(ledger: Ledger | None, device_class: str) -> dict[str, Owner]:
    """Find who holds which device of a class; CPUs by their device names."""
    holders: dict[str, Owner] = {}
    if ledger is None:
        return holders
    for allocation in ledger.allocations.values():
        for holding in allocation.holdings:
            for name in holding.devices.get(device_class, ()):
                holders[name] = allocation.owner
            if device_class == "cpu":
                holders.update({f"cpu-{cpu}": allocation.owner for cpu in holding.cpus})
    return holders


def plugin_list(inventory: Inventory | None, holders: Mapping[str, Owner], previous: tuple[ListEntry, ...] = ()) -> tuple[ListEntry, ...]:
    """Build the complete list.

    A device that is held through another door (a claim, a placed pod) is shown as not healthy, so that kubelet does not choose it; one that is
    held by kubelet's own allocation keeps its real health. A held device that left the inventory stays, not healthy, where it was.
    """
    entries = {one.name: _entry(one, holders.get(one.name)) for one in (inventory.devices if inventory else ())}
    known = {one.id: one for one in previous}
    for name in holders.keys() - entries.keys():
        nodes = known[name].nodes if name in known else None
        entries[name] = ListEntry(id=name, is_healthy=False, nodes=nodes, reason="it is held but no longer in the inventory")
    return tuple(entries[name] for name in sorted(entries))


def health_list(inventory: Inventory | None, holders: Mapping[str, Owner]) -> tuple[HealthEntry, ...]:
    """Build the complete health of a class; a held device that left the inventory is unhealthy, not forgotten."""
    entries = {one.name: _health(one) for one in (inventory.devices if inventory else ())}
    for name in holders.keys() - entries.keys():
        entries[name] = HealthEntry(device=name, health=DraHealth.UNHEALTHY, message="not in the inventory any more")
    return tuple(entries[name] for name in sorted(entries))


def _entry(device: Device, holder: Owner | None) -> ListEntry:
    nodes = device.numa_nodes.ids if device.numa_nodes else None
    reason = ""
    if not device.health.is_allocatable:
        worst = device.health.worst
        reason = f"it is {device.health.state}" + (f": {worst.reason}" if worst else "")
    elif holder is not None and holder.kind is not OwnerKind.DEVICE_PLUGIN:
        reason = f"{holder} holds it"
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
