"""The life of a claim as a value: what its object says, and what it says next.

Three writes make an allocation: first the attempt (with the finalizer), then the node's ledger, then the status; so whoever finds the claim after a crash can
tell how far it came and go on, and a second replica repeats the very same operation. The attempt is an annotation, for the status is Kubernetes' own.

Flows in: a stored ResourceClaim. Flows out: its next version. The shell writes each by compare-and-set.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from topobus.contracts.codec import decode, encode
from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.results import SHARE_PREFIX
from topobus.controller.allocation.values import DeviceId
from topobus.domain.device import class_of_driver
from topobus.domain.errors import ContractError
from topobus.domain.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.kubernetes.api import limits
from topobus.kubernetes.api.alignment_request import AlignmentRequest
from topobus.kubernetes.api.objects import (
    ATTEMPT_ANNOTATION,
    ATTEMPTS_ANNOTATION,
    DEALLOCATION_ANNOTATION,
    DELETE_PROTECTION,
    metadata_of,
    name_of,
)
from topobus.kubernetes.api.resource import (
    AllocationResult,
    ClaimSpec,
    ClaimStatus,
    Condition,
    GrantedConfiguration,
    GrantedDevice,
)
from topobus.kubernetes.api.shape import read_as

__all__ = [
    "ADVICE",
    "ATTEMPT_ANNOTATION",
    "RELEASED",
    "Attempt",
    "allocation_of",
    "attempt_of",
    "devices_of",
    "has_condition",
    "is_finished",
    "number_of",
    "owner_of",
    "placement_request",
    "read_claim",
    "status_of",
    "with_advice",
    "with_allocation",
    "with_attempt",
    "with_condition",
    "with_deallocation",
    "with_uuids",
    "without_attempt",
    "without_deallocation",
    "without_protection",
]

ADVICE = "Advice"
"""The condition of a waiting claim that names the nearest miss and what would fit."""
ALLOCATED = "Allocated"
RELEASED = "Released"

# A condition's message as the API server limits it (metav1.Condition, MaxLength 32768), cut far earlier so that a person may read it.
_MAX_MESSAGE = 4096


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An allocation that is being committed at a node."""

    number: int
    node: str
    allocation: AllocationResult
    wishes: AlignmentRequest | None = None
    """What the claim asked of its alignment then: a repeated operation must ask for the same."""
    copies: dict[str, int] = {}
    """Places in the allocation's configuration at which one of the claim's own stands, to its place in the spec: it is not written a second time into the object."""


def read_claim(claim: ApiObject) -> ClaimSpec:
    """Read and check the spec of a stored claim.

    Errors: raises ContractError that lists what is wrong.
    """
    if not metadata_of(claim).uid:
        # Operations are named after the uid: two claims without one would share their answers.
        raise ContractError(
            f"{name_of(claim)}: metadata.uid is missing: wanted an object that was made through the API (`topobus claim apply`)"
        )
    spec = read_as(claim.spec, ClaimSpec, where=f"{name_of(claim)}: spec")
    problems = limits.check_claim(spec)
    if problems:
        raise ContractError(f"{name_of(claim)}: " + "; ".join(str(problem) for problem in problems))
    return spec


def status_of(api_object: ApiObject) -> ClaimStatus:
    """Read the status of a stored claim.

    Errors: raises ContractError.
    """
    return read_as(api_object.status, ClaimStatus, where=f"{name_of(api_object)}: status")


def attempt_of(api_object: ApiObject) -> Attempt | None:
    """Find the attempt under way.

    Errors: raises ContractError when somebody wrote something else there.
    """
    text = metadata_of(api_object).annotations.get(ATTEMPT_ANNOTATION)
    if text is None:
        return None
    where = f"{name_of(api_object)}: annotation {ATTEMPT_ANNOTATION}"
    attempt = decode(text, Attempt, where=where)
    return _with_copies(api_object, attempt, where) if attempt.copies else attempt


