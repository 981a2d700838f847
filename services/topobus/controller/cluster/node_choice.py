"""Chooses a node for a gated pod's claims: tries nodes in order and takes the first that fits, or
the best of a few.

It writes nothing. A node whose slices, ledger or inventory cause an error is skipped, logged once,
and tried again when its state changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from topobus.controller.cluster.node_rules import NodeRules, RefusedNodes
from topobus.controller.commit.node_search import CHEAP_STEPS, NodeSearch
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.result_cache import RequestShape, ResultCache
from topobus.engine.allocation.admission import has_heavy_selector
from topobus.engine.allocation.explanations import SHOWN_NODES
from topobus.engine.allocation.values import (
    Allocated,
    DeviceId,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.objects import Pod
from topobus.engine.claims.stored import ObjectKey
from topobus.engine.scheduling.decisions import (
    NodeFit,
    NodeMiss,
    PodPlan,
    filter_outcome,
    static_miss,
)
from topobus.engine.scheduling.node_fit import NodeFacts
from topobus.engine.scheduling.node_trials import nodes_compared
from topobus.engine.scheduling.pod_alignment import aligned_pod_request
from topobus.engine.scheduling.score import rank, score_node
from topobus.formats.kubernetes.pod import RESOURCE_PREFIX
from topobus.process.clock import Clock
from topobus.values.errors import ContractError, InvariantError, PeerUnavailable
from topobus.values.outcome import Reason
from topobus.values.request import PodRequest

__all__ = ["NoNodeFits", "NodeChooser"]


@dataclass(frozen=True)
class NoNodeFits:
    """The misses of the nodes that were searched first, and what would fit."""

    misses: tuple[NodeMiss, ...]
    advice: tuple[Reason, ...] = ()


class NodeChooser:
    """Chooses nodes."""

    def __init__(
        self,
        settings: ControllerSettings,
        state: ApiServerState,
        clock: Clock,
        compiler: SelectorCompiler,
        metrics: ControllerMetrics,
    ) -> None:
        self._compiler = compiler
        self._state = state
        results = ResultCache(state.stock, lambda: state.node_names, lambda: state.classes, compiler, settings.mode)
        self._search = NodeSearch(settings, clock, state, results, compiler, metrics)
        self.refusals = self._search.refusals
        """Devices that nodes refused, by the pod's uid."""

    async def choose(
        self,
        pod: Pod,
        plan: PodPlan,
        *,
        refused: RefusedNodes,
        is_brief: bool,
        is_cheap: bool,
    ) -> NodeFit | NoNodeFits | None:
        """Find a node on which all pending claims of a pod fit together and that no rule excludes
        for the pod.

        Shapes: is_brief — leave out the obstacles. is_cheap — return None where more than a short
        search is needed, counted in steps. The pod then needs a full search, since an earlier node
        than the one found may fit.
        Errors: raises ContractError for a pod that cannot be decoded.
        Order: nodes with room for what the pod requests, then those on which preemption would make
        it; of these by name.
        """
        rules = NodeRules(self._state, pod, refused=refused)
        wishing = _alignment_request(pod, plan)
        excluded = self.refusals.refused(plan.pod.uid)
        is_plain = wishing is None and self._is_plain(plan, excluded)
        shape = self._search.results.shape([pod_claim.spec for pod_claim in plan.pending]) if is_plain else None
        compared = nodes_compared(plan.pending)
        crowded: dict[str, None] = {}
        fits: list[NodeFit] = []
        failures: list[tuple[str, Exception]] = []
        has_searched = False
        spent = 0  # counted here, as other searches add to the search's own count meanwhile
        # The crowded nodes are known once the iteration arrives there.
        for name in chain(self._in_order(shape), crowded):
            try:
                at = self._state.node_facts.get(name)
                if at is None or self._static_miss(rules, plan, at) is not None:
                    continue
                if name not in crowded and rules.shortages(name):
                    # kube-scheduler would have to preempt other pods: only when no other node fits.
                    crowded[name] = None
                    continue
                outcome, steps = await self._filter_node(name, plan, excluded, shape, wishing, is_cheap=is_cheap)
                spent += steps
                if is_cheap and (isinstance(outcome, GaveUp) or spent > CHEAP_STEPS):
                    return None
                answer = filter_outcome(plan, name, outcome)
            except (PeerUnavailable, InvariantError):
                raise
            except Exception as err:  # noqa: BLE001 - boundary: one node of a choice; the others are tried
                failures.append((name, err))
                continue
            has_searched = True
            if isinstance(answer, NodeFit):
                fits.append(answer)
                if len(fits) >= compared:
                    break
            elif answer.is_everywhere:
                return NoNodeFits((answer,))
            elif is_cheap and shape is not None and isinstance(outcome, NoFit):
                # Not after a long search: another pod's search may have seen devices that were
                # freed there meanwhile.
                self._search.results.close(shape, name)
        if failures and not has_searched and isinstance(failures[0][1], ContractError):
            # The error is the same on every node, so the pod or one of its claims causes it.
            raise failures[0][1]
        for name, failure in failures:
            self._search.node_failed(name, failure)
        if fits:
            best = rank([score_node(plan, node_fit) for node_fit in fits])[0]
            return await self._brought_closer(
                next(node_fit for node_fit in fits if node_fit.node == best), plan, excluded, wishing
            )
        return NoNodeFits(()) if is_brief else await self._explain(rules, plan, excluded, wishing, is_cheap=is_cheap)

    async def still_fits(
        self, plan: PodPlan, node: str, devices: Collection[DeviceId], later: Collection[str], *, is_cheap: bool
    ) -> Allocated | GaveUp | None:
        """Check whether the chosen devices are still free, counting all intents before ours but not
        those after it (`later`).

        Shapes: result — one per pending claim, of the chosen devices, perhaps in another order;
        None when they are not free; GaveUp when a cheap search cannot find out.
        """
        at, pod = self._state.node_facts.get(node), self._state.pods.get((plan.pod.namespace, plan.pod.name))
        if at is None:
            return None
        # Another replica may intend this node for a pod that takes its room. The later of two
        # intents is withdrawn.
        if (
            pod is not None
            and pod.pod.has_gate
            and NodeRules(self._state, pod.pod, ignoring=later).why_not(at) is not None
        ):
            return None
        given = self._search.given(node, plan.pending, {}, ignoring=later)
        others = {
            candidate.id: "not chosen"
            for pool in given.pools or ()
            for candidate in pool.candidates
            if candidate.id not in devices
        }
        outcome = await self._search.search_given(
            self._search.given(node, plan.pending, others, ignoring=later), is_brief=True, is_cheap=is_cheap
        )
        return outcome if isinstance(outcome, Allocated) or (is_cheap and isinstance(outcome, GaveUp)) else None

    async def _brought_closer(
        self, fit: NodeFit, plan: PodPlan, excluded: Mapping[DeviceId, str], wishing: PodRequest | None
    ) -> NodeFit:
        outcome = Allocated(fit.results, fit.steps)
        closer = await self._search.bring_closer(fit.node, plan.pending, excluded, outcome, pod=wishing)
        return NodeFit(fit.node, closer.results, closer.steps)

    def _is_plain(self, plan: PodPlan, excluded: Mapping[DeviceId, str]) -> bool:
        """Say whether these claims differ in nothing from others with the same specs, and can be
        searched at once.
        """
        return not excluded and all(
            pod_claim.wishes is None
            and not has_heavy_selector(pod_claim.spec, self._compiler)
            and self._state.stock.is_new(
                ObjectKey("resourceclaim", plan.pod.namespace, pod_claim.name), pod_claim.claim.owner
            )
            for pod_claim in plan.pending
        )

    def _in_order(self, shape: RequestShape | None) -> Iterable[str]:
        """List the nodes to try, by name."""
        return self._state.node_names if shape is None else self._search.results.open_nodes(shape)

    def _static_miss(self, rules: NodeRules, plan: PodPlan, at: NodeFacts) -> NodeMiss | None:
        """Return why a node is excluded without a search."""
        return static_miss(plan, at.node, refused=rules.why_not(at))

    async def _filter_node(
        self,
        node: str,
        plan: PodPlan,
        excluded: Mapping[DeviceId, str],
        shape: RequestShape | None,
        wishing: PodRequest | None,
        *,
        is_cheap: bool,
    ) -> tuple[Outcome, int]:
        """Search one node, or return the cached result for claims of this shape.

        Returns the steps taken now as well.
        """
        if shape is None:
            outcome = await self._search.search(
                node, plan.pending, excluded, pod=wishing, is_brief=True, is_cheap=is_cheap
            )
            return outcome, outcome.steps
        return await self._search.search_cached(node, plan.pending, shape, excluded, is_cheap=is_cheap)

    async def _explain(
        self,
        rules: NodeRules,
        plan: PodPlan,
        excluded: Mapping[DeviceId, str],
        wishing: PodRequest | None,
        *,
        is_cheap: bool,
    ) -> NoNodeFits | None:
        """Return what the nodes lack now, first those on which only devices are missing, and the
        nearest miss.

        None when that takes more than short searches.
        """
        unfit: list[NodeMiss] = []
        searched: list[NodeMiss] = []
        for name in self._state.node_names:
            at = self._state.node_facts[name]
            missed = self._static_miss(rules, plan, at)
            if missed is not None:
                unfit.append(missed if missed.unavailable else NodeMiss(name, NoFit(rules.reasons(at), 0)))
            elif len(searched) < SHOWN_NODES:
                outcome = await self._search_guarded(name, plan, excluded, wishing, is_cheap=is_cheap)
                if is_cheap and isinstance(outcome, GaveUp):
                    # The cached misses of this shape have no reasons, and finding them costs a
                    # search.
                    return None
                searched.append(NodeMiss(name, outcome))
            else:
                searched.append(NodeMiss(name, NoFit((), 0)))
        nodes, outcomes = [node_miss.node for node_miss in searched], [node_miss.outcome for node_miss in searched]
        advice = await self._search.advise(nodes, outcomes, plan.pending, excluded, pod=wishing)
        return NoNodeFits((*searched, *unfit), advice)

    async def _search_guarded(
        self, node: str, plan: PodPlan, excluded: Mapping[DeviceId, str], wishing: PodRequest | None, *, is_cheap: bool
    ) -> Outcome:
        """Search one node to explain what it lacks. A failed search is reported as the node's
        fault.
        """
        try:
            return await self._search.search(node, plan.pending, excluded, pod=wishing, is_cheap=is_cheap)
        except (PeerUnavailable, InvariantError):
            raise
        except Exception as err:  # noqa: BLE001 - boundary: one node of an explanation, which reports the failure
            return NoFit((self._search.node_failed(node, err).reason,), 0)


def _alignment_request(pod: Pod, plan: PodPlan) -> PodRequest | None:
    """Read the pod's own alignment request. None when it has none.

    Errors: raises ContractError.
    """
    if not any(key.startswith(RESOURCE_PREFIX) for key in pod.metadata.annotations):
        return None
    return aligned_pod_request(pod, {claim.entry: claim.claim.owner.key for claim in plan.claims})
