"""The lifecycle of a classic claim as a value: pending, allocated, reserved, deallocation
requested, deallocated.

An allocation takes three writes, each of which records enough to continue from it: the finalizer
with the attempt (its number and the node), then the driver's own node state, then the status.
Deallocation goes backwards: node state, status, finalizer. A new attempt changes the object, so the
result of an older attempt cannot be written any more: its compare-and-set fails.

Source: k8s.io/dynamic-resource-allocation/controller/controller.go, 1.30;
docs/knowledge/dynamic-resource-allocation.md#life-of-a-classic-claim.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from topobus.engine.claims import reservations
from topobus.engine.claims.lifecycle import with_annotations, with_condition, with_finalizer, without_finalizer
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_limits import check_classic
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.shape import read_as, refuse_problems
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

__all__ = [
    "Attempt",
    "attempt_of",
    "consumer_of",
    "deallocated",
    "has_protection",
    "is_free_for",
    "is_reserved_for",
    "read_claim",
    "read_class",
    "status_of",
    "with_allocation",
    "with_attempt",
    "with_deallocation_request",
    "with_reservation",
    "without_protection",
    "without_reservations",
]


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest attempt to allocate: its number, and the node that was selected (empty: any)."""

    number: int
    node: str = ""
    is_over: bool = False
    """True once the devices of the attempt were released. The next attempt is another one, even on
    the same node."""


def read_claim(claim: ApiObject) -> classic.ClaimSpec:
    """Read and check the spec of a stored claim.

    Errors: raises ContractError that lists what is wrong.
    """
    if not metadata_of(claim).uid:
        raise ContractError(
            f"{name_of(claim)}: metadata.uid is missing: wanted an object that was made through the API"
        )
    refuse_problems(check_classic(claim), name_of(claim))
    return read_as(claim.spec, classic.ClaimSpec, where=f"{name_of(claim)}: spec")


def read_class(device_class: ApiObject) -> classic.ResourceClassSpec:
    """Read and check a stored ResourceClass.

    Errors: raises ContractError that lists what is wrong.
    """
    refuse_problems(check_classic(device_class), name_of(device_class))
    return read_as(device_class.spec, classic.ResourceClassSpec, where=name_of(device_class))


def status_of(api_object: ApiObject) -> classic.ClaimStatus:
    """Read the status of a stored claim.

    Errors: raises ContractError.
    """
    return read_as(api_object.status, classic.ClaimStatus, where=f"{name_of(api_object)}: status")


def attempt_of(api_object: ApiObject) -> Attempt:
    """Find the newest attempt. Its number is 0 when there was none.

    Errors: raises ContractError when the annotation cannot be read.
    """
    text = metadata_of(api_object).annotations.get(classic.CLASSIC_ATTEMPT_ANNOTATION)
    return (
        Attempt(number=0)
        if text is None
        else decode(text, Attempt, where=f"{name_of(api_object)}: annotation {classic.CLASSIC_ATTEMPT_ANNOTATION}")
    )


def has_protection(claim: ApiObject, driver: str) -> bool:
    """Say whether the driver keeps the claim from being deleted."""
    return classic.deletion_protection(driver) in metadata_of(claim).finalizers


def with_attempt(api_object: ApiObject, driver: str, node: str) -> ApiObject:
    """Begin an attempt: the driver's finalizer and the attempt's number, in one write.

    Returns the same object when that very attempt is under way.
    """
    attempt = attempt_of(api_object)
    if has_protection(api_object, driver) and attempt.number > 0 and attempt.node == node and not attempt.is_over:
        return api_object
    note = encode(Attempt(number=attempt.number + 1, node=node)).decode()
    return with_finalizer(
        with_annotations(api_object, {classic.CLASSIC_ATTEMPT_ANNOTATION: note}), classic.deletion_protection(driver)
    )


def with_allocation(
    api_object: ApiObject,
    driver: str,
    result: classic.AllocationResult,
    *,
    now: str,
    reserved_for: classic.ConsumerReference | None = None,
) -> ApiObject:
    """Write the result and its pod in one write, so that no other pod takes the claim in
    between.
    """
    status = {**api_object.status, "driverName": driver, "allocation": _wire(result)}
    if reserved_for is not None:
        status["reservedFor"] = [_wire(reserved_for)]
    allocated = _replace(api_object, status=status)
    return with_condition(allocated, is_true=True, reason="Allocated", message=f"allocated by {driver}", now=now)


def deallocated(api_object: ApiObject) -> ApiObject:
    """Clear what the driver has released: the allocation, the driver's name and the request for
    deallocation, in one write.

    The attempt's number stays.
    """
    gone = ("allocation", "driverName", "deallocationRequested", "reservedFor", "conditions")
    cleared = _replace(api_object, status={key: value for key, value in api_object.status.items() if key not in gone})
    if classic.CLASSIC_ATTEMPT_ANNOTATION not in metadata_of(api_object).annotations:
        return cleared
    try:
        over = msgspec.structs.replace(attempt_of(api_object), is_over=True)
    except ContractError:
        return cleared  # not our format: such a claim must be deletable
    return with_annotations(cleared, {classic.CLASSIC_ATTEMPT_ANNOTATION: encode(over).decode()})


def without_protection(api_object: ApiObject, driver: str) -> ApiObject:
    """Take the driver's finalizer off."""
    return without_finalizer(api_object, classic.deletion_protection(driver))


def consumer_of(pod: ApiObject) -> classic.ConsumerReference:
    """Name a pod as a claim's reservation does."""
    metadata = metadata_of(pod)
    return classic.ConsumerReference(resource="pods", name=metadata.name, uid=metadata.uid)


def is_reserved_for(status: classic.ClaimStatus, pod: ApiObject) -> bool:
    """Say whether the pod may use the claim."""
    uid = metadata_of(pod).uid
    return any(consumer_reference.uid == uid for consumer_reference in status.reserved_for)


def is_free_for(status: classic.ClaimStatus, most: int) -> bool:
    """Say whether another pod may reserve the claim: a claim that is not shareable has one user."""
    if status.allocation is None or status.deallocation_requested:
        return False
    return len(status.reserved_for) < (most if status.allocation.shareable else 1)


def with_reservation(api_object: ApiObject, pod: ApiObject) -> ApiObject:
    """Reserve an allocated claim for a pod. Returns the same object when it is reserved already."""
    status = status_of(api_object)
    if is_reserved_for(status, pod):
        return api_object
    reserved = [*(api_object.status.get("reservedFor") or []), _wire(consumer_of(pod))]
    return _replace(api_object, status={**api_object.status, "reservedFor": reserved})


def without_reservations(api_object: ApiObject, gone: frozenset[str], *, asks_back: bool) -> ApiObject:
    """Drop the reservations of pods that are gone.

    With `asks_back`, requests deallocation when none is left. Returns the same object when nothing
    changes.
    """
    changed = reservations.without_reservations(api_object, gone)
    if changed is api_object:
        return api_object
    return with_deallocation_request(changed) if asks_back and not changed.status.get("reservedFor") else changed


def with_deallocation_request(api_object: ApiObject) -> ApiObject:
    """Request that the driver takes an allocation back."""
    return (
        _replace(api_object, status={**api_object.status, "deallocationRequested": True})
        if api_object.status.get("allocation")
        else api_object
    )


def _wire(value: Struct) -> dict[str, Any]:
    """Convert a value to the shape that it has when it is read again: lists, not tuples."""
    return decode(encode(value), dict[str, Any], where="status")


def _replace(api_object: ApiObject, **changes: Any) -> ApiObject:
    return msgspec.structs.replace(api_object, **changes)
