"""kubelet's PodResources service: the devices of each active pod and the allocatable devices, with
kubelet's rate limit.

Source: kubelet 1.36 apis/podresources/server_v1.go: 100 calls per second, bursts of 10,
RESOURCE_EXHAUSTED beyond.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import grpc.aio

from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.simulation.kubelet.admission import Admitter
from topobus.simulation.kubelet.devices import NO_SUCH_NODE, DeviceStore
from topobus.simulation.kubelet.values import Container, EventLog, Pod, PreparedClaim
from topobus.values.idset import CpuSet
from topobus.values.request import ContainerKind

__all__ = ["PodResources"]

_CALLS_PER_S = 100.0
_BURST = 10.0
SOCKET = "kubelet.sock"

Context = grpc.aio.ServicerContext


class PodResources(rpc.PodResourcesListerServicer):
    """List, Get and GetAllocatableResources on pod-resources/kubelet.sock."""

    def __init__(
        self,
        folder: Path,
        store: DeviceStore,
        admitter: Admitter,
        log: EventLog,
        monotonic: Callable[[], float],
        cpus: CpuSet,
    ) -> None:
        self._folder = folder
        self._cpus = cpus
        self._store = store
        self._admitter = admitter
        self._log = log
        self._monotonic = monotonic
        self._tokens = _BURST
        self._counted_at = monotonic()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve the socket."""
        self._server = grpc.aio.server()
        rpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._folder / SOCKET}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def List(
        self,
        request: pb.ListPodResourcesRequest,
        context: Context[pb.ListPodResourcesRequest, pb.ListPodResourcesResponse],
    ) -> pb.ListPodResourcesResponse:
        """All active pods."""
        if not self._is_allowed():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._admitter.collect()
        active = self._admitter.active()
        self._log.add("PodResources.List", "podresources", {"pods": [pod.name for pod in active]})
        return pb.ListPodResourcesResponse(pod_resources=[self._describe(pod) for pod in active])

    async def Get(
        self,
        request: pb.GetPodResourcesRequest,
        context: Context[pb.GetPodResourcesRequest, pb.GetPodResourcesResponse],
    ) -> pb.GetPodResourcesResponse:
        """One active pod by name."""
        if not self._is_allowed():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._admitter.collect()
        wanted = (request.pod_namespace, request.pod_name)
        active_pod = next((pod for pod in self._admitter.active() if (pod.namespace, pod.name) == wanted), None)
        if active_pod is None:
            await context.abort(
                grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            )
        return pb.GetPodResourcesResponse(pod_resources=self._describe(active_pod))

    async def GetAllocatableResources(
        self,
        request: pb.AllocatableResourcesRequest,
        context: Context[pb.AllocatableResourcesRequest, pb.AllocatableResourcesResponse],
    ) -> pb.AllocatableResourcesResponse:
        """Healthy devices, held ones included, and the CPUs that the static policy may give."""
        if not self._is_allowed():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        entries = [
            entry
            for resource in self._store.capacity(self._monotonic())
            for entry in self._entries(resource, sorted(self._store.healthy(resource)))
        ]
        return pb.AllocatableResourcesResponse(devices=entries, cpu_ids=self._cpus.ids)

    def _describe(self, pod: Pod) -> pb.PodResources:
        containers = []
        for container in pod.containers:
            # Init containers that have ended are left out. Those that continue (sidecars) are not.
            grant = self._admitter.grant(pod.uid, container.name)
            if container.kind is ContainerKind.INIT or grant is None:
                continue
            devices = [entry for name, ids in sorted(grant.devices.items()) for entry in self._entries(name, ids)]
            containers.append(
                pb.ContainerResources(
                    name=container.name,
                    devices=devices,
                    cpu_ids=grant.cpus.ids,
                    memory=[
                        pb.ContainerMemory(memory_type="memory", size=size, topology=_on(node))
                        for node, size in sorted(container.memory.items())
                    ],
                    dynamic_resources=_dynamic(pod, container, self._admitter.claims(pod.uid)),
                )
            )
        return pb.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)

    def _entries(self, resource: str, ids: Iterable[str]) -> list[pb.ContainerDevices]:
        """Make one entry per device and NUMA node. A device without topology has one
        entry without.
        """
        devices = self._store.devices(resource)
        entries: list[pb.ContainerDevices] = []
        for identifier in ids:
            nodes = devices[identifier].nodes if identifier in devices else None
            if not nodes:
                entries.append(pb.ContainerDevices(resource_name=resource, device_ids=[identifier]))
                continue
            entries.extend(
                pb.ContainerDevices(resource_name=resource, device_ids=[identifier], topology=_on(node))
                for node in nodes
            )
        return entries

    def _is_allowed(self) -> bool:
        now = self._monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._counted_at) * _CALLS_PER_S)
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _on(node: int) -> pb.TopologyInfo:
    return pb.TopologyInfo(nodes=[pb.NUMANode(ID=-1 if node == NO_SUCH_NODE else node)])


def _dynamic(pod: Pod, container: Container, prepared: Iterable[PreparedClaim]) -> list[pb.DynamicResource]:
    names = {claim.uid: claim for claim in pod.claims if container.claims is None or claim.name in container.claims}
    return [
        pb.DynamicResource(
            claim_name=names[claim.uid].name,
            claim_namespace=names[claim.uid].namespace,
            claim_resources=[
                pb.ClaimResource(
                    cdi_devices=[pb.CDIDevice(name=name) for name in device.cdi_devices],
                    driver_name=device.driver,
                    pool_name=device.pool,
                    device_name=device.device,
                )
                for device in claim.devices
            ],
        )
        for claim in prepared
        if claim.uid in names
    ]
