"""The input and the answers of a dry run, and the names of objects that are not stored."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct

from topobus.engine.allocation.search import DEFAULT_STEP_BUDGET
from topobus.engine.allocation.values import Mode
from topobus.engine.claims.objects import ReadObject
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.resource import AllocationResult, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.outcome import Reason
from topobus.values.request import PodRequest
from topobus.values.view import NodeAlignment

__all__ = [
    "DryAnswer",
    "Situation",
    "holder_of",
    "made_up_uid",
    "place_of",
    "pod_holder_of",
    "readable_slices",
]


class Situation(Struct, frozen=True, kw_only=True):
    """The input of a dry run. What is not known is left out."""

    wanted: tuple[ApiObject, ...]
    """ResourceClaims and Pods to be allocated, with the templates and claims that the pods name."""
    objects: tuple[ApiObject, ...] = ()
    """DeviceClasses, ResourceSlices, DeviceTaintRules, Namespaces, claims that are allocated
    already, and Nodes (for their labels and taints)."""
    machines: tuple[Machine, ...] = ()
    inventories: tuple[Inventory, ...] = ()
    ledgers: tuple[Ledger, ...] = ()
    alignments: tuple[NodeAlignment, ...] = ()
    """They name the device services that do not answer: their devices are not allocated."""
    mode: Mode = Mode.CORRECTED
    step_budget: int = DEFAULT_STEP_BUDGET


class DryAnswer(Struct, frozen=True, kw_only=True):
    """The answer for one claim, or for all claims of one pod."""

    name: str
    """`ResourceClaim default/fast`, or the pod that uses the claims."""
    condition: str
    """`Allocated`, or the condition's reason for which it would wait."""
    node: str = ""
    allocations: dict[str, AllocationResult] = {}
    """Claim to its allocation."""
    parts: dict[str, tuple[str, ...]] = {}
    """Each shape among the allocated devices to its parts: of CPUs the group that they will be of."""
    reasons: tuple[Reason, ...] = ()
    """Why not, node by node, then the nearest miss and what would fit."""
    stored: tuple[ApiObject, ...] = ()
    """The claims as they would be stored, allocated."""
    request: PodRequest | None = None
    """What the pod itself requests of its node besides its claims. None: nothing."""


def place_of(api_object: ApiObject) -> tuple[str, str]:
    """Name an object's namespace and its name."""
    metadata = metadata_of(api_object)
    return metadata.namespace or "default", metadata.name


def made_up_uid(wanted: ReadObject) -> str:
    """Make up the uid of an object that is not stored: the same for the same name."""
    return f"dry-run-{'-'.join(place_of(wanted.object))}"


def holder_of(api_object: ApiObject) -> str:
    """Name a claim or pod as holders are named."""
    return (
        f"{'claim' if api_object.kind == 'ResourceClaim' else api_object.kind.lower()} {'/'.join(place_of(api_object))}"
    )


def pod_holder_of(claim: ApiObject) -> str:
    """Name the pod that a claim was made for, as holders are named.

    Empty for a claim of its own.
    """
    metadata = metadata_of(claim)
    owner = next(
        (
            owner_reference
            for owner_reference in metadata.owner_references
            if owner_reference.get("kind") == "Pod" and owner_reference.get("controller")
        ),
        None,
    )
    return f"pod {metadata.namespace or 'default'}/{owner.get('name')}" if owner is not None else ""


def readable_slices(objects: Iterable[ApiObject]) -> tuple[SliceSpec, ...]:
    """Read the ResourceSlices among some objects.

    Those that cannot be read are left out, as in the copies.
    """
    slices: list[SliceSpec] = []
    for api_object in objects:
        if api_object.kind == "ResourceSlice":
            with suppress(ContractError):
                slices.append(read_as(api_object.spec, SliceSpec, where=name_of(api_object)))
    return tuple(slices)
