"""Objects of the stand-alone API: where an object is stored, how it is made and how its deletion is
requested.

Pure: the caller that creates an object passes the uid and the time.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from topobus.formats.first_read import ready
from topobus.formats.kubernetes.classic.classic import CLASSIC_ATTEMPT_ANNOTATION
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.errors import ContractError

__all__ = [
    "API_VERSIONS",
    "ATTEMPTS_ANNOTATION",
    "ATTEMPT_ANNOTATION",
    "CLAIM_PARAMETERS",
    "CLASSIC_VERSIONS",
    "CLASS_PARAMETERS",
    "CLUSTER_KINDS",
    "DEALLOCATION_ANNOTATION",
    "DELETE_PROTECTION",
    "KINDS",
    "NODE_ANNOTATION",
    "OLDER_VERSIONS",
    "PLACEMENT_PROTECTION",
    "RETREATS_ANNOTATION",
    "Metadata",
    "ObjectKey",
    "admit",
    "ask_deletion",
    "is_of_cluster",
    "metadata_of",
    "name_of",
    "object_parts",
    "placed_uid",
    "pod_as_owner",
]

# Kind to the one version of it that we read.
API_VERSIONS = {
    "Pod": "v1",
    "DeviceClass": "resource.k8s.io/v1",
    "ResourceClaim": "resource.k8s.io/v1",
    "ResourceClaimTemplate": "resource.k8s.io/v1",
    "ResourceSlice": "resource.k8s.io/v1",
    "DeviceTaintRule": "resource.k8s.io/v1",
    "Namespace": "v1",
    "Node": "v1",
}
# Versions of a kind that older servers have, of the same shape.
OLDER_VERSIONS = {"DeviceTaintRule": ("resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3")}
# Kinds of classic DRA, in the one version of it that we read. Some have the names of newer ones: a
# name in the store is one or the other.
CLASSIC_VERSIONS = {
    "ResourceClass": "resource.k8s.io/v1alpha2",
    "ResourceClaim": "resource.k8s.io/v1alpha2",
    "ResourceClaimTemplate": "resource.k8s.io/v1alpha2",
    "PodSchedulingContext": "resource.k8s.io/v1alpha2",
}
# Kinds that classic claims and classes name, in the built-in driver's own group.
CLASS_PARAMETERS = "DeviceClassParameters"
CLAIM_PARAMETERS = "ClaimParameters"
KINDS = tuple(dict.fromkeys((*API_VERSIONS, *CLASSIC_VERSIONS, CLASS_PARAMETERS, CLAIM_PARAMETERS)))
"""The kinds that a manifest may have."""
CLUSTER_KINDS = frozenset({"DeviceClass", "ResourceSlice", "ResourceClass", "DeviceTaintRule", "Namespace", "Node"})
# A pod of the stand-alone tool has no API server to give it a uid: the same name is the same pod,
# on every machine and at every run.
_POD_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "pods.topobus.dev")
# Parameters of classic classes, ours and other drivers', belong to the cluster as their classes do.
_CLUSTER_SUFFIX = "ClassParameters"

DELETE_PROTECTION = "resource.kubernetes.io/delete-protection"
"""The finalizer that keeps an allocated claim until its devices are released."""
NODE_ANNOTATION = "topobus.dev/node"
"""On a claim: allocate on this node only."""
ATTEMPT_ANNOTATION = "topobus.dev/attempt"
"""On a claim, by the controller: the allocation that is being committed at a node."""
ATTEMPTS_ANNOTATION = "topobus.dev/attempts"
"""On a claim, by the controller: how many attempts there were."""

DEALLOCATION_ANNOTATION = "topobus.dev/deallocation"
"""On a claim, by the controller: its allocation is being taken back, and why."""
PLACEMENT_PROTECTION = "topobus.dev/placement"
"""The finalizer that keeps a pod until what it holds and has reserved is released."""
RETREATS_ANNOTATION = "scheduler.topobus.dev/retreats"
"""On a pod, by the controller: how often its claims were taken from it to try another node. Not in
`topobus.dev/`, which has the requests of pods."""

_CONTROLLER_ANNOTATIONS = (
    ATTEMPT_ANNOTATION,
    ATTEMPTS_ANNOTATION,
    DEALLOCATION_ANNOTATION,
    CLASSIC_ATTEMPT_ANNOTATION,
    RETREATS_ANNOTATION,
)


class ObjectKey(NamedTuple):
    """Where an object is stored."""

    kind: str
    namespace: str
    name: str


class Metadata(Struct, frozen=True, kw_only=True, rename="camel"):
    """ObjectMeta, as far as we use it."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()
    generation: int = 0


def is_of_cluster(kind: str) -> bool:
    """Say whether objects of a kind have no namespace.

    >>> is_of_cluster("DeviceClass"), is_of_cluster("DeviceClassParameters"), is_of_cluster("ResourceClaim")
    (True, True, False)
    """
    return kind in CLUSTER_KINDS or kind.endswith(_CLUSTER_SUFFIX)


def metadata_of(api_object: ApiObject) -> Metadata:
    """Read an object's metadata.

    Errors: raises nothing. When a field has a wrong type, all but name and namespace count as
    absent: a malformed object must still have a name in messages.
    """
    try:
        return msgspec.convert(
            {key: value for key, value in api_object.metadata.items() if value is not None}, ready(Metadata)
        )
    except msgspec.ValidationError:
        return Metadata(
            name=str(api_object.metadata.get("name", "")), namespace=str(api_object.metadata.get("namespace") or "")
        )


