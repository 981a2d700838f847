"""Allocation attempts: the allocation that is about to be made for a claim, written into the claim
before a node is asked.

After a crash any replica reads the attempt, continues, and repeats the same operation. The attempt
is an annotation, because the status belongs to Kubernetes. In a cluster it names the pod that it is
for, and stays in the claim as a record of the allocation until another attempt replaces it. The
reconcilers write it by compare-and-set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from topobus.engine.claims.lifecycle import owner_of, status_of, with_annotations, with_finalizer, without_finalizer
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.objects import (
    ATTEMPT_ANNOTATION,
    ATTEMPTS_ANNOTATION,
    DEALLOCATION_ANNOTATION,
    DELETE_PROTECTION,
    metadata_of,
    name_of,
)
from topobus.formats.kubernetes.resource import AllocationResult, ClaimSpec, GrantedConfiguration
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

__all__ = [
    "MAX_REFUSED_NODES",
    "Attempt",
    "allocation_of",
    "attempt_of",
    "holds_what_was_attempted",
    "is_current",
    "number_of",
    "was_attempted",
    "with_attempt",
    "without_attempt",
]

MAX_REFUSED_NODES = 256
"""Nodes remembered in an attempt: with the longest names half of what a note may have."""
# All annotations of an object together may have 256 KiB (apimachinery,
# TotalAnnotationSizeLimitB); the rest is the user's.
_MAX_NOTE = 128 * 1024


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An allocation that is being committed at a node."""

    number: int
    node: str
    """Empty: nothing is attempted now, and the attempt only records the past."""
    allocation: AllocationResult
    wishes: AlignmentRequest | None = None
    """What the claim asked of its alignment then: a repeated operation must ask for the same."""
    copies: dict[str, int] = {}
    """Places of the claim's own configurations in the allocation, each with its place in the spec:
    it is not written into the object a second time."""
    is_short: bool = False
    """True: the configuration is left out because it is too long for a note. It is computed again
    when the attempt continues."""
    pod: str = ""
    """The uid of the pod for which the claim is allocated, where an allocation carries its
    reservation; empty otherwise."""
    refused: tuple[str, ...] = ()
    """Nodes on which kube-scheduler could not place the pod in this round, in the order in which
    they were tried."""
    rounds: int = 0
    """How often it has refused all nodes before: with each round the pause before the next one
    doubles."""

    def op_id(self, claim_uid: str) -> str:
        """Name the operation at the node, so that a replica that continues the attempt repeats the
        same operation.
        """
        return f"allocate-{claim_uid}-{self.number}"

    def lengthened(self, result: AllocationResult) -> AllocationResult:
        """Return the allocation with its configuration.

        Shapes: result — what a search found for the claim when it might choose among the attempt's
                devices only.
        """
        if not self.is_short:
            return self.allocation
        return structs.replace(
            self.allocation, devices=structs.replace(self.allocation.devices, config=result.devices.config)
        )


def attempt_of(claim: ApiObject) -> Attempt | None:
    """Find the attempt in progress.

    Errors: raises ContractError when another program wrote something else there.
    """
    text = metadata_of(claim).annotations.get(ATTEMPT_ANNOTATION)
    if text is None:
        return None
    where = f"{name_of(claim)}: annotation {ATTEMPT_ANNOTATION}"
    attempt = decode(text, Attempt, where=where)
    return _with_copies(claim, attempt, where) if attempt.copies else attempt


