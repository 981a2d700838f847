"""The planner: finds a node for a pod by asking the nodes themselves, and commits at the best one.

When there are several nodes, each is first asked for a dry run. A node that does not answer is
unknown, not refused: it is listed as silent. The operation id is passed on to the node, so a
repeated request to any replica gives the same answer.

Many plans may arrive at once. Plans over several nodes run few at a time, in turn by requester,
after plans for one node. Requests of the reconcile loops to nodes never wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from topobus.bus.asks.heavy_lane import Workload
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.node_state import NodeState
from topobus.engine.scheduling.rank import holding_nodes, rank_nodes
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import NodeAnswer, PlanReply, PlanRequest
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.node_text import first_of
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import PodRequest

__all__ = ["Planner"]

# A person does not read more names than these. The count is given, and it matters more.
_SHOWN_SILENT = 16
_SHOWN_NODES = 64
# Weight of the plans over several nodes that wait for their turn: what four at a time finish within
# a requester's ten seconds on a fleet that answers.
_MOST_WAITING = 256
# Characters of a node's error text that a condition shows.
_MAX_ERROR = 500


class Planner:
    """Answers PLAN."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: NodeState,
        metrics: ControllerMetrics,
        is_whole: Callable[[], bool],
    ) -> None:
        """`is_whole` returns whether the copies in `state` are complete."""
        self._settings = settings
        self._is_whole = is_whole
        self._bus = runtime.bus
        self._state = state
        self._metrics = metrics
        # Separate limits: a burst of plans must not delay claim allocation and pod scheduling.
        self._free = asyncio.Semaphore(settings.parallel_asks)
        self._free_for_plans = asyncio.Semaphore(settings.parallel_asks)
        self._silent: dict[str, str] = {}
        """Nodes that did not answer, which one log line names together."""

    async def begin(self) -> None:
        """Answer plans from now on.

        A replica in the queue group without a complete copy would take plans away from those that have
        one, so it begins when its copies are complete.
        """
        workload = Workload(
            is_heavy=self._asks_many,
            at_once=self._settings.parallel_plans,
            most_waiting=_MOST_WAITING,
            busy=lambda retry_after_s: PlanReply(retry_after_s=retry_after_s),
        )
        await self._bus.answer(catalogue.PLAN, self.plan, workload=workload, node=CLUSTER)

    async def plan(self, request: PlanRequest) -> PlanReply:
        """Place a pod on the best node, or return each node's refusal.

        Errors: raises PeerUnavailable when no node is known at all, and while the copies are read again.
        """
        if not self._is_whole():
            raise PeerUnavailable("the controller is reading its copies again", retry_after_s=self._settings.retry_s)
        reply = await self._plan(request)
        self.log_silent_nodes()
        outcome = "placed" if reply.chosen is not None and isinstance(reply.chosen.result, Placement) else "refused"
        self._metrics.plans.labels("dry-run" if request.is_dry_run else outcome).inc()
        get_logger().info(
            "pod.planned",
            pod=str(request.pod.owner),
            outcome=outcome,
            node=reply.chosen.node if reply.chosen is not None else "",
            asked=len(reply.answers),
            silent=list(reply.silent_nodes[:_SHOWN_SILENT]),
            silent_count=len(reply.silent_nodes),
            is_dry_run=request.is_dry_run,
            op_id=request.op_id,
        )
        return reply

    async def _plan(self, request: PlanRequest) -> PlanReply:
        known_nodes = self._state.nodes()
        if not known_nodes:
            raise PeerUnavailable("no node has published a machine yet", next_step="is discovery running?")
        if request.node and request.node not in known_nodes:
            reason = Reason(
                code="unknown-node",
                message=f"there is no node {request.node}: known are {first_of(known_nodes, _SHOWN_NODES)}",
                facts={"node": request.node, "known": known_nodes[:_SHOWN_NODES]},
            )
            return PlanReply(answers=(NodeAnswer(node=request.node, result=Refusal(reasons=(reason,))),))
        nodes = self._nodes_to_ask(request)
        if len(nodes) == 1:
            reply = await self._ask(nodes[0], request.op_id, request.pod, is_dry_run=request.is_dry_run)
            if reply is None:
                return PlanReply(silent_nodes=nodes)
            chosen = reply if isinstance(reply.result, Placement) else None
            return PlanReply(
                chosen=chosen,
                answers=(NodeAnswer(node=reply.node, result=reply.result, decision_id=reply.decision_id),),
            )
        return await self._choose(nodes, request)

    def _nodes_to_ask(self, request: PlanRequest) -> tuple[str, ...]:
        known_nodes = self._state.nodes()
        # A node without a machine can place nothing: its topology does not know the node's
        # hardware. An inventory alone proves no node, since any device service can publish one.
        able = tuple(node for node in known_nodes if node in self._state.machines) or known_nodes
        return self._where_placed(request.pod) or ((request.node,) if request.node else able)

    def _asks_many(self, request: PlanRequest) -> bool:
        return len(self._nodes_to_ask(request)) > 1

    def _where_placed(self, pod: PodRequest) -> tuple[str, ...]:
        """Name the node that holds the pod already: asking again must not place it twice."""
        return tuple(
            node for node, ledger in sorted(self._state.ledgers.items()) if pod.owner.key in ledger.allocations
        )[:1]

    async def _choose(self, nodes: tuple[str, ...], request: PlanRequest) -> PlanReply:
        async with asyncio.TaskGroup() as group:
            tries = {
                node: group.create_task(self._ask(node, f"{request.op_id}-try-{node}", request.pod, is_dry_run=True))
                for node in nodes
            }
        replies = {node: reply for node, task in tries.items() if (reply := task.result()) is not None}
        results = {node: reply.result for node, reply in replies.items()}
        silent = [node for node in nodes if node not in replies]
        chosen: PlaceReply | None = None
        # A node may know before we do that it holds the pod, as our copy of its ledger may be
        # behind. Then only that node is asked, and it repeats its earlier answer.
        for node in holding_nodes(results)[:1] or rank_nodes(results):
            committed = (
                replies[node]
                if request.is_dry_run
                else await self._ask(node, request.op_id, request.pod, is_dry_run=False)
            )
            if committed is None:
                # It may have been placed there: neither done nor undone. Another node now could
                # place the pod twice, so this plan ends here.
                silent.append(node)
                break
            results[node] = committed.result
            replies[node] = committed
            if isinstance(committed.result, Placement):
                chosen = committed
                break
        answers = tuple(
            NodeAnswer(node=node, result=results[node], decision_id=replies[node].decision_id)
            for node in nodes
            if node in results and node not in silent
        )
        return PlanReply(chosen=chosen, answers=answers, silent_nodes=tuple(sorted(silent)))

    async def ask_node(
        self,
        node: str,
        op_id: str,
        pod: PodRequest,
        *,
        is_dry_run: bool,
        besides: Mapping[str, tuple[str, ...]] | None = None,
    ) -> PlaceReply | None:
        """Ask one node for a reconcile loop.

        None when the node does not answer, or when its answer leaves open whether something was
        placed. A node that refuses the request, or whose answer to a dry run cannot be read, counts
        as a refusal, so that other nodes are still tried.

        Shapes: besides — for a dry run: devices to count as held, by class.
        """
        return await self._ask(node, op_id, pod, is_dry_run=is_dry_run, besides=besides, free=self._free)

    async def _ask(
        self,
        node: str,
        op_id: str,
        pod: PodRequest,
        *,
        is_dry_run: bool,
        besides: Mapping[str, tuple[str, ...]] | None = None,
        free: asyncio.Semaphore | None = None,
    ) -> PlaceReply | None:
        async with free or self._free_for_plans:
            try:
                return await self._bus.ask(
                    catalogue.PLACE,
                    PlaceRequest(op_id=op_id, pod=pod, is_dry_run=is_dry_run, besides=dict(besides or {})),
                    timeout_s=self._settings.ask_timeout_s,
                    node=node,
                )
            except PeerUnavailable as err:
                self._silent[node] = str(err)
                return None
            except Exception as err:  # noqa: BLE001 - boundary: one node of a plan; its failure must not stop the other nodes or the loop
                get_logger().warning("node.failed", node=node, op_id=op_id, error=str(err), kind=type(err).__name__)
                # An error with a code comes from the node, and was sent before anything was placed.
                # Without one the answer itself could not be read.
                is_refused = isinstance(err, TopobusError) and "code" in err.facts
                if not is_refused and not is_dry_run:
                    return None
                reason = Reason(
                    code="node-failed",
                    message=f"the node cannot serve this: {str(err)[:_MAX_ERROR]}",
                    facts={"node": node},
                )
                return PlaceReply(decision_id="", node=node, result=Refusal(reasons=(reason,)))

    def log_silent_nodes(self) -> None:
        """Log which nodes were silent since the last line, all in one line."""
        if self._silent:
            nodes = sorted(self._silent)
            shown, first = nodes[:_SHOWN_SILENT], self._silent[nodes[0]]
            get_logger().warning("nodes.silent", count=len(nodes), nodes=shown, error=first)
            self._silent = {}