def pod_as_owner(pod: Metadata) -> dict[str, Any]:
    """Name a pod as the controlling owner of what is made for it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.name,
        "uid": pod.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def object_parts(api_object: ApiObject) -> dict[str, str]:
    """Return the parts of an object's key in the OBJECT bucket: its kind in lower case, its
    namespace or the cluster's token, its name.

    >>> object_parts(ApiObject(api_version="v1", kind="Pod", metadata={"name": "trainer"}))
    {'kind': 'pod', 'namespace': 'default', 'name': 'trainer'}
    """
    metadata = metadata_of(api_object)
    namespace = CLUSTER if is_of_cluster(api_object.kind) else metadata.namespace or "default"
    return {"kind": api_object.kind.lower(), "namespace": namespace, "name": metadata.name}


def name_of(api_object: ApiObject) -> str:
    """Name an object for people. Kinds of the whole cluster get no namespace.

    >>> name_of(ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "fast"}, spec={}))
    'ResourceClaim default/fast'
    """
    metadata = metadata_of(api_object)
    return (
        f"{api_object.kind} {metadata.name}"
        if is_of_cluster(api_object.kind)
        else f"{api_object.kind} {metadata.namespace or 'default'}/{metadata.name}"
    )


def admit(api_object: ApiObject, *, uid: str, now: str, previous: ApiObject | None = None) -> ApiObject:
    """Fill in what an API server would: uid, creation time, namespace, generation.

    A user's own values for these, and for the status, are not taken.

    Shapes: previous — the stored object of the same name, when this one replaces it: its identity,
            times, finalizers, status and the controller's notes stay, and the generation grows when
            the spec changed.
    Errors: raises ContractError when the spec of a claim would change: it is immutable, because
            devices are held by it. Also for another apiVersion.
    """
    metadata = {
        key: value
        for key, value in api_object.metadata.items()
        if key not in ("resourceVersion", "managedFields", "deletionTimestamp", "selfLink")
    }
    if not is_of_cluster(api_object.kind):
        metadata["namespace"] = metadata.get("namespace") or "default"
    annotations = {
        key: value
        for key, value in _annotations(metadata.pop("annotations", None), api_object)
        if key not in _CONTROLLER_ANNOTATIONS
    }
    if previous is None:
        metadata |= {"uid": uid, "creationTimestamp": now, "generation": 1} | (
            {"annotations": annotations} if annotations else {}
        )
        return msgspec.structs.replace(api_object, metadata=metadata, status={})
    if api_object.api_version != previous.api_version:
        raise ContractError(
            f"{name_of(api_object)}: {api_object.api_version} cannot replace {previous.api_version} of the same name",
            next_step="delete it and apply it again, or choose another name",
        )
    if api_object.kind == "Pod" and previous.spec.get("nodeName") and not api_object.spec.get("nodeName"):
        # The scheduler decides where it runs, and no manifest repeats that.
        api_object = msgspec.structs.replace(
            api_object, spec={**api_object.spec, "nodeName": previous.spec["nodeName"]}
        )
    if api_object.kind in ("Pod", "ResourceClaim", "ResourceClaimTemplate") and api_object.spec != previous.spec:
        raise ContractError(
            f"{name_of(api_object)}: its spec cannot be changed", next_step="delete it and apply it again"
        )
    for key in ("uid", "creationTimestamp", "deletionTimestamp", "finalizers", "ownerReferences"):
        metadata.pop(key, None)
        if previous.metadata.get(key):
            metadata[key] = previous.metadata[key]
    annotations |= {
        key: value
        for key, value in _annotations(previous.metadata.get("annotations"), previous)
        if key in _CONTROLLER_ANNOTATIONS
    }
    if annotations:
        metadata["annotations"] = annotations
    known_generation = previous.metadata.get("generation")
    generation = known_generation if isinstance(known_generation, int) else 1
    metadata["generation"] = generation + (0 if previous.spec == api_object.spec else 1)
    return msgspec.structs.replace(api_object, metadata=metadata, status=previous.status)


def _annotations(value: object, api_object: ApiObject) -> list[tuple[str, object]]:
    if value is not None and not isinstance(value, dict):
        raise ContractError(
            f"{name_of(api_object)}: metadata.annotations: got {type(value).__name__}, wanted texts by name"
        )
    return list((value or {}).items())


def ask_deletion(api_object: ApiObject, *, now: str) -> ApiObject | None:
    """Mark an object for deletion. Return None when it has no finalizer and may be deleted at once.

    The controller releases what the object holds, removes its finalizer and then deletes it.
    """
    metadata = metadata_of(api_object)
    if not metadata.finalizers:
        return None
    if metadata.deletion_timestamp:
        return api_object
    return msgspec.structs.replace(api_object, metadata=api_object.metadata | {"deletionTimestamp": now})


def placed_uid(namespace: str, name: str) -> str:
    """Return the uid under which `topobus place` holds devices for a pod that has no uid: such a
    pod is not stored, so there is no object of it.
    """
    return str(uuid.uuid5(_POD_SPACE, f"{namespace}/{name}"))
