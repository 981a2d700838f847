"""Pods behind our gate and the claims that we allocate for them, as values: what is written down where, and the patches that write it.

The order of writes is: intent and finalizer into the claim (annotation `topobus.dev/attempt`), the node's ledger, allocation together with the reservation into the
claim's status, the gate off the pod. Each write carries the resource version on which it was decided, so whoever was slower learns it. The intent stays in the
claim as a note of who allocated it for whom, until something else is tried.

Flows in: claims and pods as stored. Flows out: merge patches (RFC 7386) as plain objects, and readings of the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from topobus.contracts.codec import decode, encode
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.gate import GATE, gates_of
from topobus.controller.claims.lifecycle import Attempt
from topobus.controller.claims.reservations import (
    ALLOCATION_MODE_ANNOTATION,
    MAX_CONSUMERS,
    PodRef,
    full_reason,
)
from topobus.domain.errors import ContractError
from topobus.domain.outcome import Reason
from topobus.kubernetes.api.objects import (
    ATTEMPT_ANNOTATION,
    ATTEMPTS_ANNOTATION,
    DELETE_PROTECTION,
    metadata_of,
    name_of,
)
from topobus.kubernetes.api.resource import AllocationResult

__all__ = [
    "ALLOCATED_CONDITION",
    "MAX_REFUSED_NODES",
    "RESERVED_TAINT",
    "GateAttempt",
    "allocation_patch",
    "condition_patch",
    "deallocation_patch",
    "gate_attempt_of",
    "gate_patch",
    "has_condition",
    "holds_what_was_noted",
    "intent_patch",
    "is_pending",
    "lengthened",
    "protection_patch",
    "reservation_patch",
    "reserved_uids",
    "shortened",
    "unreservation_patch",
    "was_ours",
    "withdrawal_patch",
    "without_note",
]

ALLOCATED_CONDITION = "topobus.dev/Allocated"
"""The condition in the status of a pod that waits behind our gate."""
RESERVED_TAINT = GATE
"""A device taint that keeps kube-scheduler away from devices: only claims of gated pods, which we allocate, get them."""
MAX_REFUSED_NODES = 64
"""Nodes remembered in a claim's note; an annotation is no place for a cluster's whole list."""

_MAX_MESSAGE = 1024
# All annotations of an object together may have 256 KiB (apimachinery, TotalAnnotationSizeLimitB); the rest is the user's.
_MAX_NOTE = 128 * 1024


class GateAttempt(Attempt, frozen=True, kw_only=True, omit_defaults=True):
    """The note in a claim that we allocate for a gated pod; to other readers it is an attempt as in the stand-alone API."""

    is_short: bool = False
    """True: the configuration is left out, for it is too long for a note; who makes the intent true works it out again."""
    pod: str = ""
    """The uid of the pod for which the claim is allocated."""
    refused: tuple[str, ...] = ()
    """Nodes (`node` empty: nothing is intended now) on which kube-scheduler could not place the pod, in the order in which they were tried."""


def gate_attempt_of(claim: ApiObject) -> GateAttempt | None:
    """Read our note in a claim; None when there is none, or it is not for a pod.

    Errors: raises ContractError when somebody wrote something else there.
    """
    text = metadata_of(claim).annotations.get(ATTEMPT_ANNOTATION)
    if text is None:
        return None
    note = decode(text, GateAttempt, where=f"{name_of(claim)}: annotation {ATTEMPT_ANNOTATION}")
    return note if note.pod else None


def is_pending(claim: ApiObject) -> bool:
    """Say whether a claim has an intent and no allocation."""
    try:
        note = gate_attempt_of(claim)
    except ContractError:
        return False
    return note is not None and bool(note.node) and not claim.status.get("allocation")


def reserved_uids(claim: ApiObject) -> frozenset[str]:
    """Name who has reserved a claim, by uid."""
    return frozenset(str(one.get("uid", "")) for one in _reserved(claim))


def holds_what_was_noted(claim: ApiObject, note: GateAttempt) -> bool:
    """Say whether a claim's status has the very devices of our note; the rest of an allocation comes back from a server with its defaults filled in."""
    allocation = claim.status.get("allocation")
    devices = allocation.get("devices") if isinstance(allocation, Mapping) else None
    results = devices.get("results") if isinstance(devices, Mapping) else None
    found = [result for result in results if isinstance(result, Mapping)] if isinstance(results, list) else []
    granted = {(one.get("driver"), one.get("pool"), one.get("device"), one.get("shareID")) for one in found}
    return isinstance(allocation, Mapping) and granted == {
        (granted_device.driver, granted_device.pool, granted_device.device, granted_device.share_id)
        for granted_device in note.allocation.devices.results
    }


