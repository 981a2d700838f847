"""A device plugin and a DRA driver as small as they can be, which write down each call as the recorded transcript does."""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.dra.v1 import api_pb2_grpc as dra_rpc
from topobus.kubeletpb.drahealth.v1alpha1 import api_pb2 as health
from topobus.kubeletpb.drahealth.v1alpha1 import api_pb2_grpc as health_rpc
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc

Record = dict[str, Any]


def plain(message: Message) -> Record:
    """Turn a message into plain values under kubelet's field names."""
    return MessageToDict(message, preserving_proto_field_name=True)


def deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Whole seconds left as the plugin sees them; the transcript rounds likewise."""
    left: float | None = context.time_remaining()
    return None if left is None else float(round(left))


def device(name: str, node: int | None = None, health_text: str = "Healthy") -> pb.Device:
    """One list entry."""
    topology = None if node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)])
    return pb.Device(ID=name, health=health_text, topology=topology)


class TrivialPlugin(rpc.DevicePluginServicer):
    """Serves `devices` on its own socket; change them with `show`."""

    def __init__(self, folder: Path, resource: str, devices: Iterable[pb.Device], *, socket: str = "rec-1.sock") -> None:
        self.folder = folder
        self.resource = resource
        self.socket = socket
        self.options = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        self.calls: list[Record] = []
        self.prefers: list[str] | None = None
        self.allocate_error = ""
        self.env: dict[str, str] = {}
        self.cdi_devices: list[str] = []
        self._devices = list(devices)
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.folder / self.socket}")
        await self._server.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def register(self, *, version: str = "v1beta1", endpoint: str | None = None, resource: str | None = None) -> str:
        """Register as a plugin does, with 20 s; the refusal's text, empty when kubelet took it."""
        request = pb.RegisterRequest(version=version, endpoint=endpoint or self.socket, resource_name=resource or self.resource)
        async with grpc.aio.insecure_channel(
            f"unix:{self.folder / 'kubelet.sock'}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            try:
                await rpc.RegistrationStub(channel).Register(request, timeout=20.0)
            except grpc.aio.AioRpcError as err:
                refusal = {"event": "Register.refused", "req": plain(request), "code": str(err.code()), "details": err.details()}
                self.calls.append(refusal)
                return err.details() or ""
        self.calls.append({"event": "Register.ok"})
        return ""

    def show(self, devices: Iterable[pb.Device]) -> None:
        """Send another list on every stream."""
        self._devices = list(devices)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        """Answer the options."""
        self._note("GetDevicePluginOptions", request, context)
        return self.options

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the list at once and after every change."""
        self.calls.append({"event": "ListAndWatch.open", "deadline_s": deadline(context)})
        while True:
            changed = self._changed
            message = pb.ListAndWatchResponse(devices=self._devices)
            self.calls.append({"event": "ListAndWatch.send", "msg": plain(message)})
            yield message
            await changed.wait()

    async def GetPreferredAllocation(self, request: pb.PreferredAllocationRequest, context: Any) -> pb.PreferredAllocationResponse:
        """Prefer what the test says, else the first ones."""
        self._note("GetPreferredAllocation", request, context)
        asked = request.container_requests[0]
        chosen = self.prefers if self.prefers is not None else list(asked.available_deviceIDs)[: asked.allocation_size]
        return pb.PreferredAllocationResponse(container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=chosen)])

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        """Answer one environment variable and the CDI names."""
        self._note("Allocate", request, context)
        if self.allocate_error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.allocate_error)
        answer = pb.ContainerAllocateResponse(envs=self.env, cdi_devices=[pb.CDIDevice(name=one) for one in self.cdi_devices])
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Any) -> pb.PreStartContainerResponse:
        """Do nothing, gladly."""
        self._note("PreStartContainer", request, context)
        return pb.PreStartContainerResponse()

    def _note(self, event: str, request: Message, context: Any) -> None:
        self.calls.append({"event": event, "req": plain(request), "deadline_s": deadline(context)})


class TrivialDriver(registration_rpc.RegistrationServicer, dra_rpc.DRAPluginServicer, health_rpc.DRAResourceHealthServicer):
    """A DRA driver: registration socket, dra.sock, health."""

    def __init__(
        self, registry: Path, plugins: Path, name: str, *, versions: Iterable[str] = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
    ) -> None:
        self.name = name
        self.versions = list(versions)
        self.calls: list[Record] = []
        self.prepare_error = ""
        self.unprepare_error = ""
        self.status: registration.RegistrationStatus | None = None
        self._registry = registry / f"{name}-reg.sock"
        self._service = plugins / name / "dra.sock"
        self._servers: list[grpc.aio.Server] = []

    async def __aenter__(self) -> Self:
        self._service.parent.mkdir(parents=True, exist_ok=True)
        service, registry = grpc.aio.server(), grpc.aio.server()
        dra_rpc.add_DRAPluginServicer_to_server(self, service)
        health_rpc.add_DRAResourceHealthServicer_to_server(self, service)
        registration_rpc.add_RegistrationServicer_to_server(self, registry)
        for server, path in ((service, self._service), (registry, self._registry)):
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for server in reversed(self._servers):
            await server.stop(None)
        self._servers.clear()

    async def GetInfo(self, request: registration.InfoRequest, context: Any) -> registration.PluginInfo:
        """Say who this is."""
        self.calls.append({"event": "GetInfo", "deadline_s": deadline(context)})
        return registration.PluginInfo(type="DRAPlugin", name=self.name, endpoint=str(self._service), supported_versions=self.versions)

    async def NotifyRegistrationStatus(
        self, request: registration.RegistrationStatus, context: Any
    ) -> registration.RegistrationStatusResponse:
        """Keep the status."""
        self.status = request
        self.calls.append({"event": "NotifyRegistrationStatus", "req": plain(request), "deadline_s": deadline(context)})
        return registration.RegistrationStatusResponse()

    async def NodePrepareResources(self, request: dra.NodePrepareResourcesRequest, context: Any) -> dra.NodePrepareResourcesResponse:
        """Prepare one device a claim."""
        self.calls.append({"event": "NodePrepareResources", "req": plain(request), "deadline_s": deadline(context)})
        return dra.NodePrepareResourcesResponse(
            claims={
                one.uid: dra.NodePrepareResourceResponse(error=self.prepare_error)
                if self.prepare_error
                else dra.NodePrepareResourceResponse(
                    devices=[dra.Device(request_names=["r"], pool_name="node", device_name="dev-0", cdi_device_ids=[f"v/c={one.uid}"])]
                )
                for one in request.claims
            }
        )

    async def NodeUnprepareResources(self, request: dra.NodeUnprepareResourcesRequest, context: Any) -> dra.NodeUnprepareResourcesResponse:
        """Undo, or fail as told."""
        self.calls.append({"event": "NodeUnprepareResources", "req": plain(request), "deadline_s": deadline(context)})
        return dra.NodeUnprepareResourcesResponse(
            claims={one.uid: dra.NodeUnprepareResourceResponse(error=self.unprepare_error) for one in request.claims}
        )

    async def NodeWatchResources(
        self, request: health.NodeWatchResourcesRequest, context: Any
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        """Report one healthy device and stay."""
        self.calls.append({"event": "NodeWatchResources.open", "api": "v1alpha1", "deadline_s": deadline(context)})
        one = health.DeviceHealth(device=health.DeviceIdentifier(pool_name="node", device_name="dev-0"), health=health.HEALTHY)
        yield health.NodeWatchResourcesResponse(devices=[one])
        await asyncio.Event().wait()
