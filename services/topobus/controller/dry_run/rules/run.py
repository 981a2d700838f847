"""A dry run: where claims would be allocated among given nodes, slices and classes, or why not,
without any write.

The state is the controller's own `StandaloneState`, and so are the admission checks, the
construction of the search's input, the search, the limits and the order of nodes, so the answer is
what the controller would do with the same objects. An allocation is stored in the state before the
next claim is answered. A dry run does not know what the controller holds in memory only: nodes that
refused a moment ago, and quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from topobus.controller.dry_run.rules.situation import (
    DryAnswer,
    Situation,
    holder_of,
    made_up_uid,
    place_of,
    pod_holder_of,
    readable_slices,
)
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.alignment.planning.node_view import with_devices
from topobus.engine.alignment.planning.placement import place
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.results import SHARE_PREFIX
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.suggestions import ADVICE_STEPS, would_fit
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    DeviceId,
    Fault,
    Mode,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.claim_admission import objection_to_claims
from topobus.engine.claims.extended_resources import claim_of_pod, extended_claim, with_extended_status
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import claim_from_template, wanted_claims, with_claim_names
from topobus.engine.scheduling.aligned_allocation import allocate_near, read_alignment_request
from topobus.engine.scheduling.closer_devices import bring_closer
from topobus.engine.scheduling.decisions import (
    Blocked,
    NodeFit,
    NodeMiss,
    PodClaim,
    PodPlan,
    enough_nodes,
    filter_node,
    pre_filter,
)
from topobus.engine.scheduling.node_fit import (
    node_facts,
    node_selector,
    preference_of,
    read_placing,
    selector_objection,
    why_not,
)
from topobus.engine.scheduling.node_trials import (
    aligned_claims,
    failed_node,
    is_aligned,
    nearest_miss,
    nodes_compared,
    refusal_of,
    specs_of,
    within_limits,
)
from topobus.engine.scheduling.pod_alignment import aligned_pod_request, own_request, with_claims
from topobus.engine.scheduling.score import rank, score_node
from topobus.engine.shapes.in_slices import cpus_of_shape, parts_of
from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.built_in_classes import built_in_class_object
from topobus.formats.kubernetes.objects import (
    NODE_ANNOTATION,
    admit,
    name_of,
    object_parts,
)
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    ClaimTemplateSpec,
    GrantedDevice,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.dra_names import class_of_device, group_of_class
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import PodRequest

__all__ = ["DryRun"]

# A time as an API server would set it. A dry run has no clock and keeps the given order.
_NOW = "2026-01-01T00:00:00Z"


class _Claim(NamedTuple):
    """A claim to be allocated."""

    shown: str
    """Its name in the answer: `default/fast`. For a claim made from a template, the names of the
    pod and the entry."""
    claim: Claim
    wishes: AlignmentRequest | None

    @property
    def spec(self) -> ClaimSpec:
        """What the claim asks for."""
        return self.claim.spec


class _Fit(NamedTuple):
    """A node on which the claims fit."""

    node: NodeFit
    own: Placement | None = None
    """What it would place for the pod itself."""


class DryRun:
    """The copies, and what the answers so far have allocated."""

    def __init__(self, situation: Situation, compiler: SelectorCompiler) -> None:
        self.state = StandaloneState()
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
            self.state.put_machine(machine)
        self.state.note_silence(
            {
                (alignment.node, device_class): since
                for alignment in situation.alignments
                for device_class, since in alignment.unheard_classes.items()
            }
        )
        for inventory in situation.inventories:
            self.state.put_inventory(inventory)
        for alignment in situation.alignments:
            self.state.put_alignment(alignment.node, alignment)
        for ledger in situation.ledgers:
            # A wanted claim may be stored and allocated already. Its own devices must not count as
            # held by another.
            kept = {
                key: allocation for key, allocation in ledger.allocations.items() if str(allocation.owner) not in asked
            }
            self.state.put_ledger(msgspec.structs.replace(ledger, allocations=kept))
        others = [
            api_object
            for api_object in situation.objects
            if api_object.kind not in ("Pod", "ResourceClaim") or holder_of(api_object) not in asked
        ]
        self.faults = tuple(fault for api_object in others if (fault := _put(self.state, api_object)))
        """What is wrong with objects that cannot be read. They count as absent, as in the
        controller."""
        self._slices = readable_slices(situation.objects)
        sliced = {
            class_of_device(resource_slice.driver, device.name)
            for resource_slice in self._slices
            for device in resource_slice.devices
        }
        for device_class in sorted(name for name in sliced if name and name != SHAPE_CLASS):
            # The controller has a built-in class for each device class.
            if group_of_class(device_class) not in self.state.classes:
                _put(self.state, built_in_class_object(device_class))
        self._nodes = self._all_nodes(situation)
        self._shares = 0

    def answer_all(self, wanted: Sequence[ApiObject]) -> tuple[DryAnswer, ...]:
        """Answer the pods with their claims, then the other claims.

        Errors: raises ContractError for a wanted object that cannot be read.
        """
        claims = {place_of(api_object): api_object for api_object in wanted if api_object.kind == "ResourceClaim"}
        for claim in claims.values():
            self._store(claim, status=claim.status)
        answers: list[DryAnswer] = []
        used: set[tuple[str, str]] = set()
        for pod in (Pod(api_object) for api_object in wanted if api_object.kind == "Pod"):
            claims_of_pod = pod.spec.resource_claims
            used |= {
                (pod.ref.namespace, resource_claim.claim_name)
                for resource_claim in claims_of_pod
                if resource_claim.claim_name
            }
            answer = self._answer_pod(pod)
            if answer is not None:
                answers.append(answer)
        for place_, claim in claims.items():
            if place_ not in used:
                answers.append(self._answer_claim(claim))
        return tuple(answers)

    def _answer_pod(self, wanted: Pod) -> DryAnswer | None:
        """Answer a pod. None for a pod that has no claim to allocate."""
        pod, shown = self._with_claims(wanted)
        namespace = pod.ref.namespace
        plan = pre_filter(pod, lambda name: self._claim(namespace, name))
        if isinstance(plan, Blocked):
            return DryAnswer(name=pod.shown, condition="Unschedulable", reasons=plan.reasons)
        if not plan.pending:
            return None
        claims = [
            _Claim(
                shown.get(pod_claim.name, f"{namespace}/{pod_claim.name}"),
                pod_claim.claim,
                self._alignment_of(pod_claim.claim),
            )
            for pod_claim in plan.pending
        ]
        named = wanted.spec.node_name
        if named and named not in self._nodes:
            return self._unknown_node(pod.shown, named)
        return self._answer(pod.shown, claims, (named,) if named else self._in_order(pod), pod=pod, plan=plan)

    def _in_order(self, pod: Pod) -> Sequence[str]:
        """List the nodes to try: in a cluster the most preferred ones first, by the pod's node
        affinity, then by name.
        """
        if self._is_running:
            return self._nodes
        placing = read_placing(pod.object)
        return sorted(self._nodes, key=lambda node: (-preference_of(placing, self.state.describe(node)), node))

    def _answer_claim(self, wanted: ApiObject) -> DryAnswer:
        claim = self._store(wanted)
        asked = _Claim(f"{claim.owner.namespace}/{claim.owner.name}", claim, self._alignment_of(claim))
        named = claim.metadata.annotations.get(NODE_ANNOTATION, "")
        if named and named not in self._nodes:
            return self._unknown_node(claim.shown, named)
        nodes = self.state.nodes_for(claim)
        return self._answer(claim.shown, [asked], self._nodes if nodes is self.state.nodes() else nodes)

    def _answer(
        self,
        name: str,
        claims: Sequence[_Claim],
        nodes: Sequence[str],
        *,
        pod: Pod | None = None,
        plan: PodPlan | None = None,
    ) -> DryAnswer:
        """Try node after node, as the controller does."""
        wrong = objection_to_claims(specs_of(claims), self.state.labels_of, self._compiler)
        if wrong is not None:
            return DryAnswer(name=name, condition="Invalid", reasons=(wrong.reason,))
        wishing = aligned_pod_request(pod, _owners(plan.claims)) if pod is not None and plan is not None else None
        fits: list[_Fit] = []
        outcomes: list[Outcome] = []
        enough = self._enough(nodes, plan)
        # kube-scheduler searches until so many nodes fit, and a fault on one of the others ends the
        # attempt.
        looked_at = enough_nodes(len(nodes)) if self._mode is Mode.COMPATIBLE else enough
        for node in nodes:
            answer = self._filter_node(node, claims, wishing, pod, plan)
            if isinstance(answer, Fault) and not answer.is_local:
                return DryAnswer(name=name, condition="Invalid", reasons=(answer.reason,))
            if isinstance(answer, _Fit):
                fits.append(answer)
                if len(fits) >= max(enough, looked_at):
                    break
            else:
                outcomes.append(answer)
        if fits:
            fits = fits[:enough]
            scores = (
                [score_node(plan, fit, placement=own, numa_of=self.state.numa_nodes_of) for fit, own in fits]
                if plan is not None
                else []
            )
            best = rank(scores)[0] if scores else fits[0].node.node
            return self._allocated(name, claims, next(fit.node for fit in fits if fit.node.node == best), pod, plan)
        condition, reasons = explain_nodes(nodes, outcomes)
        miss, nearest_node = nearest_miss(nodes, outcomes, claims, wishing)
        advice = would_fit(self._input(nearest_node, claims), self._advise) if nearest_node else ()
        return DryAnswer(name=name, condition=condition, reasons=(*reasons, *miss, *advice))

    def _enough(self, nodes: Sequence[str], plan: PodPlan | None) -> int:
        """Return among how many fitting nodes the best one is chosen: the first for a claim without
        a pod, for a pod as many as the scheduler of its home compares.
        """
        if plan is None:
            return 1
        return enough_nodes(len(nodes)) if self._is_running else nodes_compared(plan.pending)

    def _allocated(
        self, name: str, claims: Sequence[_Claim], fit: NodeFit, pod: Pod | None, plan: PodPlan | None
    ) -> DryAnswer:
        """Store the claims' allocations on a node, and return the answer."""
        results = [self._with_own_shares(result) for result in fit.results]
        allocations = {claim.shown: result for claim, result in zip(claims, results, strict=True)}
        stored = tuple(
            self._store(claim.claim.object, status={"allocation": msgspec.to_builtins(result)}).object
            for claim, result in zip(claims, results, strict=True)
        )
        request = (
            with_claims(own_request(pod), pod, _owners(plan.claims)) if pod is not None and plan is not None else None
        )
        table = self.state.stock.table_of(fit.node)
        parts = {
            granted.device: (*parts_of(shape), *cpus_of_shape(shape))
            for result in results
            for granted in result.devices.results
            if (device := DeviceId.of(granted)) in table.parts
            for shape in (table.candidates[table.places[device]].device,)
        }
        return DryAnswer(
            name=name,
            condition="Allocated",
            node=fit.node,
            allocations=allocations,
            parts=parts,
            stored=stored,
            request=request,
        )

    def _with_own_shares(self, result: AllocationResult) -> AllocationResult:
        """Number shares through all answers: each search starts from the first number, and two
        shares of one device must differ.
        """
        granted: list[GrantedDevice] = []
        for device in result.devices.results:
            if device.share_id is not None:
                device = msgspec.structs.replace(device, share_id=f"{SHARE_PREFIX}{self._shares}")
                self._shares += 1
            granted.append(device)
        return msgspec.structs.replace(result, devices=msgspec.structs.replace(result.devices, results=tuple(granted)))

    def _filter_node(
        self, node: str, claims: Sequence[_Claim], wishing: PodRequest | None, pod: Pod | None, plan: PodPlan | None
    ) -> _Fit | Outcome:
        """Filter one node: by the pod's placement rules, by its other claims, by the search, and by
        what the pod itself requests there.
        """
        try:
            if pod is None or plan is None:
                outcome = self._search(node, claims, wishing)
                return _Fit(NodeFit(node, outcome.results)) if isinstance(outcome, Allocated) else outcome
            objection = self._static_objection(pod, node)
            if objection is not None:
                return NoFit((objection,), 0)
            judged = filter_node(plan, self.state.describe(node), lambda *_: self._search(node, claims, wishing))
            return judged.outcome if isinstance(judged, NodeMiss) else self._with_own_part(judged, pod, plan)
        except ContractError:
            raise  # the claim's own fault
        except Exception as err:  # noqa: BLE001 - boundary: one node; the others are tried
            return failed_node(node, err)

    def _search(self, node: str, claims: Sequence[_Claim], wishing: PodRequest | None) -> Outcome:
        given = self._input(node, claims)
        if is_aligned(claims, wishing):
            view = self.state.view_of(node)
            outcome = allocate_near(
                given, aligned_claims(claims), view, self._compiler, pod=wishing, step_budget=self._budget
            )
        else:
            outcome = allocate(given, self._compiler, step_budget=self._budget)
            view = self.state.view_of(node) if self._mode is not Mode.COMPATIBLE else None
            if isinstance(outcome, Allocated) and view is not None:
                outcome = bring_closer(given, outcome, view, self._compiler)
        return within_limits(node, claims, outcome)

    def _static_objection(self, pod: Pod, node: str) -> Reason | None:
        """Return why the pod's placement rules, or the node's taints, exclude the node."""
        stored = self.state.objects.get(ObjectKey("node", CLUSTER, node))
        if stored is not None and not self._is_running:
            return why_not(read_placing(pod.object), node_facts(stored.value))
        return selector_objection(node_selector(pod), self.state.describe(node))

    def _with_own_part(self, fit: NodeFit, pod: Pod, plan: PodPlan) -> _Fit | Outcome:
        """Place on the node's view what the pod itself requests besides its claims.

        A node that published no machine is not checked.
        """
        view = self.state.view_of(fit.node)
        request = own_request(pod)
        if view is None or request is None:
            return _Fit(fit)
        devices = fit.devices(self.state.stock.table_of(fit.node).parts)
        view = with_devices(view, f"claim/{request.owner.namespace}/claims-of-{request.owner.name}/-", devices)
        answer = place(view, with_claims(request, pod, _owners(plan.allocated)) or request)
        return refusal_of(fit.node, answer).outcome if isinstance(answer, Refusal) else _Fit(fit, answer)

    def _advise(self, changed: AllocationInput) -> Outcome:
        return allocate(changed, self._compiler, step_budget=ADVICE_STEPS, is_brief=True)

    def _input(self, node: str, claims: Sequence[_Claim]) -> AllocationInput:
        return self.state.input_for(node, specs_of(claims), mode=self._mode)

    def _with_claims(self, pod: Pod) -> tuple[Pod, Mapping[str, str]]:
        """Store a pod as the API would have it, with the claims of its templates and its extended
        resources.

        Shapes: result — the pod, and how the claims that were made are shown.
        """
        namespace = pod.ref.namespace
        admitted = admit(pod.object, uid=pod.uid or made_up_uid(pod), now=_NOW)
        for use in pod.spec.resource_claims:
            kind, name = (
                ("ResourceClaim", use.claim_name) if use.claim_name else ("ResourceClaimTemplate", use.template_name)
            )
            is_known = (
                self._claim(namespace, name) is not None if use.claim_name else (namespace, name) in self._templates
            )
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
        special = extended_claim(admitted, self.state.class_names())
        if special is not None:
            name = self._store(claim_of_pod(admitted, special, now=_NOW)).metadata.name
            shown[name] = f"{namespace}/{pod.ref.name}-extended-resources"
            admitted = with_extended_status(admitted, name, special)
        _put(self.state, admitted)
        return Pod(admitted), shown

    def _store(self, claim: ApiObject, *, status: Mapping[str, object] | None = None) -> Claim:
        """Store a claim as it would be, allocated or not."""
        given = Claim(claim)
        admitted = admit(claim, uid=given.uid or made_up_uid(given), now=_NOW)
        stored = msgspec.structs.replace(admitted, status=dict(status or {}))
        fault = _put(self.state, stored)
        if fault:
            raise ContractError(fault)
        return Claim(stored)

    def _claim(self, namespace: str, name: str) -> Claim | None:
        stored = self.state.objects.get(ObjectKey("resourceclaim", namespace, name))
        return stored.claim if stored is not None else None

    def _alignment_of(self, claim: Claim) -> AlignmentRequest | None:
        return read_alignment_request(claim.spec, claim.shown, self.state.classes)

    def _unknown_node(self, name: str, node: str) -> DryAnswer:
        nodes = ", ".join(self._nodes) or "none"
        reason = Reason(
            code="unknown-node", message=f"there is no node {node}: known are {nodes}", facts={"node": node}
        )
        return DryAnswer(name=name, condition="DoesNotFit", reasons=(reason,))

    def _all_nodes(self, situation: Situation) -> tuple[str, ...]:
        """List the nodes by name: of a running system those that published a machine or an
        inventory, else those that are described and those that slices name.
        """
        if self._is_running:
            return self.state.nodes()
        names = {place_of(api_object)[1] for api_object in situation.objects if api_object.kind == "Node"}
        names |= {resource_slice.node_name for resource_slice in self._slices if resource_slice.node_name}
        names |= {
            device.node_name for resource_slice in self._slices for device in resource_slice.devices if device.node_name
        }
        return tuple(sorted(names))


def _owners(claims: Sequence[PodClaim]) -> dict[str, str]:
    """Name the owner keys of a pod's claims by its `resourceClaims` entries."""
    return {pod_claim.entry: pod_claim.claim.owner.key for pod_claim in claims}


def _put(state: StandaloneState, api_object: ApiObject) -> str:
    """Put an object into the copies.

    Returns what is wrong with an object that cannot be read, which counts as absent.
    """
    if api_object.kind == "ResourceClaim" and not api_object.metadata.get("uid"):
        # It comes from a manifest that was not applied yet.
        api_object = msgspec.structs.replace(
            api_object, metadata={**api_object.metadata, "uid": made_up_uid(Claim(api_object))}
        )
    try:
        state.put_object(ObjectKey(**object_parts(api_object)), Stored(1, api_object))
    except ContractError as err:
        return err.message
    return ""