def was_ours(claim: ApiObject) -> bool:
    """Say whether we ever intended something for a claim: the count of attempts stays when an intent goes."""
    return ATTEMPTS_ANNOTATION in metadata_of(claim).annotations


def without_note(claim: ApiObject) -> ApiObject:
    """Show a claim without our note (what it says counts no more, or is to be judged anew) and without what only the stand-alone API knows."""
    annotations = {key: value for key, value in _annotations(claim).items() if key not in (ATTEMPT_ANNOTATION, ALLOCATION_MODE_ANNOTATION)}
    return structs.replace(claim, metadata={**claim.metadata, "annotations": annotations})


def shortened(note: GateAttempt) -> GateAttempt:
    """Leave the configuration out of a note that would not fit into an object's annotations."""
    if len(encode(note)) <= _MAX_NOTE:
        return note
    devices = structs.replace(note.allocation.devices, config=())
    return structs.replace(note, allocation=structs.replace(note.allocation, devices=devices), is_short=True)


def lengthened(note: GateAttempt, result: AllocationResult) -> AllocationResult:
    """Give a note's allocation with its configuration.

    Shapes: found — what a search found for the claim when it might choose among the note's devices only.
    """
    if not note.is_short:
        return note.allocation
    return structs.replace(note.allocation, devices=structs.replace(note.allocation.devices, config=result.devices.config))


def intent_patch(claim: ApiObject, note: GateAttempt) -> dict[str, Any]:
    """Write down what is about to be allocated, and protect the claim from vanishing meanwhile."""
    finalizers = [*(finalizer for finalizer in metadata_of(claim).finalizers if finalizer != DELETE_PROTECTION), DELETE_PROTECTION]
    annotations = {ATTEMPT_ANNOTATION: encode(note).decode(), ATTEMPTS_ANNOTATION: str(note.number)}
    return _patch(claim, metadata={"finalizers": finalizers, "annotations": annotations})


def withdrawal_patch(claim: ApiObject) -> dict[str, Any]:
    """Take an intent back that came to nothing; the count of attempts stays, so that the next one's operation has another id.

    An unallocated claim needs no protection, so the finalizer goes with the intent.
    """
    metadata: dict[str, Any] = {"annotations": {ATTEMPT_ANNOTATION: None}}
    if not claim.status.get("allocation"):
        metadata["finalizers"] = [finalizer for finalizer in metadata_of(claim).finalizers if finalizer != DELETE_PROTECTION] or None
    return _patch(claim, metadata=metadata)


def allocation_patch(claim: ApiObject, allocation: AllocationResult, pod: PodRef, *, now: str) -> dict[str, Any] | Reason:
    """Allocate and reserve in one write, as kube-scheduler's PreBind does: an allocation that nobody has reserved would be anybody's to take back.

    A Reason when the claim has as many users as it may have: the server would refuse the write again and again.
    """
    users = _with_pod(claim, pod)
    if isinstance(users, Reason):
        return users
    stamped = structs.replace(allocation, allocation_timestamp=now)
    wire = decode(encode(stamped), dict[str, Any], where="allocation")
    return _patch(claim, status={"allocation": wire, "reservedFor": users})


