"""A minimal device plugin and DRA driver that record each call in the format of the recorded
transcript of a real kubelet.

`calls` has them in order, and both may append to one list. For tests of the kubelet simulator, and
for plugin authors who want to see the calls of kubelet.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.dra.v1 import api_pb2_grpc as dra_rpc
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
from topobus.process.broadcast import Broadcast
from topobus.simulation.kubelet.wire import deadline_of, to_plain

__all__ = ["Record", "RecordingDriver", "RecordingPlugin", "device"]

Record = dict[str, Any]
Context = grpc.aio.ServicerContext[Any, Any]

_REGISTER_S = 20.0
_KUBELET_SOCKET = "kubelet.sock"


def device(name: str, node: int | None = None, health_text: str = "Healthy") -> pb.Device:
    """One list entry."""
    topology = None if node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)])
    return pb.Device(ID=name, health=health_text, topology=topology)


def _deadline(context: Context) -> float | None:
    """Return the whole seconds left for the plugin. The transcript rounds likewise."""
    left = deadline_of(context)
    return None if left is None else float(round(left))


class RecordingPlugin(rpc.DevicePluginServicer):
    """Serves `devices` on its own socket. Change them with `show`."""

    def __init__(
        self,
        folder: Path,
        resource: str,
        devices: Iterable[pb.Device],
        *,
        socket: str = "rec-1.sock",
        calls: list[Record] | None = None,
    ) -> None:
        self.folder = folder
        self.resource = resource
        self.socket = socket
        self.options = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        self.calls: list[Record] = [] if calls is None else calls
        self.prefers: list[str] | None = None
        self.allocate_error = ""
        self.env: dict[str, str] = {}
        self.cdi_devices: list[str] = []
        self.mounts: list[pb.Mount] = []
        self.nodes: list[pb.DeviceSpec] = []
        self.hangs: Callable[[str], bool] = lambda event: False
        """Says of which calls the answer never comes."""
        self._devices = list(devices)
        self._changed = Broadcast()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.folder / self.socket}")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop serving, and remove the socket."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def register(
        self, *, version: str = "v1beta1", endpoint: str | None = None, resource: str | None = None
    ) -> str:
        """Register as a plugin does, with 20 s. Return the refusal's text, empty when kubelet
        accepted it.
        """
        request = pb.RegisterRequest(
            version=version, endpoint=endpoint or self.socket, resource_name=resource or self.resource
        )
        async with grpc.aio.insecure_channel(
            f"unix:{self.folder / _KUBELET_SOCKET}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            try:
                await rpc.RegistrationStub(channel).Register(request, timeout=_REGISTER_S)
            except grpc.aio.AioRpcError as err:
                is_ours = (version, request.endpoint, request.resource_name) == ("v1beta1", self.socket, self.resource)
                refusal = (
                    {"event": "Register.error"} if is_ours else {"event": "Register.refused", "req": to_plain(request)}
                )
                self.calls.append({**refusal, "code": str(err.code()), "details": err.details()})
                return err.details() or ""
        self.calls.append({"event": "Register.ok"})
        return ""

    def show(self, devices: Iterable[pb.Device]) -> None:
        """Send another list on every stream."""
        self._devices = list(devices)
        self._changed.announce()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Context) -> pb.DevicePluginOptions:
        """Answer the options."""
        self._note("GetDevicePluginOptions", request, context)
        return self.options

    async def ListAndWatch(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the list at once and after every change."""
        self.calls.append({"event": "ListAndWatch.open", "deadline_s": _deadline(context)})
        try:
            while True:
                changed = self._changed.ticket()
                message = pb.ListAndWatchResponse(devices=self._devices)
                self.calls.append({"event": "ListAndWatch.send", "msg": to_plain(message)})
                yield message
                await changed.wait()
        finally:
            self.calls.append({"event": "ListAndWatch.closed"})

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Context
    ) -> pb.PreferredAllocationResponse:
        """Prefer the test's choice, else the first ones."""
        self._note("GetPreferredAllocation", request, context)
        asked = request.container_requests[0]
        chosen = self.prefers if self.prefers is not None else list(asked.available_deviceIDs)[: asked.allocation_size]
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=chosen)]
        )

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        """Answer variables, CDI names, mounts and device nodes as they are set."""
        self._note("Allocate", request, context)
        if self.hangs("Allocate"):
            await asyncio.Event().wait()
        if self.allocate_error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.allocate_error)
        names = [pb.CDIDevice(name=name) for name in self.cdi_devices]
        answer = pb.ContainerAllocateResponse(envs=self.env, cdi_devices=names, mounts=self.mounts, devices=self.nodes)
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: Context
    ) -> pb.PreStartContainerResponse:
        """Do nothing, successfully."""
        self._note("PreStartContainer", request, context)
        if self.hangs("PreStartContainer"):
            await asyncio.Event().wait()
        return pb.PreStartContainerResponse()

    def _note(self, event: str, request: Any, context: Context) -> None:
        self.calls.append({"event": event, "req": to_plain(request), "deadline_s": _deadline(context)})


