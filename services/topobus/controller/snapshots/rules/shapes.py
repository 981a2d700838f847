"""The shapes of a snapshot's objects, as far as an answer reads them.

An API server has checked what it lists. A file may be written by hand, and is checked against these
once: the rules take the types for given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from topobus.controller.snapshots.rules.cluster_view import key_of, shown
from topobus.controller.state.cluster_objects import read_object
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector
from topobus.engine.scheduling.kube_rules.pod_affinity import PodAffinity
from topobus.engine.scheduling.kube_rules.topology_spread import SpreadConstraint
from topobus.engine.scheduling.kube_rules.volumes import VOLUME_SHAPES
from topobus.engine.scheduling.node_fit import NodeAffinity, NodeSpec
from topobus.formats.kubernetes.pod import Container, PodSpec
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    ClaimTemplateSpec,
    DeviceClassSpec,
    QuantityText,
    SliceSpec,
    TaintRuleSpec,
    Toleration,
)
from topobus.formats.kubernetes.shape import problem_of
from topobus.values.errors import ContractError

__all__ = ["SHAPES", "in_todays_version", "without_nulls", "wrong_types"]


class _Wire(Struct, frozen=True, kw_only=True, rename="camel"):
    """Structs with Kubernetes' field names."""


class _Owner(_Wire, frozen=True, kw_only=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class _Metadata(_Wire, frozen=True, kw_only=True):
    name: str
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    owner_references: tuple[_Owner, ...] = ()


class _Object(_Wire, frozen=True, kw_only=True):
    metadata: _Metadata


class _Gate(_Wire, frozen=True, kw_only=True):
    name: str = ""


class _Port(_Wire, frozen=True, kw_only=True):
    host_port: int = 0
    host_ip: str = msgspec.field(default="", name="hostIP")
    protocol: str = ""


class _Container(Container, frozen=True, kw_only=True, rename="camel"):
    ports: tuple[_Port, ...] = ()


class _VolumeClaim(_Wire, frozen=True, kw_only=True):
    claim_name: str = ""


class _Volume(_Wire, frozen=True, kw_only=True):
    name: str = ""
    persistent_volume_claim: _VolumeClaim | None = None
    ephemeral: dict[str, Any] | None = None


class _Amounts(_Wire, frozen=True, kw_only=True):
    requests: dict[str, QuantityText] = {}
    limits: dict[str, QuantityText] = {}


class _Affinity(_Wire, frozen=True, kw_only=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class _PodSpec(PodSpec, frozen=True, kw_only=True, rename="camel"):
    affinity: _Affinity | None = None
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()
    overhead: dict[str, QuantityText] | None = None
    preemption_policy: str = ""
    priority: int = 0
    resources: _Amounts = _Amounts()
    scheduler_name: str = ""
    scheduling_gates: tuple[_Gate, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()
    volumes: tuple[_Volume, ...] = ()


class _Condition(_Wire, frozen=True, kw_only=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _MadeClaim(_Wire, frozen=True, kw_only=True):
    name: str = ""
    resource_claim_name: str = ""


class _SpecialClaim(_Wire, frozen=True, kw_only=True):
    resource_claim_name: str = ""


class _PodStatus(_Wire, frozen=True, kw_only=True):
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()
    nominated_node_name: str = ""
    resource_claim_statuses: tuple[_MadeClaim, ...] = ()
    extended_resource_claim_status: _SpecialClaim | None = None


class _Pod(_Object, frozen=True, kw_only=True):
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _NodeStatus(_Wire, frozen=True, kw_only=True):
    allocatable: dict[str, QuantityText] = {}


class _Node(_Object, frozen=True, kw_only=True):
    spec: NodeSpec = NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _Class(_Object, frozen=True, kw_only=True):
    spec: DeviceClassSpec = DeviceClassSpec()


class _Consumer(_Wire, frozen=True, kw_only=True):
    resource: str = ""
    name: str = ""
    uid: str = ""
    api_group: str = ""


class _ClaimStatus(_Wire, frozen=True, kw_only=True):
    allocation: AllocationResult | None = None
    reserved_for: tuple[_Consumer, ...] = ()


class _Claim(_Object, frozen=True, kw_only=True):
    spec: ClaimSpec = ClaimSpec()
    status: _ClaimStatus = _ClaimStatus()


class _Template(_Object, frozen=True, kw_only=True):
    spec: ClaimTemplateSpec


class _Slice(_Object, frozen=True, kw_only=True):
    spec: SliceSpec


class _Rule(_Object, frozen=True, kw_only=True):
    spec: TaintRuleSpec


class _BudgetSpec(_Wire, frozen=True, kw_only=True):
    selector: LabelSelector | None = None


class _BudgetStatus(_Wire, frozen=True, kw_only=True):
    disruptions_allowed: int = 0


class _Budget(_Object, frozen=True, kw_only=True):
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()


class _QuotaStatus(_Wire, frozen=True, kw_only=True):
    hard: dict[str, QuantityText] = {}
    used: dict[str, QuantityText] = {}


class _Quota(_Object, frozen=True, kw_only=True):
    status: _QuotaStatus = _QuotaStatus()


SHAPES: Mapping[str, type[Struct]] = {
    "Pod": _Pod,
    "Node": _Node,
    "DeviceClass": _Class,
    "ResourceClaim": _Claim,
    "ResourceClaimTemplate": _Template,
    "ResourceSlice": _Slice,
    "DeviceTaintRule": _Rule,
    "Namespace": _Object,
    "PodDisruptionBudget": _Budget,
    "ResourceQuota": _Quota,
    **VOLUME_SHAPES,
}
"""What is read of an object of each kind. Kinds that are not here are not read."""
# Their older versions are of another shape.
_UPGRADED = ("ResourceClaim", "ResourceClaimTemplate", "ResourceSlice")


def wrong_types(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the fields of a snapshot's objects that have a wrong type, with the names of the objects.

    Shapes: items — without nulls. Kinds that no answer reads are not looked at.

    >>> wrong_types([{"kind": "Node", "metadata": {"name": "n1"}, "spec": {"unschedulable": "yes"}}])
    ['Node n1: spec.unschedulable: wanted bool, got str']
    """
    return [problem for number, plain in enumerate(items) for problem in _wrong_types(f"items[{number}]", plain)]


def _wrong_types(place: str, plain: Mapping[str, Any]) -> list[str]:
    kind, version = plain.get("kind"), plain.get("apiVersion", "")
    for field, value in (("kind", kind), ("apiVersion", version)):
        if not isinstance(value, str):
            return [f"{place}: {field}: wanted str, got {type(value).__name__}"]
    shape, metadata = SHAPES.get(str(kind)), plain.get("metadata")
    if shape is None:
        return []
    is_named = isinstance(metadata, dict) and isinstance(metadata.get("name"), str)
    name = shown(str(kind), key_of(plain)) if is_named else f"{place} ({kind})"
    try:
        msgspec.convert(plain, _Object)
        msgspec.convert(in_todays_version(plain), shape)
    except msgspec.ValidationError as err:
        return [f"{name}: {problem_of(err, '')}"]
    except ContractError as err:
        return [f"{place}: {err.message}"]
    return []


def in_todays_version(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object of resource.k8s.io in the form of v1.

    Errors: raises ContractError for one that cannot be read.
    """
    if plain["kind"] not in _UPGRADED:
        return plain
    upgraded = read_object(plain["kind"], str(plain.get("apiVersion")).rpartition("/")[2], plain)
    assert upgraded is not None  # only pods are left out
    status = {"status": upgraded.status} if upgraded.status else {}
    return {**plain, "apiVersion": upgraded.api_version, "spec": upgraded.spec, **status}


def without_nulls(value: Any) -> Any:
    """Leave out the nulls of an object, which Kubernetes takes for absent."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
