"""kubelet's side of the device plugin API: the Registration service, and one endpoint for each
resource that registered.

Order and texts follow the recorded transcript of kubelet 1.36: version, name, dial, options, and
only then the answer. ListAndWatch runs in the background.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.kubelet.devices import NO_SUCH_NODE, DeviceStore, PluginDevice
from topobus.simulation.kubelet.values import EventLog, KubeletTimings
from topobus.simulation.kubelet.wire import (
    DialError,
    Tasks,
    deadline_of,
    dial,
    go_error,
    is_socket,
    outcome_of,
    shown,
    to_plain,
)
from topobus.values.idset import NodeSet
from topobus.values.names import is_extended_resource_name

__all__ = ["CallFailed", "DevicePlugins", "Endpoint", "list_doubts"]

_VERSION = "v1beta1"
_ID_LIMIT = 63
_HEALTH = ("Healthy", "Unhealthy")
KUBELET_SOCKET = "kubelet.sock"


class CallFailed(Exception):
    """Raised when a plugin answered a call with an error. The text is Go's."""


class Endpoint:
    """A connected plugin for one resource."""

    def __init__(
        self,
        resource: str,
        channel: grpc.aio.Channel,
        options: pb.DevicePluginOptions,
        log: EventLog,
        pre_start_s: float,
    ) -> None:
        self.resource = resource
        self.channel = channel
        self.options = options
        self.stub = rpc.DevicePluginStub(channel)
        self.watch: asyncio.Task[None] | None = None
        self._log = log
        self._pre_start_s = pre_start_s

    async def preferred(self, available: set[str], must_include: set[str], size: int) -> set[str]:
        """Call GetPreferredAllocation, which has no deadline.

        Empty when the plugin does not offer it.

        Errors: raises CallFailed.
        """
        if not self.options.get_preferred_allocation_available:
            return set()
        wanted = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(available), must_include_deviceIDs=sorted(must_include), allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[wanted])
        self._log.add("GetPreferredAllocation", self.resource, to_plain(request))
        try:
            answer = await outcome_of(self.stub.GetPreferredAllocation(request))
        except grpc.aio.AioRpcError as err:
            raise CallFailed(f"device plugin GetPreferredAllocation rpc failed with err: {go_error(err)}") from err
        return set(answer.container_responses[0].deviceIDs) if answer.container_responses else set()

    async def allocate(self, ids: set[str]) -> pb.ContainerAllocateResponse:
        """Call Allocate for one container, without a deadline.

        Errors: raises CallFailed.
        """
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=sorted(ids))])
        self._log.add("Allocate", self.resource, to_plain(request))
        try:
            answer = await outcome_of(self.stub.Allocate(request))
        except grpc.aio.AioRpcError as err:
            raise CallFailed(go_error(err)) from err
        if not answer.container_responses:
            raise CallFailed(f"no containers return in allocation response {answer}")
        return answer.container_responses[0]

    async def pre_start(self, ids: tuple[str, ...]) -> None:
        """Call PreStartContainer when the plugin wants it.

        Errors: raises CallFailed.
        """
        if not self.options.pre_start_required:
            return
        request = pb.PreStartContainerRequest(devices_ids=sorted(ids))
        self._log.add("PreStartContainer", self.resource, to_plain(request), self._pre_start_s)
        try:
            await outcome_of(self.stub.PreStartContainer(request, timeout=self._pre_start_s))
        except grpc.aio.AioRpcError as err:
            raise CallFailed(f"device plugin PreStartContainer rpc failed with err: {go_error(err)}") from err


