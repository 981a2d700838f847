"""The negotiation of a pod's node: the scheduler proposes nodes, drivers report unsuitable ones,
the scheduler selects one, drivers allocate there.

Where kube-scheduler chooses at random, the first node by name is chosen.

Source: pkg/scheduler/framework/plugins/dynamicresources, 1.30;
docs/knowledge/dynamic-resource-allocation.md#negotiation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from topobus.engine.allocation.node_selectors import selector_matches
from topobus.engine.allocation.values import node_of
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_limits import MAX_NODES
from topobus.formats.kubernetes.objects import metadata_of, name_of, pod_as_owner
from topobus.formats.kubernetes.resource import NodeSelector
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.outcome import Reason

__all__ = [
    "Negotiate",
    "PodClaimView",
    "Ready",
    "Step",
    "TakeBack",
    "Wait",
    "context_for",
    "next_step",
    "read_spec",
    "read_status",
    "unsuitable_by_claim",
    "with_spec",
    "with_unsuitable",
]


@dataclass(frozen=True)
class PodClaimView:
    """A classic claim of the pod as the scheduler sees it."""

    entry: str
    name: str
    is_delayed: bool
    is_allocated: bool = False
    nodes: NodeSelector | None = None
    """Where it can be used: by its allocation, or by its class before it is allocated. None:
    anywhere."""
    is_mine: bool = False
    """Reserved for the pod."""
    is_free: bool = False
    """Allocated, and the pod may reserve it."""
    is_used_by_others: bool = False


@dataclass(frozen=True)
class Wait:
    """Nothing can be done before something changes."""

    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Negotiate:
    """Write this into the context. An empty node means that none is selected now."""

    selected: str
    potential: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()
    """Why no node is selected."""


@dataclass(frozen=True)
class TakeBack:
    """No node fits while this claim keeps its allocation. No other pod uses it, so its driver is
    asked to deallocate it.
    """

    claim: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Ready:
    """All claims are allocated: the pod may reserve them and run on one of these nodes."""

    nodes: tuple[str, ...]


Step = Wait | Negotiate | TakeBack | Ready


def next_step(
    claims: Sequence[PodClaimView],
    nodes: Sequence[str],
    spec: classic.PodSchedulingSpec | None,
    unsuitable: Mapping[str, frozenset[str]],
    rivals: Mapping[str, int] | None = None,
) -> Step:
    """Decide what the scheduler does next for a pod.

    Shapes: nodes — where the pod may run otherwise, in order of preference; spec — the context's,
    None when there is none; unsuitable — entry to the nodes that its driver refused, without the
    entries that have no report yet; rivals — node to how many other pods are negotiating for it.
    The node with the fewest is selected, or many pods would move from node to node together.
    """
    in_use = [claim for claim in claims if claim.is_allocated and not claim.is_mine and not claim.is_free]
    if in_use:
        return _step_beside_others(claims, in_use, spec)
    at_once = [claim for claim in claims if not claim.is_allocated and not claim.is_delayed]
    if at_once:
        message = f"claim {at_once[0].name} is allocated at once (allocationMode Immediate), and is not yet"
        return Wait((Reason(code="waits-for-allocation", message=message),))
    pending = [claim for claim in claims if not claim.is_allocated]
    allowed = [node for node in nodes if all(_serves(claim.nodes, node) for claim in claims)]
    bad = {node for pod_claim_view in pending for node in unsuitable.get(pod_claim_view.entry, ())}
    if not pending and allowed:
        return Ready(tuple(allowed))
    good = [node for node in allowed if node not in bad]
    if not good:
        reasons = (Reason(code="no-node", message=_why_none(claims, nodes, allowed)),)
        movable = sorted(
            claim.name for claim in claims if claim.is_allocated and claim.is_delayed and not claim.is_used_by_others
        )
        if movable:
            return TakeBack(movable[0], reasons)
        # The context stays without a selected node. Its drivers report when a node becomes
        # suitable.
        return Negotiate("", _potential(allowed, good), reasons) if allowed else Wait(reasons)
    potential = _potential(allowed, good)
    selected = spec.selected_node if spec is not None else ""
    if selected in good:
        return Negotiate(selected, potential)
    asked = spec.potential_nodes if spec is not None else ()
    suitable: list[str] = []
    if len(pending) == 1:
        suitable = good  # its driver alone decides: it allocates there, or refuses
    elif all(pod_claim_view.entry in unsuitable for pod_claim_view in pending):
        suitable = [node for node in good if node in asked]
    if suitable:
        return Negotiate(min(suitable, key=lambda node: (rivals or {}).get(node, 0)), potential)
    return Negotiate("", potential)


def _step_beside_others(
    claims: Sequence[PodClaimView], in_use: Sequence[PodClaimView], spec: classic.PodSchedulingSpec | None
) -> Step:
    """Wait for claims that others use, or give up one of the pod's own.

    Two pods with the same two claims may each hold one of them. The pod that waits for the first by
    name gives up the others, so that pods never wait in a circle.
    """
    text = f"claim {in_use[0].name} is reserved for others, or is being taken back"
    reasons = (Reason(code="claim-in-use", message=text),)
    held = sorted(
        claim.name
        for claim in claims
        if claim.is_allocated and claim.is_mine and claim.is_delayed and not claim.is_used_by_others
    )
    if not held or held[-1] < min(claim.name for claim in in_use):
        return Wait(reasons)
    if spec is not None and spec.selected_node:
        # Else its driver would allocate it there again.
        return Negotiate("", spec.potential_nodes, reasons)
    return TakeBack(held[-1], reasons)


def context_for(pod: ApiObject) -> ApiObject:
    """Make the context of a pod: named like it and owned by it."""
    metadata = metadata_of(pod)
    return ApiObject(
        api_version=classic.API_VERSION,
        kind="PodSchedulingContext",
        metadata={
            "name": metadata.name,
            "namespace": metadata.namespace or "default",
            "ownerReferences": [pod_as_owner(metadata)],
        },
    )


def read_spec(context: ApiObject) -> classic.PodSchedulingSpec:
    """Read the scheduler's part.

    Errors: raises ContractError.
    """
    return read_as(context.spec, classic.PodSchedulingSpec, where=f"{name_of(context)}: spec")


def read_status(context: ApiObject) -> classic.PodSchedulingStatus:
    """Read the drivers' part.

    Errors: raises ContractError.
    """
    return read_as(context.status, classic.PodSchedulingStatus, where=f"{name_of(context)}: status")


def with_spec(context: ApiObject, step: Negotiate) -> ApiObject:
    """Write the scheduler's next step. Returns the same value when nothing changes."""
    spec: dict[str, Any] = {"potentialNodes": list(step.potential)}
    if step.selected:
        spec["selectedNode"] = step.selected
    return msgspec.structs.replace(context, spec=spec)


