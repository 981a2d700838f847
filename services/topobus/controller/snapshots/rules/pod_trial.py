"""One pod tried on the nodes of a snapshot, as kube-scheduler's filters do: the rules of the node and
of other pods, room, volumes, then the devices of its claims.

Source: the order of kube-scheduler's default filters, 1.36.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import msgspec

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Key, Place, Plain
from topobus.controller.snapshots.rules.snapshot import keeps_counters
from topobus.controller.snapshots.rules.volume_index import VOLUME_KINDS
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, Fault, GaveUp, Mode, NoFit, Outcome
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.claim_admission import Wanted, objection_to_claims
from topobus.engine.claims.extended_resources import claim_of_pod, extended_claim, extended_claim_name, served_resources
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.decisions import Blocked, PodPlan, pre_filter, static_miss
from topobus.engine.scheduling.kube_rules.placement_rules import PlacementRules, count_rules, read_placement
from topobus.engine.scheduling.kube_rules.volume_rules import PodVolumes, read_pod_volumes
from topobus.engine.scheduling.node_fit import NodeFacts, Placing, read_placing, why_not
from topobus.engine.scheduling.node_resources import needs_of, why_no_room
from topobus.values.outcome import Reason

__all__ = ["PodTrial", "is_global", "reasons_of"]

# A pod that waits has no such time: it is only written into a claim that is never stored.
_NOW = "2026-01-01T00:00:00Z"
# Work of one search, in steps: kube-scheduler gives up after ten seconds on all nodes.
_STEPS = 20_000


class PodTrial:
    """The rules and the claims of one pod that has no node."""

    def __init__(self, view: ClusterView, key: Key, compiler: SelectorCompiler) -> None:
        """Read a pod of the view and its claims.

        Errors: raises ContractError for a pod that cannot be read.
        """
        pod = view.pod(key)
        assert pod is not None
        self.view, self.key, self.pod, self._compiler = view, key, pod, compiler
        # The node that a pod names is its node only once it is bound, which it is not here.
        self.placing: Placing = read_placing(pod.object)
        self._needs = needs_of(pod.object.spec)
        self.plan: PodPlan | Blocked = pre_filter(
            pod,
            lambda name: view.claim((key[0], name)),
            has_own_notes=False,
        )

    @cached_property
    def volume_blockers(self) -> tuple[Reason, ...]:
        """What is not ready of the pod's volumes, whatever the node."""
        return self._volumes.blockers if self._volumes is not None else ()

    @cached_property
    def objection(self) -> Reason | None:
        """What an API server or every node would refuse of the pod's claims."""
        fault = objection_to_claims(self.wanted(""), self.view.labels_of, self._compiler)
        return fault.reason if fault is not None else None

    def wanted(self, node: str) -> tuple[Wanted, ...]:
        """List the claims that are to be allocated for the pod on a node, the one for its extended
        resources last.
        """
        plan = self.plan
        pending = [(claim.claim, claim.spec) for claim in plan.pending] if isinstance(plan, PodPlan) else []
        special = self._special(node)
        return (*pending, *([(special, special.spec)] if special is not None else ()))

    def rule_reasons(self, at: NodeFacts) -> Iterator[Reason]:
        """Return what keeps the pod off a node apart from devices, in the order of kube-scheduler's
        filters.
        """
        node = at.node.name
        reason = why_not(self.placing, at)
        if reason is not None:
            yield reason
        short = self.view.room.shortages(node, self._needs, by_claims=self._served)
        no_room = why_no_room(node, [replace(shortage, is_final=True) for shortage in short])
        rules = list(self._rules.reasons(at)) if self._rules is not None else []
        yield from (each for each in rules if each.code == "host-port-taken")
        if no_room is not None:
            yield no_room
        if self._volumes is not None:
            yield from self._volumes.reasons(at.node)
        yield from (each for each in rules if each.code != "host-port-taken")

    def search(self, node: str, *, is_brief: bool = False, is_newer: bool = False) -> Outcome:
        """Find devices for the pod's claims on a node, or why there are none.

        Shapes: is_newer — as a kube-scheduler does that gives the counters of refused devices back.
        """
        plan = self.plan
        if isinstance(plan, PodPlan):
            missed = static_miss(plan, self.view.describe(node), refused=None)
            if missed is not None:
                return missed.outcome
        if not self.wanted(node):
            return Allocated((), 0)
        given = replace(
            self.view.input_for(node, self.wanted(node), mode=Mode.COMPATIBLE),
            keeps_counters=keeps_counters(self.view.server) and not is_newer,
        )
        return allocate(given, self._compiler, step_budget=_STEPS, is_brief=is_brief)

    def fits(self, node: str) -> bool:
        """Say whether kube-scheduler would bind the pod to a node."""
        return self._allocated(node) is not None

    def placed(self, node: str) -> dict[Place, Plain] | None:
        """Return the edits that place the pod on a node, with what its claims get there. None when it
        does not fit.
        """
        outcome = self._allocated(node)
        if outcome is None:
            return None
        plain = self.view.objects["Pod", self.key]
        edits: dict[Place, Plain] = {("Pod", self.key): {**plain, "spec": {**plain["spec"], "nodeName": node}}}
        for (claim, _), result in zip(self.wanted(node) if outcome.results else (), outcome.results, strict=True):
            key = (claim.owner.namespace, claim.owner.name)
            edits["ResourceClaim", key] = {
                "apiVersion": claim.object.api_version,
                "kind": "ResourceClaim",
                "metadata": {**claim.object.metadata, "namespace": key[0]},
                "spec": claim.object.spec,
                "status": {"allocation": msgspec.to_builtins(result)},
            }
        return edits

    def _allocated(self, node: str) -> Allocated | None:
        """Return what the pod's claims get on a node. None when kube-scheduler would not bind it there."""
        at = self.view.node_facts.get(node)
        if (
            at is None
            or not isinstance(self.plan, PodPlan)
            or self.volume_blockers
            or next(self.rule_reasons(at), None) is not None
        ):
            return None
        outcome = self.search(node, is_brief=True)
        return outcome if isinstance(outcome, Allocated) else None

    @cached_property
    def _served(self) -> frozenset[str]:
        """Name the extended resources that device classes serve."""
        return served_resources(self.view.classes) if self.view.serves_resources else frozenset()

    def _special(self, node: str) -> Claim | None:
        """Make the claim that kube-scheduler would make for the pod's extended resources. None where
        it has one, no class serves them, or the node has them from a device plugin.
        """
        if not self.view.serves_resources or extended_claim_name(self.pod.object):
            return None
        offered = frozenset(name for name in self.served_resources if self.view.room.offers(node, name))
        if offered not in self._specials:
            names = [each for each in self.view.class_names() if each.resource not in offered]
            special = extended_claim(self.pod.object, names)
            made = claim_of_pod(self.pod.object, special, now=_NOW) if special is not None else None
            self._specials[offered] = Claim(made) if made is not None else None
        return self._specials[offered]

    @cached_property
    def served_resources(self) -> tuple[str, ...]:
        """The extended resources that the pod asks for and device classes serve."""
        return tuple(name for name in self._needs.amounts if name in self._served)

    @cached_property
    def _specials(self) -> dict[frozenset[str], Claim | None]:
        return {}

    @cached_property
    def _rules(self) -> PlacementRules | None:
        """Count the other pods that affect this one. None when no rule depends on them."""
        view, placement = self.view, read_placement(self.pod.object)
        if placement.asks_nothing and not view.placed.has_anti_affinity:
            return None
        return count_rules(placement, self.placing, view.node_facts, view.placed.groups(), view.placed.ports_on)

    @cached_property
    def _volumes(self) -> PodVolumes | None:
        """Read the pod's volumes. None when no volume uses a claim, or volumes could not be read."""
        if any(unseen.kind in VOLUME_KINDS for unseen in self.view.unseen):
            return None
        volumes = self.view.volumes.volumes_of(self.key)
        return read_pod_volumes(self.key, self.pod.uid, volumes, self.view.volumes) if volumes else None


def is_global(outcome: Outcome) -> bool:
    """Say whether an outcome on one node ends the attempt on all of them."""
    return isinstance(outcome, Fault) and not outcome.is_local


def reasons_of(node: str, outcome: Outcome) -> tuple[Reason, ...]:
    """Return why an outcome is no fit. Empty for a fit."""
    match outcome:
        case NoFit():
            return outcome.reasons
        case Fault():
            return (outcome.reason,)
        case GaveUp():
            message = (
                f"node {node}: the search gave up after {outcome.steps} steps: neither a fit nor a refusal is known"
            )
            return (Reason(code="gave-up", message=message, facts={"node": node, "steps": outcome.steps}),)
        case _:
            return ()
