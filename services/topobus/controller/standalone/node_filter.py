"""Filters and scores nodes for a pod: where its claims are usable or can be allocated, and what
each node would place for the pod itself.

Only `place` has a node hold something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence

import msgspec

from topobus.controller.commit.allocator import (
    Allocator,
    Member,
    member,
)
from topobus.controller.commit.node_search import CHEAP_STEPS, LONGEST_S
from topobus.controller.commit.refusal_backoff import RefusalBackoff
from topobus.controller.config import ControllerSettings
from topobus.controller.planner import Planner
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import (
    Allocated,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.claims.objects import Pod
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.decisions import (
    Blocked,
    NodeFit,
    NodeMiss,
    PodPlan,
    enough_nodes,
    explain_misses,
    filter_outcome,
    pre_filter,
    static_miss,
)
from topobus.engine.scheduling.node_fit import node_selector, selector_objection
from topobus.engine.scheduling.node_trials import refusal_of
from topobus.engine.scheduling.pod_alignment import aligned_pod_request, own_request
from topobus.engine.scheduling.score import rank, score_node
from topobus.formats.messages import catalogue
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import Owner, PodRequest

__all__ = ["NodeFilter"]

# Code with which a node refuses a pod that it holds already.
_HELD = "already-placed"
# Of a pod that fits on hundreds of nodes: on so many its devices are exchanged for closer ones, 1
# to 2 ms per node, before the nodes are compared.
_BROUGHT_CLOSER = 16


class NodeFilter:
    """Filter and Score over all nodes."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        allocator: Allocator,
        planner: Planner,
    ) -> None:
        self._bus = runtime.bus
        self._clock = runtime.clock
        self._state = state
        self._allocator = allocator
        self._planner = planner
        self._log = get_logger()
        self._refused: RefusalBackoff[str] = RefusalBackoff(runtime.clock, settings.retry_s)
        """Nodes that refused a pod a moment ago, by the pod's key."""

    @property
    def spent(self) -> int:
        """The steps of all searches so far."""
        return self._allocator.spent

    def drop_refusals(self, is_done: Callable[[Hashable], bool]) -> None:
        """Forget which nodes refused pods that are done."""
        self._refused.drop(is_done)

    def excluded_s(self, key: ObjectKey) -> float:
        """Say after how many seconds a pod may be given a node or a device that it must not get now.

        Infinite where none is excluded.
        """
        return min(self._refused.wait_s([key]), self._allocator.refusals.wait_s(self._state.users.keys(key)))

    async def filter_nodes(
        self,
        key: ObjectKey,
        plan: PodPlan,
        pod: Pod,
        wanted: PodRequest | None,
        placed: str | None,
        *,
        is_cheap: bool = False,
    ) -> tuple[dict[str, tuple[NodeFit, Placement | None]], list[NodeMiss], bool] | None:
        """Filter all nodes. Returns those that fit, best first, with what each would place for the
        pod itself, and why the others do not fit.

        Shapes: is_cheap — None is returned, and no node asked, when the pod's claims need more than
        a short search.
        """
        members = self.members(plan)
        wishing = aligned_pod_request(pod, {claim.entry: claim.claim.owner.key for claim in plan.claims})
        searched = await self._search(key, plan, pod, placed, members, wishing, is_cheap=is_cheap)
        if searched is None:
            return None
        fits, misses = searched
        placements: dict[str, Placement] = {}
        by_name = {node_fit.node: node_fit for node_fit in fits}
        is_due = False
        if wanted is not None and fits:
            misses_before = len(misses)
            placements, is_due = await self._ask(fits, wanted, misses)
            if plan.claims and not plan.pending and not is_due:
                # The node accepted the pod before the claims took their devices. Unless this
                # refusal is recorded, they would be deallocated and allocated there again and
                # again.
                for miss in misses[misses_before:]:
                    if isinstance(miss.outcome, NoFit):
                        self._refused.add(key, [miss.node], summarize(miss.outcome.reasons))
            fits = [node_fit for node_fit in fits if node_fit.node in placements]
        scores = [
            score_node(plan, node_fit, placement=placements.get(node_fit.node), numa_of=self._state.numa_nodes_of)
            for node_fit in fits
        ]
        return {name: (by_name[name], placements.get(name)) for name in rank(scores)}, misses, is_due

    async def _search(
        self,
        key: ObjectKey,
        plan: PodPlan,
        pod: Pod,
        placed: str | None,
        members: Sequence[Member],
        wishing: PodRequest | None,
        *,
        is_cheap: bool,
    ) -> tuple[list[NodeFit], list[NodeMiss]] | None:
        """Find the nodes on which a pod's claims are usable or can be allocated, and why the others
        miss.
        """
        refused = self._refused.refused(key)
        fits: list[NodeFit] = []
        misses: list[NodeMiss] = []
        searched: set[str] = set()
        nodes = self._candidates(pod, misses) if placed is None else [placed]
        end = self._clock.monotonic() + LONGEST_S
        spent = self._allocator.spent
        for node in nodes:
            why = (
                Reason(code="refused-by-node", message=f"node {node}: {refused[node]}", facts={"node": node})
                if node in refused
                else None
            )
            missed = static_miss(plan, self._state.describe(node), refused=why)
            if missed is None:
                outcome: Outcome = Allocated((), 0) if not members else GaveUp(0)
                if members and self._clock.monotonic() < end:
                    outcome = await self._allocator.search_on(node, members, pod=wishing, is_cheap=is_cheap)
                if is_cheap and (isinstance(outcome, GaveUp) or self._allocator.spent - spent > CHEAP_STEPS):
                    return None
                if isinstance(outcome, Allocated) and members and len(fits) < _BROUGHT_CLOSER:
                    outcome = await self._allocator.brought_closer(node, members, outcome, pod=wishing)
                judged = filter_outcome(plan, node, outcome)
                if isinstance(judged, NodeFit):
                    fits.append(judged)
                    if len(fits) >= enough_nodes(len(nodes)):
                        break
                    continue
                missed = judged
                searched.add(node)
            misses.append(missed)
            if missed.is_everywhere:
                misses = [missed]
                break
        return fits, misses if fits else await self._as_it_is_now(misses, searched, members, wishing)

    async def nodes_without(
        self, key: ObjectKey, left_out: Collection[str]
    ) -> tuple[tuple[str, ...], tuple[Reason, ...]]:
        """List the nodes, best first, on which a pod could run without these of its
        `resourceClaims` entries, and why when there are none.

        Errors: raises ContractError for a pod that cannot be read.
        """
        whole = self._state.objects[key].value
        rest = [
            resource_claim
            for resource_claim in whole.spec.get("resourceClaims") or []
            if resource_claim.get("name") not in left_out
        ]
        pod = Pod(msgspec.structs.replace(whole, spec={**whole.spec, "resourceClaims": rest}))
        claims = self._state.users.claims(key)
        plan = pre_filter(pod, lambda name: claims[name].claim if name in claims else None)
        if isinstance(plan, Blocked):
            return (), plan.reasons
        wanted = own_request(pod)
        placed = self.node_of(wanted.owner) if wanted is not None else None
        looked = await self.filter_nodes(key, plan, pod, wanted, placed)
        fits, misses = (looked[0], looked[1]) if looked is not None else ({}, [])
        return tuple(fits), () if fits else explain_misses(misses)[1]

    async def _as_it_is_now(
        self, misses: list[NodeMiss], searched: Collection[str], members: Sequence[Member], wishing: PodRequest | None
    ) -> list[NodeMiss]:
        """Repeat the searches whose results users will read, for a result may come from the
        cache.
        """
        again = [miss for miss in misses if miss.node in searched]
        outcomes = [node_miss.outcome for node_miss in again]
        await self._allocator.refresh([node_miss.node for node_miss in again], outcomes, members, pod=wishing)
        newest = {
            node_miss.node: NodeMiss(node_miss.node, outcome)
            for node_miss, outcome in zip(again, outcomes, strict=True)
        }
        return [newest.get(miss.node, miss) for miss in misses]

    async def _ask(
        self, fits: Sequence[NodeFit], wanted: PodRequest, misses: list[NodeMiss]
    ) -> tuple[dict[str, Placement], bool]:
        """Ask the nodes what they would place for the pod itself.

        Those that refuse or do not answer become misses.
        """
        async with asyncio.TaskGroup() as group:
            asked = {
                node_fit.node: group.create_task(
                    self._planner.ask_node(
                        node_fit.node,
                        f"schedule-{wanted.owner.uid}-try-{node_fit.node}",
                        wanted,
                        is_dry_run=True,
                        besides=node_fit.devices(self._state.stock.table_of(node_fit.node).parts),
                    )
                )
                for node_fit in fits
            }
        self._planner.log_silent_nodes()
        placements: dict[str, Placement] = {}
        is_due = False
        for node, task in asked.items():
            reply = task.result()
            if reply is None:
                is_due = True
                reason = Reason(
                    code="node-silent",
                    message=f"node {node} did not answer in time: unknown, not refused",
                    facts={"node": node},
                )
                misses.append(NodeMiss(node, NoFit((reason,), 0)))
            elif isinstance(reply.result, Refusal) and _is_held(reply.result):
                placements[node] = Placement(containers=())  # by another replica, a moment ago
            elif isinstance(reply.result, Refusal):
                misses.append(refusal_of(node, reply.result))
            else:
                placements[node] = reply.result
        return placements, is_due

    async def place(self, key: ObjectKey, stored: Stored, node: str, wanted: PodRequest) -> Placement | Refusal | None:
        """Have the node's ledger take what the pod itself asks.

        None when the node does not answer. A node that refuses is left out for a while.
        """
        ledger = self._state.ledgers.get(node)
        # A refusal grows the ledger's sequence, so a later try is another operation; after a crash
        # the same one is repeated, or the ledger shows the pod.
        op_id = f"schedule-{wanted.owner.uid}-{stored.revision}-{ledger.sequence if ledger is not None else 0}"
        reply = await self._planner.ask_node(node, op_id, wanted, is_dry_run=False)
        if reply is None:
            return None
        if isinstance(reply.result, Refusal) and _is_held(reply.result):
            entry = await self._bus.get(catalogue.LEDGER, node=node)
            if entry is not None and wanted.owner.key in entry.value.allocations:
                return Placement(containers=())
        if isinstance(reply.result, Refusal):
            why = summarize(reply.result.reasons)
            self._log.info("pod.refused", pod=stored.shown, node=node, why=why)
            self._refused.add(key, [node], why)
        return reply.result

    async def advise(self, members: Sequence[Member], misses: Sequence[NodeMiss]) -> tuple[Reason, ...]:
        """Name the nearest miss of a pod's claims, and what would fit there instead."""
        nodes, outcomes = [miss.node for miss in misses], [miss.outcome for miss in misses]
        return await self._allocator.advise_members(nodes, outcomes, members)

    def members(self, plan: PodPlan) -> list[Member]:
        """List the pod's claims that are to be allocated, as input of the search."""
        keys = [ObjectKey("resourceclaim", plan.pod.namespace, pod_claim.name) for pod_claim in plan.pending]
        return [member(key, self._state.objects[key], self._state.classes) for key in keys]

    def _candidates(self, pod: Pod, misses: list[NodeMiss]) -> list[str]:
        """List the nodes that the pod's own rules allow. The others become misses."""
        selector = node_selector(pod)
        candidates: list[str] = []
        for name in self._state.nodes():
            reason = selector_objection(selector, self._state.describe(name))
            if reason is None:
                candidates.append(name)
            else:
                misses.append(NodeMiss(name, NoFit((reason,), 0)))
        return candidates

    def node_of(self, owner: Owner) -> str | None:
        """Name the node whose ledger holds the pod already, after a crash before its binding."""
        return next(
            (node for node, ledger in sorted(self._state.ledgers.items()) if owner.key in ledger.allocations), None
        )


def _is_held(refusal: Refusal) -> bool:
    """Say whether a node refuses a pod because it holds it already."""
    return any(reason.code == _HELD for reason in refusal.reasons)