def unsuitable_by_claim(context: ApiObject) -> dict[str, frozenset[str]]:
    """List the nodes that drivers refused, by entry.

    Errors: raises ContractError.
    """
    return {
        resource_claim.name: frozenset(resource_claim.unsuitable_nodes)
        for resource_claim in read_status(context).resource_claims
    }


def with_unsuitable(context: ApiObject, unsuitable: Mapping[str, Sequence[str]]) -> ApiObject:
    """Write one driver's report on its claims. An empty list is written as well, for it shows that
    the driver has answered.

    Reports of other drivers stay.

    Shapes: unsuitable — entry to nodes in the order of the potential ones; cut at 128 without
    losing the selected one.
    """
    selected = read_spec(context).selected_node
    entries = {
        resource_claim.name: list(resource_claim.unsuitable_nodes)
        for resource_claim in read_status(context).resource_claims
    }
    for entry, nodes in unsuitable.items():
        kept = list(nodes)[:MAX_NODES]
        if selected in nodes and selected not in kept:
            kept[-1] = selected
        entries[entry] = kept
    claims = [
        {"name": entry, **({"unsuitableNodes": nodes} if nodes else {})} for entry, nodes in sorted(entries.items())
    ]
    return msgspec.structs.replace(context, status={**context.status, "resourceClaims": claims})


def _potential(allowed: Sequence[str], good: Sequence[str]) -> tuple[str, ...]:
    """Name the nodes to ask about: all of them, or, where they are too many, first those that no
    driver refused.
    """
    if len(allowed) <= MAX_NODES:
        return tuple(sorted(allowed))
    return (*good, *(node for node in allowed if node not in set(good)))[:MAX_NODES]


def _serves(selector: NodeSelector | None, node: str) -> bool:
    return selector is None or selector_matches(selector, node_of(node))


def _why_none(claims: Sequence[PodClaimView], nodes: Sequence[str], allowed: Sequence[str]) -> str:
    if not nodes:
        return "no node is known to which the pod may go"
    if allowed:
        return (
            "the drivers cannot serve its claims on "
            f"{', '.join(allowed[:8])}{' and others' if len(allowed) > 8 else ''}"
        )
    bound = ", ".join(sorted(claim.name for claim in claims if claim.nodes is not None))
    return f"none of its {len(nodes)} nodes is one on which all of its claims can be used ({bound})"
