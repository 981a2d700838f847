"""Checks whether kube-scheduler would admit a pod to a node, by the node's labels, taints and
unschedulable mark.

The rules about other pods are in `placement_rules` and `node_resources`.
Source: kube-scheduler's NodeName, NodeUnschedulable, TaintToleration and NodeAffinity plugins;
k8s.io/component-helpers/scheduling/corev1, 1.36.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.engine.allocation.node_selectors import selector_matches, term_matches
from topobus.engine.allocation.values import Node
from topobus.engine.claims.objects import Pod
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.resource import (
    NodeRequirement,
    NodeSelector,
    NodeSelectorTerm,
    Taint,
    Toleration,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.outcome import Reason

__all__ = [
    "NodeAffinity",
    "NodeFacts",
    "NodeSpec",
    "Placing",
    "is_tolerated",
    "is_wanted",
    "node_facts",
    "node_selector",
    "preference_of",
    "read_placing",
    "selector_objection",
    "untolerated",
    "why_not",
]

_UNSCHEDULABLE = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


class _Wire(Struct, frozen=True, kw_only=True, rename="camel"):
    """Structs with Kubernetes' field names."""


class PreferredTerm(_Wire, frozen=True, kw_only=True):
    """A term with its weight, 1 to 100."""

    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(_Wire, frozen=True, kw_only=True):
    """PodSpec.affinity.nodeAffinity."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredTerm, ...] = ()


class Affinity(_Wire, frozen=True, kw_only=True):
    """PodSpec.affinity, as far as it depends on nodes alone."""

    node_affinity: NodeAffinity | None = None


class Placing(_Wire, frozen=True, kw_only=True):
    """The parts of a PodSpec that restrict its nodes."""

    node_name: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()


class NodeSpec(_Wire, frozen=True, kw_only=True):
    """The part of a Node's spec that restricts its pods."""

    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class NodeFacts(Struct, frozen=True, kw_only=True):
    """The parts of a Node object that restrict its pods."""

    node: Node
    taints: tuple[Taint, ...] = ()


def node_facts(api_object: ApiObject) -> NodeFacts:
    """Read a Node.

    Errors: raises ContractError.
    """
    spec = read_as(api_object.spec, NodeSpec, where=f"{name_of(api_object)}: spec")
    metadata = metadata_of(api_object)
    taints = spec.taints
    if spec.unschedulable and not any(taint.key == _UNSCHEDULABLE.key for taint in taints):
        # The controller manager adds this taint a moment after the mark.
        taints = (*taints, _UNSCHEDULABLE)
    return NodeFacts(node=Node(metadata.name, metadata.labels), taints=taints)


def read_placing(pod: ApiObject) -> Placing:
    """Read the parts of a pod that restrict its nodes.

    Errors: raises ContractError.
    """
    return read_as(pod.spec, Placing, where=f"{name_of(pod)}: spec")


def why_not(pod: Placing, at: NodeFacts) -> Reason | None:
    """Return the first reason that keeps a pod off a node. None when nothing on the node does."""
    node = at.node
    if pod.node_name:
        # It is bound, so the other rules no longer apply.
        return (
            None if pod.node_name == node.name else _reason("node-name", node, f"the pod is to run on {pod.node_name}")
        )
    for taint in untolerated(pod, at):
        shown = f"{taint.key}={taint.value}" if taint.value else taint.key
        return _reason("node-tainted", node, f"the pod does not tolerate its taint {shown}:{taint.effect}")
    for key, value in sorted(pod.node_selector.items()):
        if node.labels.get(key) != value:
            have = repr(node.labels[key]) if key in node.labels else "no such label"
            return _reason("node-selector-label", node, f"the pod wants label {key}={value}, it has {have}")
    affinity = pod.affinity.node_affinity if pod.affinity is not None else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None
    if required is not None and not selector_matches(required, node):
        return _reason("node-affinity", node, "it matches none of the terms of the pod's required node affinity")
    return None


def is_wanted(pod: Placing, node: Node) -> bool:
    """Say whether a pod's node selector and required node affinity allow a node."""
    affinity = pod.affinity.node_affinity if pod.affinity is not None else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None
    return all(node.labels.get(key) == value for key, value in pod.node_selector.items()) and (
        required is None or selector_matches(required, node)
    )


def untolerated(pod: Placing, at: NodeFacts) -> tuple[Taint, ...]:
    """List the taints of a node that keep a pod off it."""
    return tuple(taint for taint in at.taints if not _bears(pod, taint))


def is_tolerated(pod: Placing, at: NodeFacts) -> bool:
    """Say whether a pod tolerates all taints of a node that keep pods off."""
    return not untolerated(pod, at)


def node_selector(pod: Pod) -> NodeSelector | None:
    """Turn a pod's nodeSelector, and the node that its user named, into one selector."""
    labels = pod.object.spec.get("nodeSelector")
    pairs = sorted(labels.items()) if isinstance(labels, dict) else []
    name = pod.node
    if not pairs and not name:
        return None
    expressions = tuple(NodeRequirement(key=str(key), operator="In", values=(str(value),)) for key, value in pairs)
    fields = (NodeRequirement(key="metadata.name", operator="In", values=(name,)),) if name else ()
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_expressions=expressions, match_fields=fields),))


def selector_objection(selector: NodeSelector | None, node: Node) -> Reason | None:
    """Explain why a pod does not go to a node by its own selector alone, as `node_selector` returns
    it.
    """
    if selector is None or selector_matches(selector, node):
        return None
    return Reason(
        code="node-selector", message=f"node {node.name}: the pod asks for another node", facts={"node": node.name}
    )


def preference_of(pod: Placing, node: Node) -> int:
    """Add up the weights of the preferred node affinity terms that a node matches."""
    affinity = pod.affinity.node_affinity if pod.affinity is not None else None
    terms = affinity.preferred_during_scheduling_ignored_during_execution if affinity is not None else ()
    # An empty preferred term matches every node, as upstream has it; an
    # empty required one matches none.
    return sum(
        term.weight for term in terms if term.preference == NodeSelectorTerm() or term_matches(term.preference, node)
    )


def _bears(pod: Placing, taint: Taint) -> bool:
    return taint.effect not in ("NoSchedule", "NoExecute") or any(
        _tolerates(toleration, taint) for toleration in pod.tolerations
    )


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Say whether a toleration covers a taint.

    Source: k8s.io/api/core/v1/toleration.go, ToleratesTaint.
    """
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    match toleration.operator:
        case "Exists":
            return True
        case "" | "Equal":
            return bool(toleration.key) and toleration.value == taint.value
        case _:
            return False


def _reason(code: str, node: Node, why: str) -> Reason:
    facts: dict[str, Any] = {"node": node.name}
    return Reason(code=code, message=f"node {node.name}: {why}", facts=facts)
