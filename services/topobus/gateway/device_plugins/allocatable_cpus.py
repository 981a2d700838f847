"""Reads from kubelet which CPUs its own CPU manager may give to containers: with the static policy
all but the reserved ones, else none.

A kubelet's answer does not change while it runs, so each kubelet is asked once through
PodResources. One that does not answer is asked again with the next claim.
Source: kubelet 1.36 cm/cpumanager/policy_{none,static}.go, GetAllocatableCPUs.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from topobus.gateway.device_plugins.sockets import dialling, identity
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.process.logging import get_logger
from topobus.values.idset import CpuSet

__all__ = ["AllocatableCpus"]

# In seconds. A claim waits for it, and kubelet answers from memory.
_CALL_LIMIT_S = 1.0


class AllocatableCpus:
    """The CPUs that the kubelet of this node may give."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._seen: tuple[tuple[int, int, int], CpuSet] | None = None

    async def read(self) -> CpuSet:
        """Return kubelet's CPUs.

        Empty when it does not answer. What it has already given is known from other sources.
        """
        kubelet = identity(self._socket)
        if kubelet is None:
            return CpuSet()
        if self._seen is not None and self._seen[0] == kubelet:
            return self._seen[1]
        async with dialling(self._socket) as channel:
            try:
                answer = await rpc.PodResourcesListerStub(channel).GetAllocatableResources(
                    pb.AllocatableResourcesRequest(), timeout=_CALL_LIMIT_S
                )
            except grpc.aio.AioRpcError as err:
                get_logger().warning("kubelet-cpus.unread", code=err.code().name, error=err.details())
                return CpuSet()
        cpus = CpuSet.of(cpu for cpu in answer.cpu_ids if 0 <= cpu <= CpuSet.MAX_ID)
        self._seen = kubelet, cpus
        get_logger().info("kubelet-cpus.read", cpus=str(cpus), policy="static" if cpus else "none")
        return cpus
