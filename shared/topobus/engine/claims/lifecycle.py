"""The lifecycle of a claim as a value: reads a claim and makes its next version.

An allocation takes three writes: first the attempt (with the finalizer), then the node's ledger,
then the status. So after a crash any replica can read how far it came, continue, and repeat the
same operation. The attempts are in `attempts`. The reconcilers write the next version by
compare-and-set.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from topobus.engine.allocation.results import SHARE_PREFIX
from topobus.engine.allocation.values import DeviceId
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.objects import (
    ATTEMPT_ANNOTATION,
    DEALLOCATION_ANNOTATION,
    DELETE_PROTECTION,
    metadata_of,
    name_of,
)
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    ClaimStatus,
    Condition,
)
from topobus.formats.kubernetes.shape import read_as, refuse_problems
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import CPU_CLASS, class_of_device, is_of_node, node_of_pool
from topobus.values.errors import ContractError
from topobus.values.idset import NodeSet
from topobus.values.quantity import Quantity
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy

__all__ = [
    "ADVICE",
    "RELEASED",
    "devices_of",
    "is_finished",
    "owner_of",
    "placement_request",
    "read_claim",
    "status_of",
    "with_advice",
    "with_allocation",
    "with_annotations",
    "with_condition",
    "with_deallocation",
    "with_finalizer",
    "with_result",
    "with_uuids",
    "without_deallocation",
    "without_finalizer",
    "without_protection",
    "without_result",
]

ADVICE = "Advice"
"""The condition of a waiting claim that names the nearest miss and what would fit."""
ALLOCATED = "Allocated"
RELEASED = "Released"

# A condition's message as the API server limits it (metav1.Condition, MaxLength 32768), cut far
# earlier so that a person may read it.
_MAX_MESSAGE = 4096
_NOWHERE = NodeSet()


def read_claim(claim: ApiObject) -> ClaimSpec:
    """Read and check the spec of a stored claim.

    Errors: raises ContractError that lists what is wrong.
    """
    if not metadata_of(claim).uid:
        # Operations are named after the uid: two claims without one would share their answers.
        raise ContractError(
            f"{name_of(claim)}: metadata.uid is missing: wanted an object that was made through the API "
            "(`topobus apply`)"
        )
    spec = read_as(claim.spec, ClaimSpec, where=f"{name_of(claim)}: spec")
    refuse_problems(limits.check_claim(spec), name_of(claim))
    return spec


def status_of(api_object: ApiObject) -> ClaimStatus:
    """Read the status of a stored claim.

    Errors: raises ContractError.
    """
    return read_as(api_object.status, ClaimStatus, where=f"{name_of(api_object)}: status")


def owner_of(claim: ApiObject) -> Owner:
    """Return the claim's owner value, as ledgers have it."""
    metadata = metadata_of(claim)
    return Owner(kind=OwnerKind.CLAIM, namespace=metadata.namespace or "default", name=metadata.name, uid=metadata.uid)


def devices_of(allocation: AllocationResult, node: str) -> tuple[DeviceId, ...]:
    """List the devices of an allocation that the node's ledger is to hold."""
    return tuple(
        DeviceId.of(granted)
        for granted in allocation.devices.results
        if not granted.admin_access and is_of_node(granted.driver, granted.pool, node)
    )


