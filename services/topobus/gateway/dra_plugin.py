"""The DRA driver of one class: its two sockets, kept up for ever, and what kubelet calls on them.

Flows in: kubelet's calls. Flows out: prepared claims, health. Both API versions are served by one handler: v1 and v1beta1 (and v1 and v1alpha1 of the
health API) differ in the package's name alone, which is why the handlers are added by name instead of by the generated helpers.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from topobus.domain.device import driver_name
from topobus.domain.errors import ConfigError
from topobus.gateway.claims import ClaimKey, ClaimPreparer
from topobus.gateway.config import DeadlineSettings, KubeletSettings
from topobus.gateway.core.lists import DraHealth, HealthEntry
from topobus.gateway.node_state import NodeState
from topobus.gateway.sockets import CallMetrics, FolderWatch, answer, identity, remove_stale, serving
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["DraDriver"]

R = TypeVar("R")

_HEALTH = {DraHealth.UNKNOWN: health.UNKNOWN, DraHealth.HEALTHY: health.HEALTHY, DraHealth.UNHEALTHY: health.UNHEALTHY}
# kubelet cuts longer ones itself.
_MESSAGE_LIMIT = 1024
_PLUGIN_SERVICES = ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin")
_HEALTH_SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
# For the plugin the label is not the wire package; for health the two agree. Health is offered because it is served.
_SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *_HEALTH_SERVICES)


class DraDriver(registration_rpc.RegistrationServicer):
    """Serves one class as `<class>.topobus.dev`."""

    def __init__(
        self,
        device_class: str,
        *,
        kubelet: KubeletSettings,
        watch: FolderWatch,
        state: NodeState,
        preparer: ClaimPreparer,
        metrics: CallMetrics,
        deadlines: DeadlineSettings,
        clock: Clock,
    ) -> None:
        self.device_class = device_class
        self.driver = driver_name(device_class)
        self.status = "waiting for kubelet"
        """`registered`, or what stands in the way."""
        self._registry = Path(kubelet.plugins_registry_dir) / f"{self.driver}-reg.sock"
        self._service = Path(kubelet.plugins_dir) / self.driver / "dra.sock"
        self._watch = watch
        self._state = state
        self._preparer = preparer
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock = clock

    async def run(self) -> None:
        """Serve both sockets, and serve them again when one of them vanishes."""
        while True:
            await self._watch.until(self._watch.folder.is_dir)
            try:
                await self._serve_once()
                self._say("our socket was removed")
            except (ConfigError, OSError) as err:
                if str(err) != self.status:
                    get_logger().error("driver.serve-failed", driver=self.driver, error=str(err))
                self._say(str(err))
            await asyncio.sleep(self._deadlines.retry_s)

    async def _serve_once(self) -> None:
        for path in (self._service, self._registry):
            await asyncio.to_thread(remove_stale, path.parent, path.name)
        # The service first: kubelet dials it as soon as it has read the registration socket.
        async with (
            serving(self._service, self._add_services),
            serving(self._registry, lambda server: registration_rpc.add_RegistrationServicer_to_server(self, server)),
        ):
            get_logger().info("driver.served", driver=self.driver)
            mine = [(path, identity(path)) for path in (self._service, self._registry)]
            await self._watch.until(lambda: any(identity(path) != known for path, known in mine))
        get_logger().info("driver.lost", driver=self.driver, why="a socket of ours was removed or replaced")

    def _add_services(self, server: grpc.aio.Server) -> None:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                self.NodePrepareResources,
                request_deserializer=dra.NodePrepareResourcesRequest.FromString,
                response_serializer=dra.NodePrepareResourcesResponse.SerializeToString,
            ),
            "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
                self.NodeUnprepareResources,
                request_deserializer=dra.NodeUnprepareResourcesRequest.FromString,
                response_serializer=dra.NodeUnprepareResourcesResponse.SerializeToString,
            ),
        }
        watch: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self.NodeWatchResources,
                request_deserializer=health.NodeWatchResourcesRequest.FromString,
                response_serializer=health.NodeWatchResourcesResponse.SerializeToString,
            )
        }
        server.add_generic_rpc_handlers(
            [
                *(grpc.method_handlers_generic_handler(name, methods) for name in _PLUGIN_SERVICES),
                *(grpc.method_handlers_generic_handler(name, watch) for name in _HEALTH_SERVICES),
            ]
        )

    async def GetInfo(
        self, request: registration.InfoRequest, context: grpc.aio.ServicerContext[registration.InfoRequest, registration.PluginInfo]
    ) -> registration.PluginInfo:
        """Tell kubelet's plugin watcher who is here."""
        return registration.PluginInfo(
            type="DRAPlugin", name=self.driver, endpoint=str(self._service), supported_versions=list(_SUPPORTED_VERSIONS)
        )

    async def NotifyRegistrationStatus(
        self,
        request: registration.RegistrationStatus,
        context: grpc.aio.ServicerContext[registration.RegistrationStatus, registration.RegistrationStatusResponse],
    ) -> registration.RegistrationStatusResponse:
        """Keep what kubelet decided; a refusal is for a human."""
        if request.plugin_registered:
            get_logger().info("driver.registered", driver=self.driver)
            self._say("registered")
        else:
            get_logger().error("driver.refused", driver=self.driver, error=request.error)
            self._say(f"kubelet refused the driver: {request.error}")
        return registration.RegistrationStatusResponse()

    async def NodePrepareResources(
        self,
        request: dra.NodePrepareResourcesRequest,
        context: grpc.aio.ServicerContext[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse],
    ) -> dra.NodePrepareResourcesResponse:
        """Prepare claims; what fails for one is that one's error."""
        return await answer(context, self._metrics, "NodePrepareResources", self.device_class, self._prepare(request))

    async def NodeUnprepareResources(
        self,
        request: dra.NodeUnprepareResourcesRequest,
        context: grpc.aio.ServicerContext[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse],
    ) -> dra.NodeUnprepareResourcesResponse:
        """Undo claims; every claim asked for has an entry."""
        return await answer(context, self._metrics, "NodeUnprepareResources", self.device_class, self._unprepare(request))

    async def NodeWatchResources(
        self,
        request: health.NodeWatchResourcesRequest,
        context: grpc.aio.ServicerContext[health.NodeWatchResourcesRequest, health.NodeWatchResourcesResponse],
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        """Send the complete health at once, after every change, and again before kubelet would call it Unknown."""
        sent: tuple[HealthEntry, ...] | None = None
        seen_at = int(self._clock.now().timestamp())
        deadline = 0.0
        while True:
            ticket = self._state.changed.ticket()
            entries = self._state.health(self.device_class)
            if self._state.is_connected:
                seen_at = int(self._clock.now().timestamp())
            if entries != sent or self._clock.monotonic() >= deadline:
                sent = entries
                deadline = self._clock.monotonic() + self._deadlines.health_refresh_s
                yield health.NodeWatchResourcesResponse(devices=[self._to_wire(one, seen_at) for one in entries])
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    await ticket.wait()
            except TimeoutError:
                continue

    async def _prepare(self, request: dra.NodePrepareResourcesRequest) -> dra.NodePrepareResourcesResponse:
        async def one(claim: ClaimKey) -> dra.NodePrepareResourceResponse:
            prepared = await self._preparer.prepare(self.device_class, claim)
            if isinstance(prepared, str):
                return dra.NodePrepareResourceResponse(error=prepared)
            return dra.NodePrepareResourceResponse(
                devices=[
                    dra.Device(
                        request_names=[it.request],
                        pool_name=it.pool,
                        device_name=it.device,
                        cdi_device_ids=it.cdi_devices,
                        share_id=it.share_id or None,
                    )
                    for it in prepared
                ]
            )

        return dra.NodePrepareResourcesResponse(claims=await _for_each(request.claims, one))

    async def _unprepare(self, request: dra.NodeUnprepareResourcesRequest) -> dra.NodeUnprepareResourcesResponse:
        async def one(claim: ClaimKey) -> dra.NodeUnprepareResourceResponse:
            return dra.NodeUnprepareResourceResponse(error=await self._preparer.unprepare(self.device_class, claim))

        return dra.NodeUnprepareResourcesResponse(claims=await _for_each(request.claims, one))

    def _to_wire(self, entry: HealthEntry, seen_at: int) -> health.DeviceHealth:
        return health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name=self._state.node, device_name=entry.device),
            health=_HEALTH[entry.health],
            last_updated_time=seen_at,
            health_check_timeout_seconds=int(3 * self._deadlines.health_refresh_s),
            message=entry.message[:_MESSAGE_LIMIT],
        )

    def _say(self, status: str) -> None:
        self.status = status
        self._watch.wake()


async def _for_each(claims: Iterable[dra.Claim], work: Callable[[ClaimKey], Coroutine[Any, Any, R]]) -> dict[str, R]:
    """Do the same to all claims at once; a slow one holds up none of the others."""
    keys = [ClaimKey(namespace=one.namespace, name=one.name, uid=one.uid) for one in claims]
    async with asyncio.TaskGroup() as group:
        tasks = {key.uid: group.create_task(work(key)) for key in keys}
    return {uid: task.result() for uid, task in tasks.items()}
