"""Finds the pod that uses a device plugin allocation: Allocate names no pod, and kubelet's PodResources lists it afterwards.

Flows in: the ledger, devices by container as kubelet lists them. Flows out: the pod of each allocation whose pod the ledger does not have yet. While two pods are
listed for one allocation (kubelet lists an ended pod for a while) nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.domain.holdings import names_of
from topobus.domain.ledger import Allocation, Holders
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.core.pods import PodUse

__all__ = ["nameless", "unnamed_users"]


def nameless(ledger: Holders | None) -> tuple[Allocation, ...]:
    """List allocations of kubelet's own of which nobody has said the pod."""
    allocations = ledger.allocations.values() if ledger is not None else ()
    return tuple(allocation for allocation in allocations if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN and allocation.user is None)


def unnamed_users(ledger: Holders, uses: Iterable[PodUse]) -> tuple[tuple[Allocation, Owner], ...]:
    """Find the pod of each device plugin allocation, where the ledger says none or another one; by the owner's key. kubelet tells no uid, so it is empty."""
    pods: dict[tuple[str, str], set[Owner]] = {}
    for use in uses:
        for device in use.devices if use.resource else ():
            user = Owner(kind=OwnerKind.POD, namespace=use.namespace, name=use.pod, uid="")
            pods.setdefault((use.resource, device), set()).add(user)
    unnamed: list[tuple[Allocation, Owner]] = []
    for _, allocation in sorted(ledger.allocations.items()):
        if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN:
            continue
        held = [name for names in names_of(allocation).values() for name in names]
        users = {user for name in held for user in pods.get((allocation.owner.name, name), ())}
        if len(users) == 1 and users != {allocation.user}:
            unnamed.append((allocation, users.pop()))
    return tuple(unnamed)
