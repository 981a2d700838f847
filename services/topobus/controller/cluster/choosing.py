"""Where a gated pod's claims are to be allocated: nodes in order, each looked at by the one engine, the first that fits, or the best of a few.

Flows in: a pod with its plan, the copy of the cluster. Flows out: a fit, or what each node lacks. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from topobus.contracts.codec import encode
from topobus.contracts.kubernetes import limits
from topobus.contracts.messages import ApiObject
from topobus.controller.config import ControllerSettings
from topobus.controller.core.answers import SHOWN_NODES
from topobus.controller.core.cluster_world import ClusterWorld
from topobus.controller.core.misses import KnownMisses
from topobus.controller.core.nearness import Wished
from topobus.controller.core.node_fit import NodeFacts, Placing, preference_of, read_placing, why_not
from topobus.controller.core.scheduling import NodeFit, NodeMiss, PodPlan, judge_node, look_at_node
from topobus.controller.core.scheduling_score import rank, score_node
from topobus.controller.core.values import Allocated, AllocationInput, DeviceId, Fault, Mode, NoFit, Outcome
from topobus.controller.searching import Searcher
from topobus.domain.outcome import Reason

__all__ = ["Chooser", "NoNodeFits"]

# Where alternatives are asked for, nodes differ in how good they are: so many that fit are compared.
_COMPARED = 16


@dataclass(frozen=True)
class NoNodeFits:
    """What stands in the way, the nodes that were searched first."""

    misses: tuple[NodeMiss, ...]


class Chooser:
    """Chooses nodes."""

    def __init__(self, settings: ControllerSettings, world: ClusterWorld, searcher: Searcher) -> None:
        self._mode = settings.mode
        self._world = world
        self._searcher = searcher
        self._misses = KnownMisses()

    async def choose(
        self, pod: ApiObject, plan: PodPlan, *, refused: Collection[str], excluded: Mapping[DeviceId, str]
    ) -> NodeFit | NoNodeFits:
        """Find a node on which all pending claims of a pod fit together and onto which kube-scheduler would let the pod.

        Shapes:  refused — nodes on which it could not place the pod; excluded — devices that they must not get now, and why.
        Errors:  raises ContractError for a pod that nobody can read.
        Order:   most preferred nodes first (preferred node affinity), then by name.
        """
        placing = read_placing(pod)
        unfit: list[NodeMiss] = []
        searched: list[NodeMiss] = []
        fits: list[NodeFit] = []
        has_alternatives = any(request.first_available for one in plan.pending for request in one.spec.devices.requests)
        for at in self._in_order(placing):
            missed = self._at_first_sight(placing, plan, at, refused)
            if missed is not None:
                unfit.append(missed)
                continue
            found = (
                judge_node(plan, at.node.name, await self._look(at.node.name, plan, excluded)) if plan.pending else NodeFit(at.node.name)
            )
            if isinstance(found, NodeFit):
                fits.append(found)
                if not has_alternatives or len(fits) >= _COMPARED:
                    break
            else:
                searched.append(found)
                if found.is_everywhere:
                    return NoNodeFits((found,))
        if fits:
            best = rank([score_node(plan, one) for one in fits])[0]
            return next(one for one in fits if one.node == best)
        for index, one in enumerate(searched[:SHOWN_NODES]):
            if isinstance(one.outcome, NoFit):
                # What is remembered may be another claim's miss, of some time ago: people are told how it is for this one, now.
                searched[index] = NodeMiss(one.node, await self._search(one.node, plan, excluded))
        return NoNodeFits((*searched, *unfit))

    async def still_fits(self, plan: PodPlan, node: str, devices: Collection[DeviceId], later: Collection[str]) -> bool:
        """Say whether the very devices that were chosen may be had when all intents of before ours are counted, and those of after (`later`) are not."""
        if node not in self._world.nodes:
            return False
        given = self._input(node, plan, {}, ignoring=later)
        others = {one.id: "not chosen" for pool in given.pools or () for one in pool.candidates if one.id not in devices}
        return isinstance(await self._searcher.search(self._input(node, plan, others, ignoring=later)), Allocated)

    def _in_order(self, placing: Placing) -> list[NodeFacts]:
        nodes = self._world.nodes.values()
        return sorted(nodes, key=lambda at: (-preference_of(placing, at.node), at.node.name))

    def _at_first_sight(self, placing: Placing, plan: PodPlan, at: NodeFacts, refused: Collection[str]) -> NodeMiss | None:
        """Rule a node out without a search."""
        why = why_not(placing, at)
        if why is None and at.node.name in refused:
            message = f"node {at.node.name}: kube-scheduler could not place the pod there"
            why = Reason(code="unschedulable", message=message, facts={"node": at.node.name})
        return look_at_node(plan, at.node, refused=why)

    async def _look(self, node: str, plan: PodPlan, excluded: Mapping[DeviceId, str]) -> Outcome:
        """Search one node, unless the like of these claims is known not to fit there."""
        is_plain = self._mode is Mode.CORRECTED and not excluded and all(one.wishes is None for one in plan.pending)
        asked = tuple(encode(one.spec) for one in plan.pending)
        freedom = self._world.supply.freedom_of(node)
        known = self._misses.find(asked, node, freedom) if is_plain else None
        if known is not None:
            return known
        outcome = await self._search(node, plan, excluded)
        if isinstance(outcome, Allocated):
            problem = next((str(one) for result in outcome.results for one in limits.check_allocation(result)), None)
            if problem is not None:
                return Fault(Reason(code="result-too-large", message=f"node {node}: {problem}"), outcome.steps)
        if is_plain and isinstance(outcome, NoFit):
            self._misses.remember(asked, node, freedom, outcome)
        return outcome

    async def _search(self, node: str, plan: PodPlan, excluded: Mapping[DeviceId, str]) -> Outcome:
        given = self._input(node, plan, excluded)
        if all(one.wishes is None for one in plan.pending):
            return await self._searcher.search(given)
        wished = [Wished(one.object, one.wishes) for one in plan.pending]
        return await self._searcher.search_near(given, wished, self._world.view_of(node))

    def _input(self, node: str, plan: PodPlan, excluded: Mapping[DeviceId, str], *, ignoring: Collection[str] = ()) -> AllocationInput:
        wanted = [(one.object, one.spec) for one in plan.pending]
        return self._world.input_for(node, wanted, mode=self._mode, excluded=excluded, ignoring=ignoring)