def number_of(claim: ApiObject) -> int:
    """Count the attempts made so far."""
    text = metadata_of(claim).annotations.get(ATTEMPTS_ANNOTATION, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def owner_of(claim: ApiObject) -> Owner:
    """Name the claim as the ledger knows it."""
    metadata = metadata_of(claim)
    return Owner(kind=OwnerKind.CLAIM, namespace=metadata.namespace or "default", name=metadata.name, uid=metadata.uid)


def allocation_of(claim: ApiObject) -> AllocationResult | None:
    """Find what a claim has been allocated, or is about to be.

    Errors: raises ContractError.
    """
    attempt = attempt_of(claim)
    return status_of(claim).allocation or (attempt.allocation if attempt is not None else None)


def devices_of(allocation: AllocationResult, node: str) -> tuple[DeviceId, ...]:
    """List the devices of an allocation that the node's ledger is to hold."""
    return tuple(
        _device_id(granted)
        for granted in allocation.devices.results
        if not granted.admin_access and granted.pool == node and class_of_driver(granted.driver) is not None
    )


def placement_request(
    claim: ApiObject, allocation: AllocationResult, node: str, wishes: AlignmentRequest | None = None
) -> PodRequest | None:
    """Turn an allocation into what the node's topology is to hold; None when no device of it is ours.

    The devices were chosen already, so the node's own alignment policy has no say: policy none, unless the claim itself wishes for one.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for granted in allocation.devices.results:
        device_class = class_of_driver(granted.driver)
        if device_class is not None and granted.pool == node:
            groups.setdefault((device_class, bool(granted.admin_access)), []).append(granted.device)
    if not groups:
        return None
    devices = tuple(
        DeviceRequest(device_class=device_class, count=len(names), names=tuple(sorted(names)), is_shared=is_shared)
        for (device_class, is_shared), names in sorted(groups.items())
    )
    asked = wishes or AlignmentRequest()
    return PodRequest(
        owner=owner_of(claim),
        containers=(ContainerRequest(name="", devices=devices),),
        policy=asked.policy or Policy.NONE,
        scope=asked.scope,
        locality=asked.locality,
    )


def with_attempt(api_object: ApiObject, attempt: Attempt) -> ApiObject:
    """Write down an attempt and protect the claim from being deleted."""
    annotations = {
        **(api_object.metadata.get("annotations") or {}),
        ATTEMPT_ANNOTATION: encode(_without_copies(api_object, attempt)).decode(),
        ATTEMPTS_ANNOTATION: str(attempt.number),
    }
    finalizers = [*(name for name in metadata_of(api_object).finalizers if name != DELETE_PROTECTION), DELETE_PROTECTION]
    return _replace(api_object, metadata={**api_object.metadata, "annotations": annotations, "finalizers": finalizers})


def without_attempt(api_object: ApiObject) -> ApiObject:
    """Drop an attempt that came to nothing; the number stays, so the next operation has another id. Nothing is held, so nothing is protected."""
    ours = (ATTEMPT_ANNOTATION, DEALLOCATION_ANNOTATION)
    annotations = {key: value for key, value in (api_object.metadata.get("annotations") or {}).items() if key not in ours}
    return without_protection(_replace(api_object, metadata={**api_object.metadata, "annotations": annotations}))


def with_deallocation(reserved: ApiObject, *, why: str) -> ApiObject:
    """Ask for the allocation to be taken back: written before the node lets go, so that whoever finds the claim goes on, and nobody reserves it."""
    annotations = {**(reserved.metadata.get("annotations") or {}), DEALLOCATION_ANNOTATION: why}
    return _replace(reserved, metadata={**reserved.metadata, "annotations": annotations})


def without_deallocation(api_object: ApiObject) -> ApiObject:
    """Keep an allocation after all: its pod was bound before the mark could be seen."""
    annotations = {key: value for key, value in (api_object.metadata.get("annotations") or {}).items() if key != DEALLOCATION_ANNOTATION}
    return _replace(api_object, metadata={**api_object.metadata, "annotations": annotations})


def with_allocation(api_object: ApiObject, allocation: AllocationResult, *, now: str) -> ApiObject:
    """Write the result of an attempt into the status."""
    annotations = {key: value for key, value in (api_object.metadata.get("annotations") or {}).items() if key != ATTEMPT_ANNOTATION}
    stamped = msgspec.structs.replace(allocation, allocation_timestamp=now)
    done = _replace(
        api_object, metadata={**api_object.metadata, "annotations": annotations}, status={**api_object.status, "allocation": _wire(stamped)}
    )
    devices = len(allocation.devices.results)
    return with_condition(
        with_advice(done, message="", now=now),
        is_true=True,
        reason="Allocated",
        message=f"{devices} device{'s' if devices != 1 else ''} allocated",
        now=now,
    )


def without_protection(api_object: ApiObject) -> ApiObject:
    """Take our finalizer off."""
    finalizers = [name for name in metadata_of(api_object).finalizers if name != DELETE_PROTECTION]
    metadata = {key: value for key, value in api_object.metadata.items() if key != "finalizers"}
    return _replace(api_object, metadata={**metadata, "finalizers": finalizers} if finalizers else metadata)


def with_condition(api_object: ApiObject, *, is_true: bool, reason: str, message: str, now: str, kind: str = ALLOCATED) -> ApiObject:
    """Tell the claim's user how it stands; the time changes only when the status does."""
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
            observed_generation=metadata_of(api_object).generation or None,
        )
    )
    conditions = [made if other is old else other for other in known_conditions] if old else [*known_conditions, made]
    return _replace(api_object, status={**api_object.status, "conditions": conditions})


