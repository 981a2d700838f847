"""Applies to the nodes, for one pod, the rules that are checked before devices are allocated: a
node's own terms, room, and the nodes that kube-scheduler has refused.

Pods for which a node is intended count as if they were there. The rules themselves are pure
(`engine/scheduling`). This module collects their input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.engine.claims.attempts import MAX_REFUSED_NODES
from topobus.engine.claims.extended_resources import served_resources
from topobus.engine.claims.objects import Pod
from topobus.engine.scheduling.node_fit import NodeFacts, read_placing, why_not
from topobus.engine.scheduling.node_resources import Shortage, needs_of, why_no_room
from topobus.values.outcome import Reason

__all__ = ["NodeRules", "RefusedNodes"]


@dataclass(frozen=True)
class RefusedNodes:
    """The nodes on which kube-scheduler could not place a pod in this round of tries, and how many
    rounds there were before, as in `Attempt`.
    """

    names: tuple[str, ...] = ()
    rounds: int = 0

    def next_round(self) -> RefusedNodes:
        """Begin another round, in which all nodes may be tried."""
        return RefusedNodes(rounds=self.rounds + 1)

    def why_not(self, node: str) -> Reason | None:
        """Return why a node is not tried in this round. None when it may be."""
        if node in self.names:
            why = "kube-scheduler could not place the pod there"
        elif len(self.names) >= MAX_REFUSED_NODES:
            # No more are remembered, and without this the round would never end.
            why = f"kube-scheduler could not place the pod on {len(self.names)} other nodes, the next try is later"
        else:
            return None
        return Reason(code="unschedulable", message=f"node {node}: {why}", facts={"node": node})


_NONE = RefusedNodes()


class NodeRules:
    """The rules for one pod in the present state of the cluster."""

    def __init__(
        self, state: ApiServerState, pod: Pod, *, refused: RefusedNodes = _NONE, ignoring: Collection[str] = ()
    ) -> None:
        """Read the pod.

        Shapes: ignoring — uids of claims whose intents are ignored here.
        Errors: raises ContractError for a pod that cannot be read.
        """
        self._state = state
        self._pod = pod
        self._refused = refused
        self._ignoring = ignoring
        self._placing = read_placing(pod.object)
        self._needs = needs_of(pod.object.spec)
        self._by_claims = served_resources(state.classes)
        self._short: dict[str, tuple[Shortage, ...]] = {}

    def why_not(self, at: NodeFacts) -> Reason | None:
        """Return the first rule that keeps the pod off a node. None when there is none."""
        return next(self._reasons(at), None)

    def reasons(self, at: NodeFacts) -> tuple[Reason, ...]:
        """Return all rules that keep the pod off a node."""
        return tuple(self._reasons(at))

    def shortages(self, node: str) -> tuple[Shortage, ...]:
        """List what a node has too little of.

        For a node without a `why_not`, preemption may help.
        """
        if node not in self._short:
            intended = self._state.intended_on(node, without=self._pod.uid, ignoring=self._ignoring)
            self._short[node] = self._state.room.shortages(
                node, self._needs, besides=intended, by_claims=self._by_claims
            )
        return self._short[node]

    def _reasons(self, at: NodeFacts) -> Iterator[Reason]:
        node = at.node.name
        reason = why_not(self._placing, at)
        if reason is not None:
            yield reason
        if not self._placing.node_name:
            # A bound pod is not checked again for its own node.
            no_room = why_no_room(node, self.shortages(node))
            if no_room is not None:
                yield no_room
        refused = self._refused.why_not(node)
        if refused is not None:
            yield refused
