"""What scheduling reads in a pod and its claims, and their next versions: reservations,
deallocation, a pod's node and condition.

The objects come from either store (the KV bucket or an API server), and the reconcilers write the
next versions by compare-and-set. The decisions are in `scheduling`.
Source: k8s.io/dynamic-resource-allocation/resourceclaim (IsForPod, IsReservedForPod,
CanBeReserved), 1.36.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from topobus.engine.claims.attempts import without_attempt
from topobus.engine.claims.extended_resources import extended_claim_name
from topobus.engine.claims.lifecycle import status_of, with_annotations, with_condition, with_result, without_result
from topobus.formats.kubernetes.objects import RETREATS_ANNOTATION, metadata_of, name_of
from topobus.formats.kubernetes.pod import PodSpec
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = [
    "ALLOCATION_MODE_ANNOTATION",
    "MAX_CONSUMERS",
    "POD_SCHEDULED",
    "AllocationMode",
    "ClaimUse",
    "Consumer",
    "PodRef",
    "claim_uses",
    "consumers_of",
    "full_reason",
    "is_bound",
    "is_made_for",
    "mode_of",
    "node_of_pod",
    "pod_ref",
    "with_bound_allocation",
    "with_node",
    "with_pod_condition",
    "with_reservation",
    "with_retreat",
    "without_allocation",
    "without_reservations",
]

ALLOCATION_MODE_ANNOTATION = "topobus.dev/allocation-mode"
"""On a claim: `Immediate` allocates it as soon as it is stored, `WaitForFirstConsumer` when a pod
that uses it is scheduled. Classic DRA's names for it."""
MAX_CONSUMERS = 256
"""Entries of a claim's reservedFor (resource/v1 ResourceClaimReservedForMaxSize)."""
POD_SCHEDULED = "PodScheduled"


class AllocationMode(StrEnum):
    """When a claim is allocated."""

    IMMEDIATE = "Immediate"
    DELAYED = "WaitForFirstConsumer"


class PodRef(NamedTuple):
    """A pod by name and identity."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


class ClaimUse(NamedTuple):
    """One entry of a pod's `spec.resourceClaims`."""

    entry: str
    """The name under which the pod's containers know the claim."""
    claim: str
    """The claim's name; empty while it has not been made from its template."""
    is_generated: bool
    template: str = ""


class Consumer(NamedTuple):
    """One entry of a claim's reservedFor."""

    resource: str
    name: str
    uid: str
    api_group: str = ""

    def __str__(self) -> str:
        return f"{self.resource.removesuffix('s')} {self.name}"


def pod_ref(pod: ApiObject) -> PodRef:
    """Name a pod."""
    metadata = metadata_of(pod)
    return PodRef(metadata.namespace or "default", metadata.name, metadata.uid)


def claim_uses(pod: ApiObject) -> tuple[ClaimUse, ...]:
    """List the claims of a pod in the order of its spec.

    An entry that needs none, by the pod's status, is left out.

    Errors: raises ContractError for a pod that cannot be read.
    """
    spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
    statuses = _claim_statuses(pod)
    uses: list[ClaimUse] = []
    for resource_claim in spec.resource_claims:
        if resource_claim.claim_name:
            uses.append(ClaimUse(resource_claim.name, resource_claim.claim_name, is_generated=False))
        elif resource_claim.name in statuses:
            made = statuses[resource_claim.name]
            if made is not None:
                uses.append(
                    ClaimUse(resource_claim.name, made, is_generated=True, template=resource_claim.template_name)
                )
        else:
            uses.append(ClaimUse(resource_claim.name, "", is_generated=True, template=resource_claim.template_name))
    special = extended_claim_name(pod)
    if special:
        uses.append(ClaimUse("", special, is_generated=True))
    return tuple(uses)


def consumers_of(claim: ApiObject) -> tuple[Consumer, ...]:
    """List the users that have reserved a claim.

    Errors: raises ContractError.
    """
    return tuple(
        Consumer(
            str(user.get("resource", "")),
            str(user.get("name", "")),
            str(user.get("uid", "")),
            str(user.get("apiGroup") or ""),
        )
        for user in status_of(claim).reserved_for
    )


def is_made_for(claim: ApiObject, pod: PodRef) -> bool:
    """Say whether the pod owns the claim as its controller: a claim made from a template is used by
    its pod only.
    """
    return any(
        owner_reference.get("controller") and owner_reference.get("uid") == pod.uid
        for owner_reference in metadata_of(claim).owner_references
    )


def mode_of(claim: ApiObject) -> AllocationMode | None:
    """Read the claim's allocation mode. None when it has none.

    Errors: raises ContractError for anything but the two modes.
    """
    text = metadata_of(claim).annotations.get(ALLOCATION_MODE_ANNOTATION)
    if text is None:
        return None
    try:
        return AllocationMode(text)
    except ValueError as err:
        wanted = " or ".join(AllocationMode)
        raise ContractError(
            f"{name_of(claim)}: metadata.annotations.{ALLOCATION_MODE_ANNOTATION} is {text!r}, wanted {wanted}"
        ) from err


