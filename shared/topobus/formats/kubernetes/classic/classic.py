"""Classic DRA on the wire: resource.k8s.io/v1alpha2 of Kubernetes 1.26 to 1.31, the fields that we
read or write, under Kubernetes' names.

A struct reads what is there and refuses only wrong types. The limits are in `classic_limits`. A
ResourceClass has no `spec` on the wire: its fields are at the top of the object, and in the store
under `spec` (`fold_class`, `unfold_class`). Source: k8s.io/api/resource/v1alpha2/types.go, 1.30.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field

from topobus.formats.kubernetes.resource import Condition, NodeSelector, Wire
from topobus.formats.messages.messages import ApiObject

__all__ = [
    "ALLOCATION_MODES",
    "API_VERSION",
    "CLASSIC_ATTEMPT_ANNOTATION",
    "CLASS_FIELDS",
    "IMMEDIATE",
    "WAIT_FOR_FIRST_CONSUMER",
    "AllocationResult",
    "ClaimScheduling",
    "ClaimSpec",
    "ClaimStatus",
    "ClaimTemplateSpec",
    "ClassParametersReference",
    "ConsumerReference",
    "ParametersReference",
    "PodSchedulingSpec",
    "PodSchedulingStatus",
    "ResourceClassSpec",
    "ResourceHandle",
    "deletion_protection",
    "fold_class",
    "is_classic",
    "mode_of",
    "unfold_class",
]

API_VERSION = "resource.k8s.io/v1alpha2"
IMMEDIATE = "Immediate"
WAIT_FOR_FIRST_CONSUMER = "WaitForFirstConsumer"
ALLOCATION_MODES = (IMMEDIATE, WAIT_FOR_FIRST_CONSUMER)
CLASSIC_ATTEMPT_ANNOTATION = "topobus.dev/classic-attempt"
"""On a classic claim, by the controller: number and node of the newest attempt to allocate it."""
CLASS_FIELDS = ("driverName", "parametersRef", "suitableNodes", "structuredParameters")
"""What a ResourceClass has at its top, besides apiVersion, kind and metadata."""


class ParametersReference(Wire, frozen=True, kw_only=True):
    """Where a claim's parameters are: an object of the claim's namespace
    (ResourceClaimParametersReference).
    """

    api_group: str = ""
    """Empty for the core group."""
    kind: str = ""
    name: str = ""


class ClassParametersReference(Wire, frozen=True, kw_only=True):
    """Where a class's parameters are. Without a namespace it is an object of the cluster."""

    api_group: str = ""
    kind: str = ""
    name: str = ""
    namespace: str = ""


class ResourceClassSpec(Wire, frozen=True, kw_only=True):
    """The fields of a ResourceClass."""

    driver_name: str = ""
    parameters_ref: ClassParametersReference | None = None
    suitable_nodes: NodeSelector | None = None
    structured_parameters: bool | None = None
    """True: a scheduler allocates by ResourceClassParameters (1.30's first try at structured
    parameters), and no driver's controller is asked."""


class ClaimSpec(Wire, frozen=True, kw_only=True):
    """ResourceClaim.spec."""

    resource_class_name: str = ""
    parameters_ref: ParametersReference | None = None
    allocation_mode: str = ""
    """`WaitForFirstConsumer` (also when empty) or `Immediate`."""


class ClaimTemplateSpec(Wire, frozen=True, kw_only=True):
    """ResourceClaimTemplate.spec: metadata and spec for each claim made of it."""

    metadata: dict[str, Any] = field(default_factory=dict)
    spec: ClaimSpec


class ResourceHandle(Wire, frozen=True, kw_only=True):
    """What a driver's controller sends to its part on the node: text that the driver alone
    understands.
    """

    driver_name: str = ""
    data: str = ""
    structured_data: dict[str, Any] | None = None


class AllocationResult(Wire, frozen=True, kw_only=True):
    """ResourceClaim.status.allocation."""

    resource_handles: tuple[ResourceHandle, ...] = ()
    available_on_nodes: NodeSelector | None = None
    shareable: bool = False
    """True: several pods may use the claim at once."""


class ConsumerReference(Wire, frozen=True, kw_only=True):
    """The consumer that may use an allocated claim: for a pod, resource is `pods` and the group is
    empty.
    """

    api_group: str = ""
    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(Wire, frozen=True, kw_only=True):
    """ResourceClaim.status."""

    driver_name: str = ""
    """Written with the allocation; the driver that has to undo it,
    whatever becomes of the class."""
    allocation: AllocationResult | None = None
    reserved_for: tuple[ConsumerReference, ...] = ()
    deallocation_requested: bool = False
    conditions: tuple[Condition, ...] = ()
    """Kubernetes has none on a claim. The stand-alone API reports here to
    the claim's user why it waits."""


class PodSchedulingSpec(Wire, frozen=True, kw_only=True):
    """PodSchedulingContext.spec, written by the scheduler."""

    selected_node: str = ""
    potential_nodes: tuple[str, ...] = ()


class ClaimScheduling(Wire, frozen=True, kw_only=True):
    """The nodes that cannot serve one claim of the pod, by the pod's name for the claim."""

    name: str = ""
    unsuitable_nodes: tuple[str, ...] = ()


class PodSchedulingStatus(Wire, frozen=True, kw_only=True):
    """PodSchedulingContext.status, written by the drivers."""

    resource_claims: tuple[ClaimScheduling, ...] = ()


def is_classic(api_object: ApiObject) -> bool:
    """Say whether an object belongs to classic DRA (resource.k8s.io/v1alpha2).

    The version decides, because kinds like ResourceClaim exist in both.
    """
    return api_object.api_version == API_VERSION


def mode_of(spec: ClaimSpec) -> str:
    """Name the allocation mode. The API's default is to wait.

    >>> mode_of(ClaimSpec())
    'WaitForFirstConsumer'
    """
    return spec.allocation_mode or WAIT_FOR_FIRST_CONSUMER


def deletion_protection(driver: str) -> str:
    """Name the finalizer by which a driver keeps a claim until it is deallocated.

    >>> deletion_protection("gpu.topobus.dev")
    'gpu.topobus.dev/deletion-protection'
    """
    return f"{driver}/deletion-protection"


def fold_class(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Move a ResourceClass's own fields under `spec`, where stored objects keep what users ask
    for.
    """
    rest = {key: value for key, value in manifest.items() if key not in CLASS_FIELDS}
    return rest | {"spec": {key: manifest[key] for key in CLASS_FIELDS if manifest.get(key) is not None}}


def unfold_class(api_object: ApiObject) -> dict[str, Any]:
    """Return a stored ResourceClass as Kubernetes writes it, with its fields at the top instead of
    under `spec`.

    The inverse of `fold_class`.
    """
    return {
        "apiVersion": api_object.api_version,
        "kind": api_object.kind,
        "metadata": api_object.metadata,
        **api_object.spec,
    }