def reservation_patch(claim: ApiObject, pod: PodRef) -> dict[str, Any] | Reason:
    """Reserve a claim that is allocated already; a Reason when it has as many users as it may have."""
    users = _with_pod(claim, pod)
    return users if isinstance(users, Reason) else _patch(claim, status={"reservedFor": users})


def unreservation_patch(claim: ApiObject, uids: frozenset[str]) -> dict[str, Any]:
    """Take users off a claim."""
    return _patch(claim, status={"reservedFor": [one for one in _reserved(claim) if one.get("uid") not in uids] or None})


def deallocation_patch(claim: ApiObject) -> dict[str, Any]:
    """Take an allocation back: no devices, no reservation. What drivers said about the devices the server drops by itself."""
    return _patch(claim, status={"allocation": None, "reservedFor": None})


def protection_patch(claim: ApiObject) -> dict[str, Any]:
    """Take the finalizer off a claim that holds nothing."""
    return _patch(
        claim, metadata={"finalizers": [finalizer for finalizer in metadata_of(claim).finalizers if finalizer != DELETE_PROTECTION] or None}
    )


def gate_patch(pod: ApiObject) -> dict[str, Any]:
    """Take our gate off; others' stay."""
    rest = [{"name": gate} for gate in gates_of(pod) if gate != GATE]
    return _patch(pod, spec={"schedulingGates": rest or None})


def has_condition(pod: ApiObject) -> bool:
    """Say whether a pod was ever told how its claims stand."""
    conditions = pod.status.get("conditions")
    return isinstance(conditions, list) and any(isinstance(one, Mapping) and one.get("type") == ALLOCATED_CONDITION for one in conditions)


def condition_patch(pod: ApiObject, *, is_true: bool, reason: str, message: str, now: str) -> dict[str, Any] | None:
    """Tell in the pod's status how its claims stand; None when that is there already. The time changes only when the status does."""
    status, since = ("True" if is_true else "False"), now
    shown = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"
    others: list[Mapping[str, Any]] = []
    conditions = pod.status.get("conditions")
    for old in conditions if isinstance(conditions, list) else []:
        if not isinstance(old, Mapping) or old.get("type") != ALLOCATED_CONDITION:
            others.append(old)
            continue
        if (old.get("status"), old.get("reason"), old.get("message")) == (status, reason, shown):
            return None
        since = str(old.get("lastTransitionTime") or now) if old.get("status") == status else now
    made = {"type": ALLOCATED_CONDITION, "status": status, "reason": reason, "message": shown, "lastTransitionTime": since}
    return _patch(pod, status={"conditions": [*others, made]})


def _patch(claim: ApiObject, **parts: dict[str, Any]) -> dict[str, Any]:
    """Bind a patch to the very object on which it was decided."""
    identity = {"uid": claim.metadata.get("uid"), "resourceVersion": claim.metadata.get("resourceVersion")}
    return {**parts, "metadata": {**parts.get("metadata", {}), **identity}}


def _with_pod(claim: ApiObject, pod: PodRef) -> list[Any] | Reason:
    """List a claim's users with one more; as `with_reservation` does it for whole objects."""
    known = _reserved(claim)
    if any(user.get("uid") == pod.uid for user in known):
        return known
    if len(known) >= MAX_CONSUMERS:
        return full_reason(claim, len(known))
    return [*known, {"resource": "pods", "name": pod.name, "uid": pod.uid}]


def _reserved(claim: ApiObject) -> list[dict[str, Any]]:
    reserved_for = claim.status.get("reservedFor")
    return [one for one in reserved_for if isinstance(one, dict)] if isinstance(reserved_for, list) else []


def _annotations(api_object: ApiObject) -> dict[str, Any]:
    found_annotations = api_object.metadata.get("annotations")
    return found_annotations if isinstance(found_annotations, dict) else {}
