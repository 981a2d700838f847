"""Applies kube-scheduler's rules to the nodes for one pod: which would accept it, and which only
after preempting other pods.

The effect of other pods is counted once, when the rules are made. Pods for which a node is intended
count as if they were there. The rules themselves are pure (`engine/scheduling`). This module
collects their input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial

from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.engine.claims.objects import Pod
from topobus.engine.scheduling.kube_rules.placement_rules import PlacementRules, count_rules, read_placement
from topobus.engine.scheduling.kube_rules.preferences import points_of, read_preferences
from topobus.engine.scheduling.kube_rules.scheduler_reasons import scheduled_message, uncovered_reasons
from topobus.engine.scheduling.kube_rules.volume_rules import PodVolumes, read_pod_volumes
from topobus.engine.scheduling.node_fit import NodeFacts, Placing, read_placing, why_not
from topobus.engine.scheduling.node_resources import Shortage, needs_of, why_no_room
from topobus.values.outcome import Reason
from topobus.values.resource_names import CLASS_RESOURCE_PREFIX

__all__ = ["NodeRules"]


class NodeRules:
    """The rules for one pod in the present state of the cluster."""

    def __init__(
        self, state: ApiServerState, pod: Pod, *, refused: Sequence[str] = (), ignoring: Collection[str] = ()
    ) -> None:
        """Read the pod, and count the other pods.

        Shapes: refused — nodes on which kube-scheduler could not place the pod, the last one last;
        ignoring — uids of claims whose intents are ignored here.
        Errors: raises ContractError for a pod that cannot be read.
        """
        self._state = state
        self._pod = pod
        self._refused = refused
        self._ignoring = ignoring
        self.placing: Placing = read_placing(pod.object)
        self._needs = needs_of(pod.object.spec)
        self._by_claims = _served_by_claims(state)
        # A bound pod is not checked again for its own node.
        self._placement = self._counted() if not self.placing.node_name else None
        self._volumes = self._looked_up() if not self.placing.node_name else None
        self._short: dict[str, tuple[Shortage, ...]] = {}

    @property
    def blockers(self) -> tuple[Reason, ...]:
        """What the pod needs before any node can serve it: its volumes."""
        return self._volumes.blockers if self._volumes is not None else ()

    @cached_property
    def points(self) -> dict[str, int]:
        """The pod's preference points by node. Empty when it prefers nothing.

        Errors: raises ContractError.
        """
        wishes = read_preferences(self._pod.object, self.placing)
        if not wishes.is_any or self.placing.node_name:
            return {}
        assumed = self._state.intended_nodes(without=self._pod.uid, ignoring=self._ignoring)
        return points_of(wishes, self._state.node_facts, self._state.placed.groups(assumed))

    def why_not(self, at: NodeFacts) -> Reason | None:
        """Return the first rule by which kube-scheduler would keep the pod off a node.

        None when there is none.
        """
        return next(self._reasons(at), None)

    def reasons(self, at: NodeFacts) -> tuple[Reason, ...]:
        """Return all rules by which kube-scheduler would keep the pod off a node."""
        return tuple(self._reasons(at))

    def shortages(self, node: str) -> tuple[Shortage, ...]:
        """List what a node has too little of.

        For a node without a `why_not`, preemption may help.
        """
        if node not in self._short:
            intended = self._intended_on(node)
            self._short[node] = self._state.room.shortages(
                node, self._needs, besides=intended, by_claims=self._by_claims
            )
        return self._short[node]

    def _reasons(self, at: NodeFacts) -> Iterator[Reason]:
        node = at.node.name
        reason = why_not(self.placing, at)
        if reason is not None:
            yield reason
        if self._placement is not None:
            yield from self._placement.reasons(at)
        if self._volumes is not None:
            yield from self._volumes.reasons(at.node, self._intended_on(node))
        if not self.placing.node_name:
            no_room = why_no_room(node, self.shortages(node))
            if no_room is not None:
                yield no_room
        if node in self._refused:
            # kube-scheduler's message is about its last try.
            uncovered = uncovered_reasons(scheduled_message(self._pod.object)) if node == self._refused[-1] else ()
            detail = f": {'; '.join(uncovered)}, which Topobus does not look at before" if uncovered else ""
            yield Reason(
                code="unschedulable",
                message=f"node {node}: kube-scheduler could not place the pod there{detail}",
                facts={"node": node},
            )

    def _intended_on(self, node: str) -> Collection[Key]:
        return self._state.intended_on(node, without=self._pod.uid, ignoring=self._ignoring)

    def _looked_up(self) -> PodVolumes | None:
        """Read the pod's volumes. None when no volume uses a claim."""
        state, key = self._state, (self._pod.metadata.namespace, self._pod.metadata.name)
        volumes = state.volumes.volumes_of(key)
        if not volumes:
            return None
        assumed = state.intended_nodes(without=self._pod.uid, ignoring=self._ignoring)
        return read_pod_volumes(key, self._pod.uid, volumes, state.volumes, assumed)

    def _counted(self) -> PlacementRules | None:
        """Count the other pods that affect this one. None when no rule depends on them."""
        state, placement = self._state, read_placement(self._pod.object)
        if placement.asks_nothing and not state.placed.has_anti_affinity:
            return None
        assumed = state.intended_nodes(without=self._pod.uid, ignoring=self._ignoring)
        groups = state.placed.groups(assumed)
        return count_rules(
            placement, self.placing, state.node_facts, groups, partial(state.placed.ports_on, assumed=assumed)
        )


def _served_by_claims(state: ApiServerState) -> frozenset[str]:
    """Name the extended resources that device classes serve: by the name that a class gives itself,
    and by the implicit name of every class.
    """
    names = {
        device_class.extended_resource_name
        for device_class in state.classes.values()
        if device_class.extended_resource_name
    }
    return frozenset(names | {f"{CLASS_RESOURCE_PREFIX}{name}" for name in state.classes})
