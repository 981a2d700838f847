"""A snapshot of a cluster: the objects that decide where pods with devices go, as the API server
writes them.

It is what `topobus snapshot` saves and what `topobus why` answers from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from topobus.engine.allocation.values import Gate
from topobus.engine.scheduling.node_resources import priority_of

__all__ = [
    "EXTENDED_RESOURCE",
    "TAINT_RULES",
    "Server",
    "Snapshot",
    "Unseen",
    "gates_of_release",
    "gates_on",
    "has_broken_taint_rules",
    "has_ended",
    "importance",
    "is_waiting",
    "keeps_counters",
    "names_volumes",
    "node_of",
    "reduced",
]

EXTENDED_RESOURCE = "DRAExtendedResource"
"""The gate with which kube-scheduler makes claims for extended resources."""
TAINT_RULES = "DRADeviceTaintRules"
"""The gate with which kube-scheduler looks at DeviceTaintRules."""

# kube-scheduler takes DeviceTaintRules for v1alpha3 there and gets v1beta2.
# Source: kubernetes/kubernetes#139681, in 1.36.3.
_BROKEN_TAINT_RULES = re.compile(r"v1\.36\.[0-2](?!\d)")
# Source: kubernetes/kubernetes#140663, in 1.36.3; the allocators of 1.34.9, 1.35.6 and 1.36.2 do it.
_KEPT_COUNTERS = re.compile(r"v1\.(3[0-5]\.|36\.[0-2](?!\d))")

# What a container says of devices and of its place. Images, commands, variables and mounts stay out.
_CONTAINER = ("name", "resources", "restartPolicy", "ports")
_CONTAINERS = ("containers", "initContainers")
_METADATA = ("managedFields", "annotations", "selfLink")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
# What a node says of its images and addresses decides nothing here.
_NODE_STATUS = ("allocatable", "conditions")
_POD_STATUS = (
    "phase",
    "conditions",
    "nominatedNodeName",
    "resourceClaimStatuses",
    "extendedResourceClaimStatus",
)
# The minor release of Kubernetes 1 in which each gate is on by default, 0 for none so far.
# Source: pkg/features/kube_features.go, 1.36; for TAINT_RULES kubernetes/kubernetes#138676.
_ON_SINCE = {
    "DRAAdminAccess": 34,
    "DRAPrioritizedList": 34,
    "DRAPartitionableDevices": 36,
    "DRADeviceTaints": 36,
    "DRADeviceBindingConditions": 36,
    "DRAResourceClaimDeviceStatus": 33,
    "DRAConsumableCapacity": 36,
    "DRAListTypeAttributes": 0,
    EXTENDED_RESOURCE: 36,
    TAINT_RULES: 37,
}


class Server(Struct, frozen=True, kw_only=True):
    """The API server that a snapshot is of."""

    address: str = ""
    version: str = ""
    """`v1.36.2`."""
    gates: dict[str, bool] = {}
    """Feature gates that decide what an allocation may use."""
    gates_from: str = ""
    """Where `gates` come from: `metrics` of the server, or `defaults` of its release."""


class Unseen(Struct, frozen=True, kw_only=True):
    """A kind of object that could not be read."""

    kind: str
    why: str


class Snapshot(Struct, frozen=True, kw_only=True):
    """The objects of a cluster at one time."""

    kind: str = "ClusterSnapshot"
    taken_at: str = ""
    """RFC 3339, UTC."""
    server: Server = Server()
    items: tuple[dict[str, Any], ...] = ()
    """Objects as the API server writes them, with `apiVersion` and `kind`."""
    unseen: tuple[Unseen, ...] = ()


def gates_of_release(version: str) -> dict[str, bool]:
    """Return the gates as a release of Kubernetes has them by default. All are on for a version that
    cannot be read.

    >>> gates_of_release("v1.35.1")["DRADeviceTaints"], gates_of_release("v1.36.2")["DRADeviceTaints"]
    (False, True)
    >>> gates_of_release("v1.36.2")[TAINT_RULES], gates_of_release("v1.37.0")[TAINT_RULES]
    (False, True)
    """
    _, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not minor.isdecimal():
        return dict.fromkeys(_ON_SINCE, True)
    return {gate: bool(since) and int(minor) >= since for gate, since in _ON_SINCE.items()}


def has_broken_taint_rules(server: Server) -> bool:
    """Say whether kube-scheduler has DeviceTaintRules on, is of a release that does not heed them, and
    panics when a ResourceSlice changes beside one.

    >>> has_broken_taint_rules(Server(version="v1.36.2-eks-1")), has_broken_taint_rules(Server(version="v1.36.3"))
    (True, False)
    """
    return server.gates.get(TAINT_RULES, True) and _BROKEN_TAINT_RULES.match(server.version) is not None


def keeps_counters(server: Server) -> bool:
    """Say whether kube-scheduler is of a release that keeps the counters of a device which a taint or a
    constraint has refused, while it searches on.

    >>> keeps_counters(Server(version="v1.36.2+k3s1")), keeps_counters(Server(version="v1.36.3"))
    (True, False)
    """
    return _KEPT_COUNTERS.match(server.version) is not None


def gates_on(gates: Mapping[str, bool]) -> frozenset[Gate]:
    """Return the gates of an allocation that are on. One that is made of several wants all of them.

    A gate that is not named counts as on.
    """
    return frozenset(gate for gate in Gate if all(gates.get(name, True) for name in gate.split("+")))


def reduced(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what decides nothing: of a container all but its resources and ports, of a node its
    images and addresses, who wrote which field.
    """
    metadata = {key: value for key, value in (plain.get("metadata") or {}).items() if key not in _METADATA}
    annotations = {
        key: value
        for key, value in ((plain.get("metadata") or {}).get("annotations") or {}).items()
        if key != _LAST_APPLIED
    }
    kept = {**plain, "metadata": {**metadata, **({"annotations": annotations} if annotations else {})}}
    status = plain.get("status") or {}
    if plain.get("kind") == "Node":
        kept["status"] = {key: status[key] for key in _NODE_STATUS if key in status}
    if plain.get("kind") == "Pod":
        spec = plain.get("spec") or {}
        containers = {
            part: [{key: each[key] for key in _CONTAINER if key in each} for each in spec[part]]
            for part in _CONTAINERS
            if spec.get(part)
        }
        kept["spec"] = {**spec, **containers}
        kept["status"] = {key: status[key] for key in _POD_STATUS if key in status}
    return kept


def is_waiting(pod: Mapping[str, Any]) -> bool:
    """Say whether a pod has no node yet and has not ended."""
    return not has_ended(pod) and not node_of(pod)


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Say whether all containers of a pod have ended for good: it takes nothing any more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def node_of(pod: Mapping[str, Any]) -> str:
    """Name the node that a pod is bound to. Empty when it waits."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def importance(pod: Mapping[str, Any]) -> tuple[int, str]:
    """Order pods as kube-scheduler's queue does: the highest priority first, of equals the oldest."""
    created = str((pod.get("metadata") or {}).get("creationTimestamp") or "")
    return -priority_of(pod.get("spec") or {}), created


def names_volumes(pod: Mapping[str, Any]) -> bool:
    """Say whether a pod uses PersistentVolumeClaims, its own or such as are made for it."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in volumes)