def placement_request(
    claim: ApiObject, allocation: AllocationResult, node: str, wishes: AlignmentRequest | None = None
) -> PodRequest | None:
    """Convert an allocation to a placement request to the node's topology service.

    None when none of its devices is ours. The devices were chosen already, so
    the node's own alignment policy does not apply: policy none, unless the claim itself requests
    one.
    """
    groups: dict[tuple[str, bool, bool], list[str]] = {}
    amounts: dict[str, dict[str, dict[str, int]]] = {}
    for granted in allocation.devices.results:
        device_class = class_of_device(granted.driver, granted.device)
        # Which CPUs a claim has of a group is decided when it is prepared:
        # there is nothing to hold before.
        is_group = device_class == CPU_CLASS and granted.share_id is not None
        if device_class is not None and node_of_pool(granted.pool) == node and not is_group:
            is_share = granted.share_id is not None and not granted.admin_access
            groups.setdefault((device_class, bool(granted.admin_access), is_share), []).append(granted.device)
            if is_share:
                sums = amounts.setdefault(device_class, {}).setdefault(granted.device, {})
                for name, text in granted.consumed_capacity.items():
                    # Fractions count as a whole: what is left must be enough.
                    sums[name] = sums.get(name, 0) - (-Quantity.parse(text).nano // 10**9)
    if not groups:
        return None
    devices = tuple(
        # Several shares of one device in a claim are one holding.
        DeviceRequest(
            device_class=device_class,
            count=len(set(names)),
            names=tuple(sorted(set(names))),
            is_shared=is_admin,
            by_share=is_share,
            amounts={name: sums for name, sums in amounts.get(device_class, {}).items() if sums} if is_share else {},
        )
        for (device_class, is_admin, is_share), names in sorted(groups.items())
    )
    asked = wishes or AlignmentRequest()
    return PodRequest(
        owner=owner_of(claim),
        containers=(ContainerRequest(name="", devices=devices),),
        policy=asked.policy or Policy.NONE,
        scope=asked.scope,
        locality=asked.locality,
    )


def with_annotations(api_object: ApiObject, changes: Mapping[str, str | None]) -> ApiObject:
    """Set annotations, and remove those that are None."""
    annotations_before = api_object.metadata.get("annotations")
    kept = (
        {key: value for key, value in annotations_before.items() if key not in changes}
        if isinstance(annotations_before, Mapping)
        else {}
    )
    annotations = {**kept, **{key: value for key, value in changes.items() if value is not None}}
    return _replace(api_object, metadata={**api_object.metadata, "annotations": annotations})


def with_finalizer(api_object: ApiObject, name: str) -> ApiObject:
    """Add a finalizer, so that the object stays until what it holds is released.

    Return the same object when it has it already.
    """
    finalizers = metadata_of(api_object).finalizers
    return (
        api_object
        if name in finalizers
        else _replace(api_object, metadata={**api_object.metadata, "finalizers": [*finalizers, name]})
    )


def without_finalizer(api_object: ApiObject, name: str) -> ApiObject:
    """Remove a finalizer."""
    finalizers = [finalizer for finalizer in metadata_of(api_object).finalizers if finalizer != name]
    metadata = {key: value for key, value in api_object.metadata.items() if key != "finalizers"}
    return _replace(api_object, metadata={**metadata, "finalizers": finalizers} if finalizers else metadata)


def without_protection(claim: ApiObject) -> ApiObject:
    """Remove our finalizer from a claim."""
    return without_finalizer(claim, DELETE_PROTECTION)


def with_deallocation(reserved: ApiObject, *, why: str) -> ApiObject:
    """Mark a claim for deallocation, before the node releases it, so that any replica continues and
    no pod reserves it.
    """
    return with_annotations(reserved, {DEALLOCATION_ANNOTATION: why})


def without_deallocation(claim: ApiObject) -> ApiObject:
    """Keep an allocation after all: its pod was bound before the mark could be seen."""
    return with_annotations(claim, {DEALLOCATION_ANNOTATION: None})


def with_result(claim: ApiObject, allocation: AllocationResult, *, now: str) -> ApiObject:
    """Write an allocation into the status and nothing else: what a cluster's API server takes in
    one write.
    """
    stamped = msgspec.structs.replace(allocation, allocation_timestamp=now)
    return _replace(claim, status={**claim.status, "allocation": _wire(stamped)})


def with_allocation(
    claim: ApiObject, allocation: AllocationResult, *, now: str, spanned: NodeSet = _NOWHERE
) -> ApiObject:
    """Write an allocation and its condition, which ends the attempt.

    Shapes: spanned — the NUMA nodes of the devices, where they are more than one.
    """
    done = with_annotations(with_result(claim, allocation, now=now), {ATTEMPT_ANNOTATION: None})
    devices = len(allocation.devices.results)
    return with_condition(
        with_advice(done, message="", now=now),
        is_true=True,
        reason="Allocated",
        message=f"{devices} device{'s' if devices != 1 else ''} allocated{_on_nodes(spanned)}",
        now=now,
    )


def _on_nodes(spanned: NodeSet) -> str:
    if not spanned:
        return ""
    nodes = [str(node) for node in spanned]
    return (
        f"; they span NUMA nodes {', '.join(nodes[:-1])} and {nodes[-1]}: with locality hard:numa the claim waits "
        "until one node has them all"
    )


def without_result(claim: ApiObject) -> ApiObject:
    """Clear the allocation and its reservations.

    The drivers' device statuses stay, because in a cluster the server drops them, and writing them
    takes another right.
    """
    return _replace(
        claim, status={key: value for key, value in claim.status.items() if key not in ("reservedFor", "allocation")}
    )


def with_condition(
    api_object: ApiObject,
    *,
    is_true: bool,
    reason: str,
    message: str,
    now: str,
    kind: str = ALLOCATED,
    is_generation_told: bool = True,
) -> ApiObject:
    """Write a condition. Its time changes only when its status does. Return the same object when it
    has the condition already.

    Shapes: is_generation_told — also write the object's generation that the condition is about.
    """
    status = "True" if is_true else "False"
    known_conditions = _conditions(api_object)
    old = next((other for other in known_conditions if other.get("type") == kind), {})
    since = str(old.get("lastTransitionTime") or now) if old.get("status") == status else now
    made = _wire(
        Condition(
            type=kind,
            status=status,
            reason=reason,
            message=_shorten(message),
            last_transition_time=since,
            observed_generation=(metadata_of(api_object).generation or None) if is_generation_told else None,
        )
    )
    # Compared by what is written: a server may add a field, as lastProbeTime to a pod's condition.
    if all(old.get(name) == value for name, value in made.items()):
        return api_object
    conditions = [made if other is old else other for other in known_conditions] if old else [*known_conditions, made]
    return _replace(api_object, status={**api_object.status, "conditions": conditions})


def with_advice(api_object: ApiObject, *, message: str, now: str) -> ApiObject:
    """Write, beside the reason why a claim waits, the nearest misses and what would fit.

    An empty message removes that again.
    """
    if message:
        return with_condition(api_object, is_true=True, reason="NearestMiss", message=message, now=now, kind=ADVICE)
    kept = [other for other in _conditions(api_object) if other.get("type") != ADVICE]
    return (
        api_object
        if len(kept) == len(_conditions(api_object))
        else _replace(api_object, status={**api_object.status, "conditions": kept})
    )


def is_finished(api_object: ApiObject) -> bool:
    """Say whether nothing prevents the removal of a deleted object."""
    return not metadata_of(api_object).finalizers


def with_uuids(allocation: AllocationResult, claim_uid: str) -> AllocationResult:
    """Give each share its id: a UUID made from the claim's, so that a repeated computation gives
    the same.
    """
    results = tuple(
        msgspec.structs.replace(
            granted_device, share_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{claim_uid}/{granted_device.share_id}"))
        )
        if granted_device.share_id is not None and granted_device.share_id.startswith(SHARE_PREFIX)
        else granted_device
        for granted_device in allocation.devices.results
    )
    return msgspec.structs.replace(allocation, devices=msgspec.structs.replace(allocation.devices, results=results))


def _conditions(api_object: ApiObject) -> list[dict[str, Any]]:
    """List the entries that are conditions. Any client may have stored other values there."""
    conditions = api_object.status.get("conditions")
    return [old for old in conditions if isinstance(old, dict)] if isinstance(conditions, list) else []


def _wire(value: Struct) -> dict[str, Any]:
    """Give a value the same shape that it has when it is read again: lists, not tuples."""
    return decode(encode(value), dict[str, Any], where="status")


def _shorten(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _replace(api_object: ApiObject, **changes: Any) -> ApiObject:
    return msgspec.structs.replace(api_object, **changes)