class RecordingDriver(registration_rpc.RegistrationServicer, dra_rpc.DRAPluginServicer):
    """A DRA driver: registration socket, dra.sock, health in the requested version."""

    def __init__(
        self,
        registry: Path,
        plugins: Path,
        name: str,
        *,
        versions: Iterable[str] = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth"),
        instance: str = "",
        calls: list[Record] | None = None,
    ) -> None:
        self.name = name
        self.versions = list(versions)
        self.calls: list[Record] = [] if calls is None else calls
        self.prepare_error = ""
        self.unprepare_error = ""
        self.hangs: Callable[[str], bool] = lambda event: False
        """Says of which calls the answer never comes."""
        self.status: registration.RegistrationStatus | None = None
        tail = f"-{instance}" if instance else ""
        self._registry = registry / f"{name}{tail}-reg.sock"
        self._service = plugins / name / f"dra{tail}.sock"
        self._servers: list[grpc.aio.Server] = []

    async def __aenter__(self) -> Self:
        self._service.parent.mkdir(parents=True, exist_ok=True)
        service, registry = grpc.aio.server(), grpc.aio.server()
        dra_rpc.add_DRAPluginServicer_to_server(self, service)
        for api in ("v1", "v1alpha1"):
            handler = grpc.unary_stream_rpc_method_handler(
                partial(self._watch_resources, api),
                request_deserializer=health.NodeWatchResourcesRequest.FromString,
                response_serializer=health.NodeWatchResourcesResponse.SerializeToString,
            )
            service.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"{api}.DRAResourceHealth", {"NodeWatchResources": handler}),)
            )
        registration_rpc.add_RegistrationServicer_to_server(self, registry)
        for server, path in ((service, self._service), (registry, self._registry)):
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop serving, and remove the sockets."""
        for server in reversed(self._servers):
            await server.stop(None)
        self._servers.clear()

    async def drop_service(self) -> None:
        """Lose the service alone: the registration socket stays, as after a kill."""
        await self._servers.pop(0).stop(None)

    async def GetInfo(self, request: registration.InfoRequest, context: Context) -> registration.PluginInfo:
        """Return the driver's identity."""
        self.calls.append({"event": "GetInfo", "deadline_s": _deadline(context)})
        await self._hang("GetInfo")
        return registration.PluginInfo(
            type="DRAPlugin", name=self.name, endpoint=str(self._service), supported_versions=self.versions
        )

    async def NotifyRegistrationStatus(
        self, request: registration.RegistrationStatus, context: Context
    ) -> registration.RegistrationStatusResponse:
        """Keep the status."""
        self.status = request
        self._note("NotifyRegistrationStatus", request, context)
        return registration.RegistrationStatusResponse()

    async def NodePrepareResources(
        self, request: dra.NodePrepareResourcesRequest, context: Context
    ) -> dra.NodePrepareResourcesResponse:
        """Prepare one device for each claim."""
        self._note("NodePrepareResources", request, context)
        await self._hang("NodePrepareResources")
        return dra.NodePrepareResourcesResponse(
            claims={
                claim.uid: dra.NodePrepareResourceResponse(error=self.prepare_error)
                if self.prepare_error
                else dra.NodePrepareResourceResponse(
                    devices=[
                        dra.Device(
                            request_names=["r"],
                            pool_name="node",
                            device_name="dev-0",
                            cdi_device_ids=[f"v/c={claim.uid}"],
                        )
                    ]
                )
                for claim in request.claims
            }
        )

    async def NodeUnprepareResources(
        self, request: dra.NodeUnprepareResourcesRequest, context: Context
    ) -> dra.NodeUnprepareResourcesResponse:
        """Undo, or fail if the test wants that."""
        self._note("NodeUnprepareResources", request, context)
        await self._hang("NodeUnprepareResources")
        return dra.NodeUnprepareResourcesResponse(
            claims={
                claim.uid: dra.NodeUnprepareResourceResponse(error=self.unprepare_error) for claim in request.claims
            }
        )

    async def _watch_resources(
        self, api: str, request: health.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        """Report one healthy device and stay."""
        self.calls.append({"event": "NodeWatchResources.open", "api": api, "deadline_s": _deadline(context)})
        device_health = health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name="node", device_name="dev-0"), health=health.HEALTHY
        )
        try:
            yield health.NodeWatchResourcesResponse(devices=[device_health])
            await asyncio.Event().wait()
        finally:
            self.calls.append({"event": "NodeWatchResources.closed", "api": api})

    async def _hang(self, event: str) -> None:
        if self.hangs(event):
            await asyncio.Event().wait()

    def _note(self, event: str, request: Any, context: Context) -> None:
        self.calls.append({"event": event, "req": to_plain(request), "deadline_s": _deadline(context)})