def with_advice(api_object: ApiObject, *, message: str, now: str) -> ApiObject:
    """Say beside why a claim waits what comes nearest and what would fit; an empty message takes that away again."""
    if message:
        return with_condition(api_object, is_true=True, reason="NearestMiss", message=message, now=now, kind=ADVICE)
    kept = [other for other in _conditions(api_object) if other.get("type") != ADVICE]
    return (
        api_object if len(kept) == len(_conditions(api_object)) else _replace(api_object, status={**api_object.status, "conditions": kept})
    )


def has_condition(api_object: ApiObject, *, reason: str, message: str, kind: str = ALLOCATED) -> bool:
    """Say whether the claim tells this already."""
    wanted = {"type": kind, "status": "False", "reason": reason, "message": _shorten(message)}
    return any(all(old.get(name) == value for name, value in wanted.items()) for old in _conditions(api_object))


def is_finished(api_object: ApiObject) -> bool:
    """Say whether there is nothing left to hold a deleted object."""
    return not metadata_of(api_object).finalizers


def with_uuids(allocation: AllocationResult, claim_uid: str) -> AllocationResult:
    """Give each share its id: a UUID made of the claim's, so that a repeated computation gives the same."""
    results = tuple(
        msgspec.structs.replace(granted_device, share_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{claim_uid}/{granted_device.share_id}")))
        if granted_device.share_id is not None and granted_device.share_id.startswith(SHARE_PREFIX)
        else granted_device
        for granted_device in allocation.devices.results
    )
    return msgspec.structs.replace(allocation, devices=msgspec.structs.replace(allocation.devices, results=results))


def _without_copies(api_object: ApiObject, attempt: Attempt) -> Attempt:
    """Leave out of an attempt the configuration that stands in the claim's spec: a claim may have 32 of 10 KiB, and an object must not have them three times."""
    own = _own_configuration(api_object) if attempt.allocation.devices.config else ()
    kept: list[GrantedConfiguration] = []
    copies: dict[str, int] = {}
    for place, granted in enumerate(attempt.allocation.devices.config):
        if granted in own:
            copies[str(place)] = own.index(granted)
        else:
            kept.append(granted)
    return _with_configuration(attempt, kept, copies)


def _with_copies(api_object: ApiObject, attempt: Attempt, where: str) -> Attempt:
    """Put the configuration of the claim's spec back to where it stood.

    Errors: raises ContractError when the spec has no such configuration any more.
    """
    own, kept = _own_configuration(api_object), list(attempt.allocation.devices.config)
    if not all(place.isdecimal() and 0 <= index < len(own) for place, index in attempt.copies.items()):
        raise ContractError(f"{where}: refers to a configuration that the claim's spec does not have")
    for place, index in sorted(attempt.copies.items(), key=lambda copy: int(copy[0])):
        kept.insert(int(place), own[index])
    return _with_configuration(attempt, kept, {})


def _with_configuration(attempt: Attempt, config: Sequence[GrantedConfiguration], copies: dict[str, int]) -> Attempt:
    devices = msgspec.structs.replace(attempt.allocation.devices, config=tuple(config))
    return msgspec.structs.replace(attempt, allocation=msgspec.structs.replace(attempt.allocation, devices=devices), copies=copies)


def _own_configuration(api_object: ApiObject) -> tuple[GrantedConfiguration, ...]:
    """List the spec's configurations as an allocation copies them."""
    spec = read_as(api_object.spec, ClaimSpec, where=f"{name_of(api_object)}: spec")
    return tuple(GrantedConfiguration(source="FromClaim", requests=each.requests, opaque=each.opaque) for each in spec.devices.config)


def _conditions(api_object: ApiObject) -> list[dict[str, Any]]:
    """List the conditions that are ones; anybody may have stored anything."""
    conditions = api_object.status.get("conditions")
    return [old for old in conditions if isinstance(old, dict)] if isinstance(conditions, list) else []


def _wire(value: Struct) -> dict[str, Any]:
    """Give a value the very shape that it has when it is read again: lists, not tuples."""
    return decode(encode(value), dict[str, Any], where="status")


def _shorten(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _device_id(granted: GrantedDevice) -> DeviceId:
    return DeviceId(granted.driver, granted.pool, granted.device)


def _replace(api_object: ApiObject, **changes: Any) -> ApiObject:
    return msgspec.structs.replace(api_object, **changes)