def node_of_pod(pod: ApiObject) -> str:
    """Name the node that a pod was bound to. Empty before."""
    node = pod.spec.get("nodeName")
    return node if isinstance(node, str) else ""


def is_bound(pod: ApiObject) -> bool:
    """Say whether the scheduler has recorded the pod's node.

    A node that the user named is where the pod may go, not yet where it is.
    """
    conditions = pod.status.get("conditions")
    known_conditions = (
        [condition for condition in conditions if isinstance(condition, dict)] if isinstance(conditions, list) else []
    )
    return bool(node_of_pod(pod)) and any(
        condition.get("type") == POD_SCHEDULED and condition.get("status") == "True" for condition in known_conditions
    )


def with_reservation(claim: ApiObject, pod: PodRef) -> ApiObject | Reason:
    """Reserve a claim for a pod.

    Return the same object when it is reserved already, a Reason when it is full.
    """
    consumers = consumers_of(claim)
    if any(consumer.uid == pod.uid for consumer in consumers):
        return claim
    if len(consumers) >= MAX_CONSUMERS:
        return full_reason(claim, len(consumers))
    entry = {"resource": "pods", "name": pod.name, "uid": pod.uid}
    return _with_status(claim, {**claim.status, "reservedFor": [*(claim.status.get("reservedFor") or []), entry]})


def full_reason(claim: ApiObject, count: int) -> Reason:
    """Return the reason why a claim takes no more users."""
    message = f"{name_of(claim)} is reserved for {count} users already, at most {MAX_CONSUMERS} may share it"
    return Reason(code="claim-full", message=message, facts={"claim": metadata_of(claim).name, "reserved_for": count})


def with_bound_allocation(
    claim: ApiObject, allocation: AllocationResult, pod: PodRef, *, now: str
) -> ApiObject | Reason:
    """Write an allocation and the reservation in one write, as kube-scheduler's PreBind does: an
    allocation without a reservation could be deallocated by any replica.

    Return a Reason when the claim is full.
    """
    return with_reservation(with_result(claim, allocation, now=now), pod)


def without_reservations(claim: ApiObject, uids: Iterable[str]) -> ApiObject:
    """Remove users from a claim. Return the same object when none of them was there."""
    gone = frozenset(uids)
    reserved_for = claim.status.get("reservedFor")
    kept = (
        [user for user in reserved_for if not (isinstance(user, dict) and user.get("uid") in gone)]
        if isinstance(reserved_for, list)
        else []
    )
    if not isinstance(reserved_for, list) or len(kept) == len(reserved_for):
        return claim
    rest = {key: value for key, value in claim.status.items() if key != "reservedFor"}
    return _with_status(claim, {**rest, "reservedFor": kept} if kept else rest)


def without_allocation(claim: ApiObject, *, why: str, now: str) -> ApiObject:
    """Deallocate a claim: remove its reservations, devices and finalizer.

    The node must have released the devices before this is written.
    """
    cleared = without_result(claim)
    freed = without_attempt(
        _with_status(cleared, {key: value for key, value in cleared.status.items() if key != "devices"})
    )
    return with_condition(freed, is_true=False, reason="TakenBack", message=why, now=now)


def with_pod_condition(pod: ApiObject, *, is_true: bool, reason: str, message: str, now: str) -> ApiObject:
    """Write the condition PodScheduled, as kube-scheduler does."""
    return with_condition(pod, is_true=is_true, reason=reason, message=message, now=now, kind=POD_SCHEDULED)


def with_retreat(pod: ApiObject) -> ApiObject:
    """Count one more retreat of a pod: written before its claims are deallocated, so that no other
    replica binds it to claims that it is about to lose.
    """
    annotations = pod.metadata.get("annotations")
    text = annotations.get(RETREATS_ANNOTATION) if isinstance(annotations, dict) else None
    count = int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10 else 0
    return with_annotations(pod, {RETREATS_ANNOTATION: str(count + 1)})


def with_node(pod: ApiObject, node: str, *, now: str) -> ApiObject:
    """Bind a pod to its node."""
    bound = msgspec.structs.replace(pod, spec={**pod.spec, "nodeName": node})
    return with_pod_condition(bound, is_true=True, reason="Scheduled", message=f"scheduled on node {node}", now=now)


def _claim_statuses(pod: ApiObject) -> Mapping[str, str | None]:
    """Read which claims were made for a pod. None means that an entry needs none."""
    resource_claim_statuses = pod.status.get("resourceClaimStatuses")
    entries = (
        [status for status in resource_claim_statuses if isinstance(status, dict)]
        if isinstance(resource_claim_statuses, list)
        else []
    )
    return {
        str(entry.get("name", "")): str(entry["resourceClaimName"]) if entry.get("resourceClaimName") else None
        for entry in entries
    }


def _with_status(claim: ApiObject, status: dict[str, Any]) -> ApiObject:
    return msgspec.structs.replace(claim, status=status)
