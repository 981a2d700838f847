"""Finds device plugin allocations that no pod uses any more, and those that block a new one.

Claims and pods that topology placed are left out, because they have a release of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.replicas import Chosen, ids_of
from topobus.values.ledger import Allocation, Holders
from topobus.values.request import OwnerKind

__all__ = ["allocations_of", "idle_allocations", "with_lingering"]


def idle_allocations(ledger: Holders, in_use: Mapping[str, frozenset[str]]) -> tuple[Allocation, ...]:
    """Find device plugin allocations of which no device is in use.

    One device in use keeps all of them.

    Shapes: in_use — resource name to device ids. The owner's name is the resource.
    """
    return tuple(
        allocation
        for _, allocation in sorted(ledger.allocations.items())
        if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN
        and not ids_of(allocation) & in_use.get(allocation.owner.name, frozenset())
    )


def allocations_of(ledger: Holders, device_class: str, names: frozenset[str], chosen: Chosen) -> tuple[Allocation, ...]:
    """Find device plugin allocations, of any resource, that have some of what kubelet gives to
    another container now.

    Shapes: names — kubelet's choice, devices or replicas; chosen — the same as devices. Two
    replicas of one device do not block each other, but the whole device and a replica do.
    """
    whole = {*chosen.devices} - chosen.shares.keys()
    allocations: list[Allocation] = []
    for _, allocation in sorted(ledger.allocations.items()):
        if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN:
            continue
        devices = {name for holding in allocation.holdings for name in holding.devices.get(device_class, ())}
        replicated = {name for holding in allocation.holdings for name in holding.shares.get(device_class, {})}
        if ids_of(allocation) & names or whole & devices or chosen.shares.keys() & (devices - replicated):
            allocations.append(allocation)
    return tuple(allocations)


def with_lingering(
    lists: Mapping[str, tuple[ListEntry, ...]], ledger: Holders | None, lingering: Mapping[str, str]
) -> dict[str, tuple[ListEntry, ...]]:
    """Mark as not healthy what a container still has although kubelet has forgotten its pod.

    Shapes: lists — by resource; lingering — key of an allocation's owner to the reason.
    """
    shown = dict(lists)
    for key, reason in lingering.items():
        allocation = ledger.allocations.get(key) if ledger is not None else None
        if allocation is not None and allocation.owner.name in shown:
            kept = ids_of(allocation)
            shown[allocation.owner.name] = tuple(
                structs.replace(entry, is_healthy=False, reason=entry.reason or reason) if entry.id in kept else entry
                for entry in shown[allocation.owner.name]
            )
    return shown
