"""Claims and pods as the controller reads them: each part of a stored version is parsed once, at
its first use.

The objects come from either store. A part that cannot be parsed is also a value (`Unreadable`):
reading it raises a ContractError that names the object, while all other parts stay readable. A next
version is made from `object`, so that unknown fields stay. Classes, slices, taint rules and nodes
are parsed when they enter the state (`read_class`, `read_slice`, `read_rule`, `node_facts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from topobus.engine.claims import attempts, gate, lifecycle, reservations
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.reservations import AllocationMode, ClaimUse, Consumer, PodRef
from topobus.engine.claims.templates import claim_names
from topobus.formats.kubernetes.objects import DEALLOCATION_ANNOTATION, Metadata, metadata_of, name_of
from topobus.formats.kubernetes.pod import PodSpec, pod_request
from topobus.formats.kubernetes.resource import AllocationResult, ClaimSpec, ClaimStatus
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.request import Owner, OwnerKind, PodRequest

__all__ = ["Claim", "Pod", "ReadObject", "Unreadable"]

T = TypeVar("T")


@dataclass(frozen=True)
class Unreadable:
    """A part of an object that cannot be parsed, and why."""

    why: str


@dataclass(frozen=True)
class ReadObject:
    """The parts that every kind of object has."""

    object: ApiObject
    """As stored."""

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata.

        A field with a wrong type counts as absent, because even a malformed object needs a name in
        messages.
        """
        return metadata_of(self.object)

    @cached_property
    def shown(self) -> str:
        """The object's name for people: `ResourceClaim default/fast`."""
        return name_of(self.object)

    @property
    def uid(self) -> str:
        """The uid. Empty when it has none."""
        return self.metadata.uid

    @property
    def is_deleting(self) -> bool:
        """Whether its deletion was requested."""
        return bool(self.metadata.deletion_timestamp)


class Claim(ReadObject):
    """A claim of structured parameters.

    Errors: spec, status, allocation, attempt, consumers and mode raise ContractError where another
            program wrote something else there.
    """

    @cached_property
    def owner(self) -> Owner:
        """The claim as the ledger knows it."""
        metadata = self.metadata
        return Owner(
            kind=OwnerKind.CLAIM, namespace=metadata.namespace or "default", name=metadata.name, uid=metadata.uid
        )

    @property
    def spec(self) -> ClaimSpec:
        """The spec, checked against the limits of the API."""
        return _readable(self._spec)

    @property
    def status(self) -> ClaimStatus:
        """The status."""
        return _readable(self._status)

    def check_status(self) -> None:
        """Make sure that the status, and the claim's reservations, can be read.

        Errors: raises ContractError.
        """
        _readable(self._status)
        _readable(self._consumers)

    @property
    def allocation(self) -> AllocationResult | None:
        """The allocation in the claim's status."""
        return self.status.allocation

    @property
    def attempt(self) -> Attempt | None:
        """The attempt in progress."""
        return _readable(self._attempt)

    @property
    def is_allocated(self) -> bool:
        """Whether the status has an allocation, readable or not."""
        return bool(self.object.status.get("allocation"))

    @cached_property
    def number(self) -> int:
        """How many attempts were made so far."""
        return attempts.number_of(self.object)

    @property
    def held(self) -> AllocationResult | None:
        """The allocation that the claim has, or is about to get."""
        attempt = self.attempt
        return self.allocation or (attempt.allocation if attempt is not None else None)

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """The consumers that have reserved the claim."""
        return _readable(self._consumers)

    @property
    def mode(self) -> AllocationMode | None:
        """When the claim wants to be allocated. None when it has no mode."""
        return reservations.mode_of(self.object)

    @property
    def deallocation(self) -> str:
        """Why the claim is being deallocated. Empty when it is not."""
        return self.metadata.annotations.get(DEALLOCATION_ANNOTATION, "")

    @cached_property
    def _spec(self) -> ClaimSpec | Unreadable:
        return _read(lifecycle.read_claim, self.object)

    @cached_property
    def _status(self) -> ClaimStatus | Unreadable:
        return _read(lifecycle.status_of, self.object)

    @cached_property
    def _attempt(self) -> Attempt | Unreadable | None:
        return _read(attempts.attempt_of, self.object)

    @cached_property
    def _consumers(self) -> tuple[Consumer, ...] | Unreadable:
        return _read(reservations.consumers_of, self.object)


class Pod(ReadObject):
    """A pod.

    Errors: spec, request, uses and claim_names raise ContractError where another program wrote
            something else there.
    """

    @cached_property
    def ref(self) -> PodRef:
        """The pod by name and identity."""
        return reservations.pod_ref(self.object)

    @property
    def spec(self) -> PodSpec:
        """The spec."""
        return _readable(self._spec)

    @property
    def request(self) -> PodRequest:
        """Its request to a node, with its alignment wishes."""
        return _readable(self._request)

    @property
    def uses(self) -> tuple[ClaimUse, ...]:
        """The claims of the pod in the order of its spec.

        An entry that needs none, by the pod's status, is left out.
        """
        return _readable(self._uses)

    @property
    def claim_names(self) -> tuple[str, ...]:
        """All claims of the pod: those that it names, and those made for it, the one for its
        extended resources last.
        """
        return _readable(self._claim_names)

    @property
    def node(self) -> str:
        """The node that it was bound to, or that its user named. Empty before."""
        return reservations.node_of_pod(self.object)

    @cached_property
    def has_gate(self) -> bool:
        """Whether it waits behind our gate."""
        return gate.has_gate(self.object)

    @cached_property
    def is_over(self) -> bool:
        """Whether it has ended, or its deletion was requested before it had a node: it no longer
        uses its claims.
        """
        return gate.is_over(self.object)

    @cached_property
    def is_bound(self) -> bool:
        """Whether the scheduler has recorded its node."""
        return reservations.is_bound(self.object)

    @cached_property
    def _spec(self) -> PodSpec | Unreadable:
        return _read(lambda pod: read_as(pod.spec, PodSpec, where=f"{self.shown}: spec"), self.object)

    @cached_property
    def _request(self) -> PodRequest | Unreadable:
        return _read(lambda pod: pod_request(pod, uid=self.uid), self.object)

    @cached_property
    def _uses(self) -> tuple[ClaimUse, ...] | Unreadable:
        return _read(reservations.claim_uses, self.object)

    @cached_property
    def _claim_names(self) -> tuple[str, ...] | Unreadable:
        return _read(claim_names, self.object)


def _read(reader: Callable[[ApiObject], T], api_object: ApiObject) -> T | Unreadable:
    try:
        return reader(api_object)
    except ContractError as err:
        return Unreadable(err.message)


def _readable(part: T | Unreadable) -> T:
    """Return the part that was read.

    Errors: raises ContractError when it cannot be read.
    """
    if isinstance(part, Unreadable):
        raise ContractError(part.why)
    return part
