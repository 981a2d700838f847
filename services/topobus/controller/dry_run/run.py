"""A dry run: where claims would be allocated among these nodes, slices and classes, or why not, with nothing written anywhere.

Flows in: a Situation (objects as they were listed, from a file, a running system or a cluster). Flows out: one answer a claim or pod. The copies are the controller's own
`StandaloneState`, and so are the checks of admission, the maker of the search's input, the search, the limits and the order of nodes: what is answered here is what the
controller would do with the same objects. What was answered yes is stored in the copies for those after it. Not known here is what the controller
remembers (nodes that refused a moment ago, quarantine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from topobus.cel.seam import SelectorCompiler
from topobus.contracts.catalogue import CLUSTER
from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.explanations import explain_nodes
from topobus.controller.allocation.pools import node_matches
from topobus.controller.allocation.search import allocate
from topobus.controller.allocation.suggestions import ADVICE_STEPS, nearest, would_fit
from topobus.controller.allocation.values import (
    Allocated,
    AllocationInput,
    NoFit,
    Outcome,
)
from topobus.controller.claims.claim_admission import Wanted, objection_to_claims, objection_to_results
from topobus.controller.claims.extended_resources import claim_of_pod, extended_claim, with_extended_status
from topobus.controller.claims.lifecycle import devices_of
from topobus.controller.claims.objects import Claim, Pod
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.claims.templates import claim_from_template, wanted_claims, with_claim_names
from topobus.controller.dry_run.situation import DryAnswer, Situation, holder_of, made_up_uid, place_of, pod_holder_of
from topobus.controller.scheduling.aligned_allocation import AlignedClaims, allocate_near, read_wishes
from topobus.controller.scheduling.decisions import (
    Blocked,
    PodPlan,
    look_at_node,
    node_selector,
    pre_filter,
)
from topobus.controller.scheduling.node_fit import node_facts, read_placing, why_not
from topobus.controller.scheduling.pod_alignment import own_request, wished_request, with_claims
from topobus.controller.state.inventory_slices import built_in_class
from topobus.controller.state.standalone_state import StandaloneState
from topobus.domain.alignment.planning.node_view import with_devices
from topobus.domain.alignment.planning.placement import place
from topobus.domain.device import class_of_driver, driver_name
from topobus.domain.errors import ContractError
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.request import PodRequest
from topobus.kubernetes.api.alignment_request import AlignmentRequest
from topobus.kubernetes.api.objects import (
    NODE_ANNOTATION,
    admit,
    name_of,
    object_parts,
)
from topobus.kubernetes.api.resource import (
    ClaimSpec,
    ClaimTemplateSpec,
    SliceSpec,
)
from topobus.kubernetes.api.shape import read_as

__all__ = ["DryRun", "dry_run"]

# What an API server would give; a dry run has no clock and needs no order but the one given.
_NOW = "2026-01-01T00:00:00Z"


class _Claim(NamedTuple):
    """A claim to find a place for."""

    shown: str
    """Its name in the answer: `default/fast`; of one made from a template the pod's and the entry's names."""
    claim: Claim
    wishes: AlignmentRequest | None

    @property
    def spec(self) -> ClaimSpec:
        """What the claim asks for."""
        return self.claim.spec


def dry_run(situation: Situation, compiler: SelectorCompiler) -> tuple[DryAnswer, ...]:
    """Answer each pod, then each claim that no pod names, in the order given.

    Errors: raises ContractError for a wanted object that nobody can read.
    """
    return DryRun(situation, compiler).answer_all(situation.wanted)


class DryRun:
    """The copies, and what the answers so far have taken."""

    def __init__(self, situation: Situation, compiler: SelectorCompiler) -> None:
        self.world = StandaloneState()
        self._compiler = compiler
        self._mode, self._budget = situation.mode, situation.step_budget
        self._is_running = bool(situation.machines or situation.inventories)
        self._templates = {
            place_of(api_object): api_object
            for api_object in (*situation.objects, *situation.wanted)
            if api_object.kind == "ResourceClaimTemplate"
        }
        asked = {holder_of(api_object) for api_object in situation.wanted}
        asked |= {holder_of(api_object) for api_object in situation.objects if pod_holder_of(api_object) in asked}
        for machine in situation.machines:
            self.world.put_machine(machine)
        self.world.note_silence({(silence.node, silence.device_class): silence.since for silence in situation.silences})
        for inventory in situation.inventories:
            self.world.put_inventory(inventory)
        for alignment in situation.alignments:
            self.world.put_alignment(alignment.node, alignment)
        for ledger in situation.ledgers:
            # What is asked about may be stored and allocated already: its own devices do not stand in its way.
            kept = {key: allocation for key, allocation in ledger.allocations.items() if str(allocation.owner) not in asked}
            self.world.put_ledger(msgspec.structs.replace(ledger, allocations=kept))
        others = [
            api_object
            for api_object in situation.objects
            if api_object.kind not in ("Pod", "ResourceClaim") or holder_of(api_object) not in asked
        ]
        self.faults = tuple(fault for api_object in others if (fault := _put(self.world, api_object)))
        """What is wrong with objects that nobody can read; they count as absent, as in the controller."""
        self._slices = tuple(
            read_as(api_object.spec, SliceSpec, where=name_of(api_object))
            for api_object in situation.objects
            if _is_readable_slice(api_object)
        )
        for driver in sorted(
            {resource_slice.driver for resource_slice in self._slices if resource_slice.driver.endswith(driver_name(""))}
            - self.world.classes.keys()
        ):
            # As the controller offers one for each driver of ours.
            spec = msgspec.to_builtins(built_in_class(driver))
            built_in = ApiObject(api_version="resource.k8s.io/v1", kind="DeviceClass", metadata={"name": driver}, spec=spec)
            _put(self.world, built_in)
        self._nodes = self._all_nodes(situation)

    def answer_all(self, wanted: Sequence[ApiObject]) -> tuple[DryAnswer, ...]:
        """Answer the pods with their claims, then the other claims.

        Errors: raises ContractError for one that nobody can read.
        """
        claims = {place_of(api_object): api_object for api_object in wanted if api_object.kind == "ResourceClaim"}
        for claim in claims.values():
            self._store(claim, status=claim.status)
        answers: list[DryAnswer] = []
        used: set[tuple[str, str]] = set()
        for pod in (Pod(api_object) for api_object in wanted if api_object.kind == "Pod"):
            claims_of_pod = pod.spec.resource_claims
            used |= {(pod.ref.namespace, resource_claim.claim_name) for resource_claim in claims_of_pod if resource_claim.claim_name}
            answer = self._answer_pod(pod)
            if answer is not None:
                answers.append(answer)
        for place_, claim in claims.items():
            if place_ not in used:
                answers.append(self._answer_claim(claim))
        return tuple(answers)

    def _answer_pod(self, wanted: Pod) -> DryAnswer | None:
        """Answer a pod; None for one that has no claim to allocate."""
        pod, shown = self._with_claims(wanted)
        namespace = pod.ref.namespace
        plan = pre_filter(pod, lambda name: self._claim(namespace, name), waits_for_immediate=False)
        if isinstance(plan, Blocked):
            return DryAnswer(name=pod.shown, condition="Unschedulable", reasons=plan.reasons)
        if not plan.pending:
            return None
        claims = [
            _Claim(
                shown.get(pod_claim.name, f"{namespace}/{pod_claim.name}"),
                pod_claim.claim,
                self._wishes(pod_claim.claim),
            )
            for pod_claim in plan.pending
        ]
        named = wanted.spec.node_name
        if named and named not in self._nodes:
            return self._unknown_node(pod.shown, named)
        return self._answer(pod.shown, claims, (named,) if named else self._nodes, pod=pod, plan=plan)

    def _answer_claim(self, wanted: ApiObject) -> DryAnswer:
        claim = self._store(wanted)
        asked = _Claim(f"{claim.owner.namespace}/{claim.owner.name}", claim, self._wishes(claim))
        named = claim.metadata.annotations.get(NODE_ANNOTATION, "")
        if named and named not in self._nodes:
            return self._unknown_node(claim.shown, named)
        nodes = self.world.nodes_for(claim)
        return self._answer(claim.shown, [asked], self._nodes if nodes is self.world.nodes() else nodes)

    def _answer(
        self, name: str, claims: Sequence[_Claim], nodes: Sequence[str], *, pod: Pod | None = None, plan: PodPlan | None = None
    ) -> DryAnswer:
        """Try node after node, as the controller does."""
        wanted: list[Wanted] = [(claim.claim, claim.spec) for claim in claims]
        wrong = objection_to_claims(wanted, self.world.labels_of, self._compiler)
        outcomes: list[Outcome] = [wrong] * len(nodes[:1]) if wrong is not None else []
        for node in nodes if wrong is None else ():
            outcome = self._look(node, claims, wanted, pod, plan)
            if isinstance(outcome, Allocated):
                allocations = {claim.shown: result for claim, result in zip(claims, outcome.results, strict=True)}
                stored = tuple(
                    self._store(claim.claim.object, status={"allocation": msgspec.to_builtins(result)}).object
                    for claim, result in zip(claims, outcome.results, strict=True)
                )
                request = _request(pod, plan) if pod is not None and plan is not None else None
                return DryAnswer(name=name, condition="Allocated", node=node, allocations=allocations, stored=stored, request=request)
            outcomes.append(outcome)
        if wrong is not None:
            return DryAnswer(name=name, condition="Invalid", reasons=(wrong.reason,))
        condition, reasons = explain_nodes(nodes, outcomes)
        return DryAnswer(name=name, condition=condition, reasons=(*reasons, *self._advice(nodes, outcomes, claims, wanted)))

    def _look(self, node: str, claims: Sequence[_Claim], wanted: Sequence[Wanted], pod: Pod | None, plan: PodPlan | None) -> Outcome:
        """Judge one node: what the pod says of nodes, where its other claims are, the search, and what the pod itself asks there."""
        if pod is not None and plan is not None:
            missed = self._at_first_sight(pod, node)
            if missed is not None:
                return NoFit((missed,), 0)
            miss = look_at_node(plan, self.world.describe(node))
            if miss is not None:
                return miss.outcome
        owners = {claim.entry: claim.claim.owner.key for claim in plan.claims} if plan is not None else {}
        outcome = self._search(node, claims, wanted, wished_request(pod.object, owners) if pod is not None else None)
        if not isinstance(outcome, Allocated) or pod is None or plan is None:
            return outcome
        refused = self._own_part(node, pod, plan, outcome)
        return NoFit((refused,), outcome.steps) if refused is not None else outcome

    def _search(self, node: str, claims: Sequence[_Claim], wanted: Sequence[Wanted], wishing: PodRequest | None) -> Outcome:
        given = self._input(node, wanted)
        if wishing is None and all(claim.wishes is None for claim in claims):
            outcome = allocate(given, self._compiler, step_budget=self._budget)
        else:
            wished = [AlignedClaims(claim.claim, claim.wishes) for claim in claims]
            outcome = allocate_near(given, wished, self.world.view_of(node), self._compiler, pod=wishing, step_budget=self._budget)
        if isinstance(outcome, Allocated):
            return objection_to_results(node, wanted, outcome.results, steps=outcome.steps) or outcome
        return outcome

    def _at_first_sight(self, pod: Pod, node: str) -> Reason | None:
        """Say why the pod does not go to a node by its own word, or the node's."""
        stored = self.world.objects.get(ObjectKey("node", CLUSTER, node))
        if stored is not None and not self._is_running:
            return why_not(read_placing(pod.object), node_facts(stored.value))
        selector = node_selector(pod.object)
        if selector is None or node_matches(self.world.describe(node), None, selector, is_everywhere=False):
            return None
        return Reason(code="node-selector", message=f"node {node}: the pod asks for another node", facts={"node": node})

    def _own_part(self, node: str, pod: Pod, plan: PodPlan, outcome: Allocated) -> Reason | None:
        """Say why the node refuses what the pod itself asks beside its claims; None when it takes it, or says nothing of its machine."""
        view = self.world.view_of(node)
        request = own_request(pod.object)
        if view is None or request is None:
            return None
        taken: dict[str, list[str]] = {}
        for result in outcome.results:
            for device in devices_of(result, node):
                taken.setdefault(class_of_driver(device.driver) or "", []).append(device.device)
        who = request.owner
        view = with_devices(view, f"claim/{who.namespace}/claims-of-{who.name}/-", taken)
        answer = place(
            view, with_claims(request, pod.object, {pod_claim.entry: pod_claim.claim.owner.key for pod_claim in plan.allocated}) or request
        )
        if not isinstance(answer, Refusal):
            return None
        first = answer.reasons[0]
        return Reason(code=first.code, message=f"node {node}: {first.message}", facts=first.facts)

    def _advice(
        self, nodes: Sequence[str], outcomes: Sequence[Outcome], claims: Sequence[_Claim], wanted: Sequence[Wanted]
    ) -> tuple[Reason, ...]:
        found = nearest(nodes, outcomes)
        if found is None:
            return ()
        node, reason = found
        if any(claim.wishes is not None for claim in claims):
            return (reason,)
        given = self._input(node, wanted)
        return reason, *would_fit(given, lambda changed: allocate(changed, self._compiler, step_budget=ADVICE_STEPS, is_brief=True))

    def _input(self, node: str, wanted: Sequence[Wanted]) -> AllocationInput:
        return self.world.input_for(node, wanted, mode=self._mode)

    def _with_claims(self, pod: Pod) -> tuple[Pod, Mapping[str, str]]:
        """Store a pod as the API would have it, with the claims made that its templates and its extended resources ask for.

        Shapes: result — the pod, and for claims that were made how they are shown.
        """
        namespace = pod.ref.namespace
        admitted = admit(pod.object, uid=pod.uid or made_up_uid(pod), now=_NOW)
        for use in pod.spec.resource_claims:
            kind, name = ("ResourceClaim", use.claim_name) if use.claim_name else ("ResourceClaimTemplate", use.template_name)
            is_known = self._claim(namespace, name) is not None if use.claim_name else (namespace, name) in self._templates
            if not is_known:
                raise ContractError(
                    f"{pod.shown}: resourceClaims {use.name}: there is no {kind} {namespace}/{name}",
                    next_step="put it into the same manifest, or apply it first",
                )
        shown: dict[str, str] = {}
        wanted = wanted_claims(admitted)
        for wanted_claim in wanted:
            template = self._templates[namespace, wanted_claim.template]
            read_as(template.spec, ClaimTemplateSpec, where=f"{name_of(template)}: spec")
            self._store(claim_from_template(admitted, wanted_claim, template, now=_NOW))
            shown[wanted_claim.name] = f"{namespace}/{pod.ref.name}-{wanted_claim.entry}"
        admitted = with_claim_names(admitted, wanted)
        special = extended_claim(admitted, self.world.class_names())
        if special is not None:
            name = self._store(claim_of_pod(admitted, special, now=_NOW)).metadata.name
            shown[name] = f"{namespace}/{pod.ref.name}-extended-resources"
            admitted = with_extended_status(admitted, name, special)
        _put(self.world, admitted)
        return Pod(admitted), shown

    def _store(self, claim: ApiObject, *, status: Mapping[str, object] | None = None) -> Claim:
        """Store a claim as it would be, allocated or not."""
        given = Claim(claim)
        admitted = admit(claim, uid=given.uid or made_up_uid(given), now=_NOW)
        stored = msgspec.structs.replace(admitted, status=dict(status or {}))
        fault = _put(self.world, stored)
        if fault:
            raise ContractError(fault)
        return Claim(stored)

    def _claim(self, namespace: str, name: str) -> Claim | None:
        stored = self.world.objects.get(ObjectKey("resourceclaim", namespace, name))
        return stored.claim if stored is not None else None

    def _wishes(self, claim: Claim) -> AlignmentRequest | None:
        return read_wishes(claim.spec, claim.shown, self.world.classes)

    def _unknown_node(self, name: str, node: str) -> DryAnswer:
        known = ", ".join(self._nodes) or "none"
        reason = Reason(code="unknown-node", message=f"there is no node {node}: known are {known}", facts={"node": node})
        return DryAnswer(name=name, condition="DoesNotFit", reasons=(reason,))

    def _all_nodes(self, situation: Situation) -> tuple[str, ...]:
        """List the nodes by name: of a running system those that say so themselves, else those that are described and those that slices name."""
        if self._is_running:
            return self.world.nodes()
        names = {place_of(api_object)[1] for api_object in situation.objects if api_object.kind == "Node"}
        names |= {resource_slice.node_name for resource_slice in self._slices if resource_slice.node_name}
        names |= {device.node_name for resource_slice in self._slices for device in resource_slice.devices if device.node_name}
        return tuple(sorted(names))


def _request(pod: Pod, plan: PodPlan) -> PodRequest | None:
    """Read what a pod itself asks of its node once all its claims are allocated."""
    return with_claims(own_request(pod.object), pod.object, {claim.entry: claim.claim.owner.key for claim in plan.claims})


def _put(world: StandaloneState, api_object: ApiObject) -> str:
    """Take an object into the copies; says what is wrong with one that nobody can read, which counts as absent."""
    if api_object.kind == "ResourceClaim" and not api_object.metadata.get("uid"):
        # Out of a manifest that nobody has applied yet.
        api_object = msgspec.structs.replace(api_object, metadata={**api_object.metadata, "uid": made_up_uid(Claim(api_object))})
    try:
        world.put_object(ObjectKey(**object_parts(api_object)), Stored(1, api_object))
    except ContractError as err:
        return err.message
    return ""


def _is_readable_slice(resource_slice: ApiObject) -> bool:
    if resource_slice.kind != "ResourceSlice":
        return False
    try:
        read_as(resource_slice.spec, SliceSpec, where=name_of(resource_slice))
    except ContractError:
        return False
    return True
