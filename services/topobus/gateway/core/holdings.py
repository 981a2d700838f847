"""Finds device plugin allocations that no pod uses any more.

Flows in: the ledger, and the ids that kubelet lists for its pods. Flows out: allocations to release. Claims and pods that topology placed are left out: they have a
release of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.domain.ledger import Allocation, Holders
from topobus.domain.request import OwnerKind
from topobus.gateway.core.replicas import ids_of

__all__ = ["idle_allocations"]


def idle_allocations(ledger: Holders, in_use: Mapping[str, frozenset[str]]) -> tuple[Allocation, ...]:
    """Find device plugin allocations of which no device is in use; one device in use keeps all of them.

    Shapes: in_use — resource name to device ids. The owner's name is the resource.
    """
    return tuple(
        allocation
        for _, allocation in sorted(ledger.allocations.items())
        if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN and not ids_of(allocation) & in_use.get(allocation.owner.name, frozenset())
    )
