"""A dry run: where claims would be allocated among these nodes, slices and classes, or why not, with nothing written anywhere.

Flows in: a Situation (objects as they were listed, from a file, a running system or a cluster). Flows out: one answer a claim. The engine, the order of nodes and the
reasons are the controller's own; claims that were answered yes are taken into account for those after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from topobus.contracts.kubernetes.classic import is_classic
from topobus.contracts.kubernetes.objects import NODE_ANNOTATION, metadata_of, name_of
from topobus.contracts.kubernetes.pod import PodSpec
from topobus.contracts.kubernetes.resource import AllocationResult, ClaimSpec, ClaimTemplateSpec, DeviceClassSpec, SliceSpec
from topobus.contracts.kubernetes.shape import read_as
from topobus.contracts.messages import ApiObject
from topobus.controller.core.advice import nearest, would_fit
from topobus.controller.core.answers import explain_nodes
from topobus.controller.core.claims import status_of
from topobus.controller.core.inventory import built_in_class, holders_from_ledger, slices_from_inventory
from topobus.controller.core.nearness import Wished, allocate_near, read_wishes
from topobus.controller.core.pools import gather_pools
from topobus.controller.core.search import DEFAULT_STEP_BUDGET, allocate
from topobus.controller.core.selectors import SelectorCompiler
from topobus.controller.core.values import (
    ALL_GATES,
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Mode,
    Node,
    Outcome,
    Slice,
    Usage,
)
from topobus.domain.alignment.view import node_view
from topobus.domain.device import Inventory, driver_name
from topobus.domain.errors import ContractError
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.outcome import Reason
from topobus.domain.quantity import Quantity
from topobus.domain.view import AlignmentOptions, NodeView

__all__ = ["DryAnswer", "Situation", "dry_run"]

_ADVICE_STEPS = 2_000


class Situation(Struct, frozen=True, kw_only=True):
    """All that a dry run depends on. Whatever of it is not known is left out."""

    wanted: tuple[ApiObject, ...]
    """ResourceClaims and Pods to find a place for, with the templates and claims that the pods name."""
    objects: tuple[ApiObject, ...] = ()
    """DeviceClasses, ResourceSlices, and claims that are allocated already; Nodes, for their labels."""
    machines: tuple[Machine, ...] = ()
    inventories: tuple[Inventory, ...] = ()
    ledgers: tuple[Ledger, ...] = ()
    mode: Mode = Mode.CORRECTED
    step_budget: int = DEFAULT_STEP_BUDGET


class DryAnswer(Struct, frozen=True, kw_only=True):
    """What one claim, or all claims of one pod, would be told."""

    name: str
    """`ResourceClaim default/fast`, or the pod that brings several along."""
    condition: str
    """`Allocated`, or the condition's reason for which it would wait."""
    node: str = ""
    allocations: dict[str, AllocationResult] = {}
    """Claim to its allocation."""
    reasons: tuple[Reason, ...] = ()
    """Why not, node by node; then the nearest miss, and what would fit."""


def dry_run(situation: Situation, compiler: SelectorCompiler) -> tuple[DryAnswer, ...]:
    """Answer each claim and pod in the order given.

    Errors: raises ContractError for an object that nobody can read.
    """
    place = _Place(situation, compiler)
    return tuple(place.answer(name, claims, node) for name, claims, node in _groups(situation))