class DevicePlugins(rpc.RegistrationServicer):
    """The Registration service and all endpoints."""

    def __init__(
        self,
        folder: Path,
        store: DeviceStore,
        log: EventLog,
        timings: KubeletTimings,
        monotonic: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._store = store
        self._log = log
        self._timings = timings
        self._monotonic = monotonic
        self._endpoints: dict[str, Endpoint] = {}
        self._server: grpc.aio.Server | None = None
        self._tasks = Tasks()

    async def start(self) -> None:
        """Delete every socket in the folder, as kubelet does, then serve kubelet.sock."""
        for path in sorted(self._folder.iterdir()):
            if is_socket(path):
                # Its owner may remove it first: the removal of one socket makes a plugin remove its
                # others.
                path.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._folder / KUBELET_SOCKET}")
        await self._server.start()

    async def stop(self) -> None:
        """Close all plugin connections and the server."""
        await self._tasks.close()
        for endpoint in self._endpoints.values():
            await endpoint.channel.close()
        self._endpoints.clear()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def endpoint(self, resource: str) -> Endpoint | None:
        """The plugin that serves a resource now."""
        return self._endpoints.get(resource)

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.Empty]
    ) -> pb.Empty:
        """Accept a registration. The newest registration for a resource replaces earlier ones."""
        name = request.resource_name
        refusal = await self._connect(request, deadline_of(context))
        if refusal:
            self._log.add(
                "Register.refused", name, {"req": to_plain(request), "code": "StatusCode.UNKNOWN", "details": refusal}
            )
            await context.abort(grpc.StatusCode.UNKNOWN, refusal)
        self._log.add("Register.ok", name, {"req": to_plain(request)})
        return pb.Empty()

    async def _connect(self, request: pb.RegisterRequest, deadline_s: float | None) -> str:
        """Check, dial, get the options, start watching. An empty text is success."""
        if request.version != _VERSION:
            return (
                f'requested API version "{request.version}" is not supported by kubelet. Supported version is '
                f'["{_VERSION}"]'
            )
        if not is_extended_resource_name(request.resource_name):
            return f'the ResourceName "{request.resource_name}" is invalid'
        # The deadline is what is left of the plugin's own Register call, because kubelet passes on
        # its context. A file name: Go also joins a whole path below the folder, where no socket is.
        answer = await self._open(request.resource_name, self._folder / request.endpoint.lstrip("/"), deadline_s)
        return answer if isinstance(answer, str) else ""

    async def connect_watched(
        self, resource: str, socket: Path, versions: tuple[str, ...]
    ) -> Callable[[], object] | str:
        """Connect a device plugin that the plugin watcher found.

        The answer is the function that releases it again, or a text with the reason for a refusal.
        """
        refusal = (
            f"RegisterPlugin error -- plugin validation failed with err: manager version, {_VERSION}, is not "
            "among plugin supported versions"
        )
        if _VERSION not in versions:
            return f"{refusal} [{' '.join(versions)}]"
        if not is_extended_resource_name(resource):
            return (
                "RegisterPlugin error -- plugin validation failed with err: invalid name of device plugin "
                f'socket: the ResourceName "{resource}" is invalid'
            )
        answer = await self._open(resource, socket, None)
        if isinstance(answer, str):
            return f"RegisterPlugin error -- plugin registration failed with err: {answer}"
        return answer.cancel

    async def _open(self, resource: str, socket: Path, deadline_s: float | None) -> asyncio.Task[None] | str:
        try:
            channel = await dial(socket, self._timings.dial_s)
        except DialError as err:
            return f"failed to dial device plugin: {err}"
        stub = rpc.DevicePluginStub(channel)
        self._log.add("GetDevicePluginOptions", resource, deadline_s=deadline_s)
        try:
            options = await stub.GetDevicePluginOptions(pb.Empty(), timeout=deadline_s)
        except grpc.aio.AioRpcError as err:
            await channel.close()
            return f"failed to get device plugin options: {go_error(err)}"
        endpoint = Endpoint(resource, channel, options, self._log, self._timings.pre_start_s)
        old = self._endpoints.get(resource)
        self._endpoints[resource] = endpoint
        # With the race the old plugin's list stays open until that plugin ends.
        if old is not None and old.watch is not None and not self._timings.has_reregister_race:
            old.watch.cancel()
        endpoint.watch = self._tasks.spawn(self._watch(endpoint))
        return endpoint.watch

    async def _watch(self, endpoint: Endpoint) -> None:
        """Read lists until the stream ends.

        Then all devices of the resource are unhealthy, unless a newer plugin serves it.
        """
        name = endpoint.resource
        self._log.add("ListAndWatch.open", name)
        ended: dict[str, str] = {}
        try:
            async for message in endpoint.stub.ListAndWatch(pb.Empty()):
                plain = await shown(message)
                self._store.replace(name, (_device(device) for device in message.devices))
                self._log.add("ListAndWatch.send", name, plain)
                if doubts := list_doubts(message):
                    self._log.add("ListAndWatch.doubtful", name, {"doubts": doubts})
        except grpc.aio.AioRpcError as err:
            # kubelet treats every cause the same, but the log has it for the plugin's author.
            ended = {"error": go_error(err)}
        finally:
            if self._endpoints.get(name) is endpoint or (self._timings.has_reregister_race and name in self._endpoints):
                # Before kubernetes PR 135437 clients were keyed by resource alone: the end of the
                # old stream cut off the new plugin, whose connection is closed.
                cut_off = self._endpoints.pop(name)
                self._store.stop(name, self._monotonic())
                if cut_off is not endpoint:
                    await cut_off.channel.close()
            self._log.add("ListAndWatch.closed", name, ended)
            await endpoint.channel.close()


def _device(device: pb.Device) -> PluginDevice:
    nodes = None
    if device.HasField("topology"):
        nodes = NodeSet.of(node.ID if 0 <= node.ID < NO_SUCH_NODE else NO_SUCH_NODE for node in device.topology.nodes)
    return PluginDevice(id=device.ID, is_healthy=device.health == "Healthy", nodes=nodes)


def list_doubts(message: pb.ListAndWatchResponse) -> list[str]:
    """List what kubelet accepts silently although it is hardly intended.

    >>> list_doubts(pb.ListAndWatchResponse(devices=[pb.Device(ID="a", health="healthy")]))
    ["a: health 'healthy' counts as unhealthy: only 'Healthy' is healthy"]
    """
    doubts: list[str] = []
    seen: set[str] = set()
    for device in message.devices:
        if device.ID in seen:
            doubts.append(f"{device.ID}: is in the list twice; the last entry counts")
        seen.add(device.ID)
        if not 1 <= len(device.ID) <= _ID_LIMIT:
            doubts.append(f"{device.ID!r}: {len(device.ID)} characters; the API promises 1 to {_ID_LIMIT}")
        if device.health not in _HEALTH:
            doubts.append(f"{device.ID}: health {device.health!r} counts as unhealthy: only 'Healthy' is healthy")
        doubts += [
            f"{device.ID}: NUMA node {node.ID}: send no topology when the node is not known; this device fits no hint"
            for node in device.topology.nodes
            if not 0 <= node.ID < NO_SUCH_NODE
        ]
    return doubts
