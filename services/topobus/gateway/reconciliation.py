"""Freeing what device plugin allocations hold: that API has no deallocate, so kubelet's PodResources tell what is in use.

Flows in: the ledger and kubelet's list. Flows out: releases. An allocation is let go only when two looks in a row, apart by the period, find none of its
devices in use and it was in the ledger at both: kubelet lists a pod only some time after it has allocated for it. No answer means no release, and a
kubelet that has just started is not believed yet.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import grpc
import grpc.aio

from topobus.domain.errors import TopobusError
from topobus.domain.ledger import Allocation
from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.core.holdings import idle_allocations
from topobus.gateway.node_state import NodeState
from topobus.gateway.sockets import dialling, identity
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.runtime.logging import get_logger

__all__ = ["Reconciler"]

_CALL_LIMIT_S = 5.0

_Mark = tuple[str, str, int]
"""Tells an allocation from a later one of the same devices."""


class Reconciler:
    """Looks at PodResources, period after period."""

    def __init__(self, socket: Path, state: NodeState, asks: NodeAsks, deadlines: DeadlineSettings) -> None:
        self._socket = socket
        self._state = state
        self._asks = asks
        self._deadlines = deadlines

    async def run(self) -> None:
        """Look for ever. Nothing happens where kubelet has no such socket."""
        loop = asyncio.get_running_loop()
        kubelet, appeared_at = identity(self._socket), loop.time()
        idle_before: frozenset[_Mark] = frozenset()
        used_before: set[_Mark] = set()
        while True:
            await asyncio.sleep(self._deadlines.reconcile_s)
            if identity(self._socket) != kubelet:
                kubelet, appeared_at = identity(self._socket), loop.time()
                used_before.clear()
            in_use = await self._in_use()
            if in_use is None or self._state.ledger is None or not self._state.is_connected:
                idle_before = frozenset()
                continue
            idle = idle_allocations(self._state.ledger, in_use)
            # A kubelet that has just started lists no pods yet: believe it when it has listed this very allocation before, or after a while.
            is_settled = loop.time() - appeared_at >= self._deadlines.kubelet_grace_s
            for one in idle:
                mark = self._mark(one)
                if mark in idle_before and (is_settled or mark in used_before):
                    await self._release(one)
            idle_before = frozenset(map(self._mark, idle))
            used_before = {
                mark for mark in map(self._mark, self._state.ledger.allocations.values()) if mark in used_before or mark not in idle_before
            }

    def _mark(self, allocation: Allocation) -> _Mark:
        return (allocation.owner.key, allocation.decision_id, self._state.times_handed_out(allocation.owner))

    async def _in_use(self) -> dict[str, frozenset[str]] | None:
        """Resource to the ids that pods have; None when kubelet does not tell."""
        if identity(self._socket) is None:
            return None
        async with dialling(self._socket) as channel:
            try:
                answer = await rpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest(), timeout=_CALL_LIMIT_S)
            except grpc.aio.AioRpcError as err:
                get_logger().warning("pod-resources.failed", code=err.code().name, error=err.details())
                return None
        in_use: dict[str, set[str]] = {}
        for pod in answer.pod_resources:
            for container in pod.containers:
                for entry in container.devices:
                    in_use.setdefault(entry.resource_name, set()).update(entry.device_ids)
        return {resource: frozenset(ids) for resource, ids in in_use.items()}

    async def _release(self, allocation: Allocation) -> None:
        try:
            # Kubelet may allocate the same devices in this very moment, and the same devices have the same owner: only what we looked at is meant.
            await self._asks.release(f"reconcile-{uuid.uuid4().hex}", allocation.owner, only=allocation.decision_id)
        except TopobusError as err:
            get_logger().warning("release.failed", owner=allocation.owner.key, error=str(err))
        else:
            get_logger().info("allocation.released", owner=allocation.owner.key, why="kubelet lists no pod with its devices")