class _Place:
    """What is known, and what the answers so far have taken."""

    def __init__(self, situation: Situation, compiler: SelectorCompiler) -> None:
        self._situation = situation
        self._compiler = compiler
        self._slices = _slices(situation)
        self._classes = _classes(situation, self._slices)
        self._nodes = _nodes(situation, self._slices)
        self._holders: dict[DeviceId, str] = {}
        self._consumed: dict[DeviceId, dict[str, Quantity]] = {}
        asked = {_holder(one) for one in situation.wanted}
        asked |= {_holder(one) for one in situation.objects if _pod_of(one) in asked}
        for ledger in situation.ledgers:
            cpus = next((one.devices for one in situation.inventories if (one.node, one.device_class) == (ledger.node, "cpu")), ())
            # What is asked about may be stored and allocated already: its own devices do not stand in its way.
            held = {device: str(owner) for device, owner in holders_from_ledger(ledger, cpus).items()}
            self._holders |= {device: holder for device, holder in held.items() if holder not in asked}
        for one in situation.objects:
            if one.kind == "ResourceClaim" and not is_classic(one) and _holder(one) not in asked:
                allocation = status_of(one).allocation
                if allocation is not None:
                    self._take(_holder(one), allocation)

    def answer(self, name: str, claims: Sequence[tuple[str, ApiObject, ClaimSpec]], named: str) -> DryAnswer:
        """Find a place for claims that belong together."""
        nodes = [one for one in self._nodes if named in ("", one.name)]
        if named and not nodes:
            known = ", ".join(one.name for one in self._nodes) or "none"
            reason = Reason(code="unknown-node", message=f"there is no node {named}: known are {known}", facts={"node": named})
            return DryAnswer(name=name, condition="DoesNotFit", reasons=(reason,))
        wished = [Wished(claim, read_wishes(spec, name_of(claim), self._classes)) for _, claim, spec in claims]
        outcomes: list[Outcome] = []
        for node in nodes:
            outcome = self._search(node, claims, wished)
            if isinstance(outcome, Allocated):
                allocations = {claim: result for (claim, _, _), result in zip(claims, outcome.results, strict=True)}
                for claim, result in allocations.items():
                    self._take(f"claim {claim}", result)
                return DryAnswer(name=name, condition="Allocated", node=node.name, allocations=allocations)
            outcomes.append(outcome)
        condition, reasons = explain_nodes([one.name for one in nodes], outcomes)
        return DryAnswer(name=name, condition=condition, reasons=(*reasons, *self._advice(nodes, outcomes, claims)))

    def _advice(
        self, nodes: Sequence[Node], outcomes: Sequence[Outcome], claims: Sequence[tuple[str, ApiObject, ClaimSpec]]
    ) -> tuple[Reason, ...]:
        found = nearest([one.name for one in nodes], outcomes)
        if found is None:
            return ()
        name, reason = found
        node = next(one for one in nodes if one.name == name)
        return reason, *would_fit(self._input(node, claims), lambda given: allocate(given, self._compiler, step_budget=_ADVICE_STEPS))

    def _search(self, node: Node, claims: Sequence[tuple[str, ApiObject, ClaimSpec]], wished: Sequence[Wished]) -> Outcome:
        given, budget = self._input(node, claims), self._situation.step_budget
        if all(one.wishes is None for one in wished):
            return allocate(given, self._compiler, step_budget=budget)
        return allocate_near(given, wished, self._view(node.name), self._compiler, step_budget=budget)

    def _input(self, node: Node, claims: Sequence[tuple[str, ApiObject, ClaimSpec]]) -> AllocationInput:
        return AllocationInput(
            node=node,
            claims=tuple(ClaimToAllocate(name, spec, len(claims) > 1) for name, _, spec in claims),
            classes=self._classes,
            slices=self._slices,
            pools=gather_pools(self._slices, node, ALL_GATES),
            usage=Usage(self._holders, self._consumed),
            mode=self._situation.mode,
        )

    def _view(self, node: str) -> NodeView | None:
        machine = next((one for one in self._situation.machines if one.node == node), None)
        if machine is None:
            return None
        inventories = {one.device_class: one for one in self._situation.inventories if one.node == node}
        ledger = next((one for one in self._situation.ledgers if one.node == node), None)
        return node_view(machine, inventories, ledger, AlignmentOptions(), CpuSet())

    def _take(self, holder: str, allocation: AllocationResult) -> None:
        for one in allocation.devices.results:
            device = DeviceId(one.driver, one.pool, one.device)
            if one.share_id is not None:
                used = self._consumed.setdefault(device, {})
                for name, amount in one.consumed_capacity.items():
                    used[name] = used.get(name, Quantity(0)) + Quantity.parse(amount)
            elif not one.admin_access:
                self._holders.setdefault(device, holder)


def _holder(one: ApiObject) -> str:
    """Name a claim or pod as holders are named."""
    metadata = metadata_of(one)
    return f"{'claim' if one.kind == 'ResourceClaim' else one.kind.lower()} {metadata.namespace or 'default'}/{metadata.name}"