def number_of(claim: ApiObject) -> int:
    """Count the attempts made so far."""
    text = metadata_of(claim).annotations.get(ATTEMPTS_ANNOTATION, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def was_attempted(claim: ApiObject) -> bool:
    """Say whether an allocation of the claim was ever attempted here: the count stays when an
    attempt is dropped.
    """
    return ATTEMPTS_ANNOTATION in metadata_of(claim).annotations


def allocation_of(claim: ApiObject) -> AllocationResult | None:
    """Find the allocation that a claim has, or is about to get.

    Errors: raises ContractError.
    """
    attempt = attempt_of(claim)
    return status_of(claim).allocation or (attempt.allocation if attempt is not None else None)


def holds_what_was_attempted(claim: ApiObject, attempt: Attempt) -> bool:
    """Say whether a claim's status has exactly the devices of an attempt.

    The rest of an allocation comes back from a server with its defaults filled in.
    """
    allocation = claim.status.get("allocation")
    devices = allocation.get("devices") if isinstance(allocation, Mapping) else None
    results = devices.get("results") if isinstance(devices, Mapping) else None
    held = {
        (result.get("driver"), result.get("pool"), result.get("device"), result.get("shareID"))
        for result in (results if isinstance(results, list) else ())
        if isinstance(result, Mapping)
    }
    return isinstance(allocation, Mapping) and held == {
        (granted_device.driver, granted_device.pool, granted_device.device, granted_device.share_id)
        for granted_device in attempt.allocation.devices.results
    }


def with_attempt(claim: ApiObject, attempt: Attempt) -> ApiObject:
    """Add an attempt, and protect the claim from being deleted."""
    stored = _without_copies(claim, attempt)
    if attempt.pod:
        stored = _shortened(stored)
    noted = with_annotations(
        claim, {ATTEMPT_ANNOTATION: encode(stored).decode(), ATTEMPTS_ANNOTATION: str(attempt.number)}
    )
    return with_finalizer(noted, DELETE_PROTECTION)


def without_attempt(claim: ApiObject) -> ApiObject:
    """Drop a failed attempt. Its number stays, so the next operation has another id.

    A claim that holds nothing loses its finalizer.
    """
    dropped = with_annotations(claim, {ATTEMPT_ANNOTATION: None, DEALLOCATION_ANNOTATION: None})
    return dropped if claim.status.get("allocation") else without_finalizer(dropped, DELETE_PROTECTION)


def is_current(claim: ApiObject, uid: str, attempt: Attempt) -> bool:
    """Say whether an attempt is still the claim's newest and has led to nothing.

    A claim that was deleted and created again under the same name counts its attempts from zero.
    """
    if owner_of(claim).uid != uid or claim.status.get("allocation"):
        return False
    try:
        newest = attempt_of(claim)
    except ContractError:
        return False
    return newest is not None and (newest.number, newest.node) == (attempt.number, attempt.node)


def _shortened(attempt: Attempt) -> Attempt:
    """Leave the configuration out of an attempt that would not fit into an object's annotations."""
    if len(encode(attempt)) <= _MAX_NOTE:
        return attempt
    return structs.replace(_with_configuration(attempt, ()), copies={}, is_short=True)


def _without_copies(claim: ApiObject, attempt: Attempt) -> Attempt:
    """Leave out of an attempt the configuration that is also in the claim's spec: a claim may have
    32 of 10 KiB, and an object must not have them three times.
    """
    own = _own_configuration(claim) if attempt.allocation.devices.config else ()
    kept: list[GrantedConfiguration] = []
    copies: dict[str, int] = {}
    for place, granted in enumerate(attempt.allocation.devices.config):
        if granted in own:
            copies[str(place)] = own.index(granted)
        else:
            kept.append(granted)
    return structs.replace(_with_configuration(attempt, kept), copies=copies) if copies else attempt


def _with_copies(claim: ApiObject, attempt: Attempt, where: str) -> Attempt:
    """Put the configuration of the claim's spec back in its place.

    Errors: raises ContractError when the spec has no such configuration any more.
    """
    own, kept = _own_configuration(claim), list(attempt.allocation.devices.config)
    if not all(place.isdecimal() and 0 <= index < len(own) for place, index in attempt.copies.items()):
        raise ContractError(f"{where}: refers to a configuration that the claim's spec does not have")
    for place, index in sorted(attempt.copies.items(), key=lambda copy: int(copy[0])):
        kept.insert(int(place), own[index])
    return structs.replace(_with_configuration(attempt, kept), copies={})


def _with_configuration(attempt: Attempt, config: Sequence[GrantedConfiguration]) -> Attempt:
    devices = structs.replace(attempt.allocation.devices, config=tuple(config))
    return structs.replace(attempt, allocation=structs.replace(attempt.allocation, devices=devices))


def _own_configuration(claim: ApiObject) -> tuple[GrantedConfiguration, ...]:
    """List the spec's configurations as an allocation copies them."""
    spec = read_as(claim.spec, ClaimSpec, where=f"{name_of(claim)}: spec")
    return tuple(
        GrantedConfiguration(source="FromClaim", requests=configuration.requests, opaque=configuration.opaque)
        for configuration in spec.devices.config
    )
