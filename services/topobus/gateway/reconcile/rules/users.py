"""Finds the pods, and the one container, that use a device plugin allocation or a claim, from the
devices that kubelet lists by container.

Allocate names no pod, and kubelet's PodResources lists it only afterwards. A claim names its pods
and not their containers, and may get further pods later. The result has the pod of each allocation
whose pod the ledger does not have yet. While two pods are listed for one allocation (kubelet lists
an ended pod for a while), nothing is reported.

kubelet lists all devices of a claim for a container that names one of its requests, or that has one
of the claim's extended resources. So a claim has a container here only where no other one uses the
claim.
Source: kubelet 1.36 cm/dra/manager.go, GetContainerClaimInfos; cm/container_manager_linux.go,
GetDynamicResources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from topobus.gateway.device_plugins.rules.replicas import ids_of
from topobus.gateway.reconcile.rules.pods import PodUse
from topobus.values.ledger import Allocation, Holders
from topobus.values.request import Owner, OwnerKind

__all__ = ["ClaimUsers", "nameless", "pod_of", "unnamed_users", "users_of_claims", "without_uid"]


class ClaimUsers(Struct, frozen=True, kw_only=True):
    """The pods that use a claim now."""

    pods: tuple[Owner, ...] = ()
    """Sorted."""
    container: str = ""
    """Their one container. Empty: several, or not known yet."""
    is_listed: bool = False
    """Whether kubelet lists all of the pods, at least one."""


def nameless(ledger: Holders | None) -> tuple[Allocation, ...]:
    """List allocations of kubelet whose pod is not known yet."""
    allocations = ledger.allocations.values() if ledger is not None else ()
    return tuple(
        allocation
        for allocation in allocations
        if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN and allocation.user is None
    )


def unnamed_users(ledger: Holders, uses: Iterable[PodUse]) -> tuple[tuple[Allocation, Owner, str], ...]:
    """Find the pod of each device plugin allocation, and its container, for which the ledger has
    none or another one.

    In the order of the owners' keys. kubelet lists no uid, so it is empty. So is the container where
    kubelet lists several.
    """
    listed: dict[tuple[str, str], set[tuple[Owner, str]]] = {}
    for use in uses:
        for device in use.devices if use.resource else ():
            listed.setdefault((use.resource, device), set()).add((pod_of(use), use.container))
    unnamed: list[tuple[Allocation, Owner, str]] = []
    for _, allocation in sorted(ledger.allocations.items()):
        if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN:
            continue
        users = {user for name in ids_of(allocation) for user in listed.get((allocation.owner.name, name), ())}
        pods, containers = {pod for pod, _ in users}, {container for _, container in users}
        container = containers.pop() if len(containers) == 1 else ""
        if len(pods) == 1 and (pods != {allocation.user} or container != allocation.container):
            unnamed.append((allocation, pods.pop(), container))
    return tuple(unnamed)


def users_of_claims(
    ledger: Holders, uses: Iterable[PodUse], listed_before: Mapping[str, frozenset[Owner]]
) -> dict[str, ClaimUsers]:
    """Return who uses each claim now, by the owner's key.

    The pods are those that kubelet lists, and those that the ledger has and kubelet has not listed
    yet: a claim may be reserved for a pod some time before kubelet lists it.
    Shapes: listed_before — by the owner's key, pods that kubelet has listed once, without uids.
    """
    listed: dict[tuple[str, str], set[tuple[Owner, str]]] = {}
    for use in uses:
        if use.claim:
            listed.setdefault((use.claim_namespace, use.claim), set()).add((pod_of(use), use.container))
    users: dict[str, ClaimUsers] = {}
    for key, allocation in sorted(ledger.allocations.items()):
        owner = allocation.owner
        if owner.kind is not OwnerKind.CLAIM:
            continue
        listed_here = listed.get((owner.namespace, owner.name), set())
        present, containers = {pod for pod, _ in listed_here}, {container for _, container in listed_here}
        kept = [
            pod
            for pod in allocation.pods
            if without_uid(pod) in present or without_uid(pod) not in listed_before.get(key, ())
        ]
        kept_names = set(map(without_uid, kept))
        is_listed = bool(present) and kept_names <= present
        pods = tuple(sorted((*kept, *(present - kept_names)), key=lambda pod: pod.key))
        if is_listed:
            container = containers.pop() if len(containers) == 1 else ""
        else:
            container = allocation.container if pods == allocation.pods else ""
        users[key] = ClaimUsers(pods=pods, container=container, is_listed=is_listed)
    return users


def without_uid(pod: Owner) -> Owner:
    """Return a pod's name without its uid, as kubelet lists it."""
    return structs.replace(pod, uid="")


def pod_of(use: PodUse) -> Owner:
    """Return the name of a container's pod as kubelet lists it."""
    return Owner(kind=OwnerKind.POD, namespace=use.namespace, name=use.pod, uid="")