def _pod_of(claim: ApiObject) -> str:
    """Name the pod that a claim was made for, as holders are named; empty for a claim of its own."""
    metadata = metadata_of(claim)
    owner = next((one for one in metadata.owner_references if one.get("kind") == "Pod" and one.get("controller")), None)
    return f"pod {metadata.namespace or 'default'}/{owner.get('name')}" if owner is not None else ""


def _groups(situation: Situation) -> list[tuple[str, list[tuple[str, ApiObject, ClaimSpec]], str]]:
    """List what is answered together: each pod with its claims, then each claim that no pod names."""
    known = {
        (one.kind, metadata_of(one).namespace or "default", metadata_of(one).name): one for one in (*situation.objects, *situation.wanted)
    }
    groups: list[tuple[str, list[tuple[str, ApiObject, ClaimSpec]], str]] = []
    used: set[tuple[str, str]] = set()
    for pod in (one for one in situation.wanted if one.kind == "Pod"):
        namespace = metadata_of(pod).namespace or "default"
        spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
        members: list[tuple[str, ApiObject, ClaimSpec]] = []
        for use in spec.resource_claims:
            kind, name = ("ResourceClaim", use.claim_name) if use.claim_name else ("ResourceClaimTemplate", use.template_name)
            found = known.get((kind, namespace, name))
            if found is None:
                raise ContractError(
                    f"{name_of(pod)}: resourceClaims {use.name}: there is no {kind} {namespace}/{name}",
                    next_step="put it into the same manifest, or apply it first",
                )
            if kind == "ResourceClaim":
                used.add((namespace, name))
                if status_of(found).allocation is None:
                    members.append((f"{namespace}/{name}", found, read_as(found.spec, ClaimSpec, where=f"{name_of(found)}: spec")))
            else:
                template = read_as(found.spec, ClaimTemplateSpec, where=f"{name_of(found)}: spec")
                members.append((f"{namespace}/{metadata_of(pod).name}-{use.name}", found, template.spec))
        if members:
            groups.append((name_of(pod), members, spec.node_name))
    for claim in (one for one in situation.wanted if one.kind == "ResourceClaim"):
        metadata = metadata_of(claim)
        namespace = metadata.namespace or "default"
        if (namespace, metadata.name) not in used:
            spec_ = read_as(claim.spec, ClaimSpec, where=f"{name_of(claim)}: spec")
            groups.append((name_of(claim), [(f"{namespace}/{metadata.name}", claim, spec_)], metadata.annotations.get(NODE_ANNOTATION, "")))
    return groups


def _slices(situation: Situation) -> tuple[Slice, ...]:
    found = [one for inventory in situation.inventories for one in slices_from_inventory(inventory)]
    found += [
        Slice(metadata_of(one).name, read_as(one.spec, SliceSpec, where=name_of(one)))
        for one in situation.objects
        if one.kind == "ResourceSlice"
    ]
    return tuple(found)


def _classes(situation: Situation, slices: Sequence[Slice]) -> Mapping[str, DeviceClassSpec]:
    """Collect the classes: one for each driver of ours, as the controller offers it, and those that are stored."""
    suffix = driver_name("")
    built_in = {one.spec.driver: built_in_class(one.spec.driver) for one in slices if one.spec.driver.endswith(suffix)}
    stored = {
        metadata_of(one).name: read_as(one.spec, DeviceClassSpec, where=name_of(one))
        for one in situation.objects
        if one.kind == "DeviceClass"
    }
    return built_in | stored


def _nodes(situation: Situation, slices: Sequence[Slice]) -> list[Node]:
    """List the nodes by name: those that are described, and those that slices and inventories name."""
    labels: dict[str, dict[str, Any]] = {
        metadata_of(one).name: dict(metadata_of(one).labels) for one in situation.objects if one.kind == "Node"
    }
    names = {one.node for one in situation.machines} | {one.node for one in situation.inventories} | labels.keys()
    names |= {one.spec.node_name for one in slices if one.spec.node_name}
    names |= {device.node_name for one in slices for device in one.spec.devices if device.node_name}
    return [Node(name, {"kubernetes.io/hostname": name} | labels.get(name, {})) for name in sorted(names)]
