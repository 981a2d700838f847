"""The node's DRA driver: serves its two sockets, keeps them registered with kubelet, and handles
kubelet's calls.

One handler serves both API versions: v1 and v1beta1 (and v1 and v1alpha1 of the health API) differ
only in the package's name. This is why handlers are added by name instead of by the generated
helpers.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from topobus.gateway.claims.claim_forwarder import ClaimForwarder
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.claims import ClaimPreparer
from topobus.gateway.claims.rules.socket_paths import DriverSockets, stale_patterns
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.device_plugins.device_plugin import LIST_LIMIT_BYTES
from topobus.gateway.device_plugins.rules.lists import DraHealth, HealthEntry
from topobus.gateway.device_plugins.sockets import FolderWatch, answer, identity, remove_stale, serving
from topobus.gateway.metrics import CallMetrics
from topobus.gateway.node_state import NodeState
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
from topobus.process.clock import Clock, is_set_within
from topobus.process.logging import get_logger
from topobus.values.dra_names import DRIVER, class_of_device, pool_of_class
from topobus.values.errors import ConfigError
from topobus.values.names import ClaimUid

__all__ = ["DraDriver"]

R = TypeVar("R")

_HEALTH = {DraHealth.UNKNOWN: health.UNKNOWN, DraHealth.HEALTHY: health.HEALTHY, DraHealth.UNHEALTHY: health.UNHEALTHY}
# Seconds that a stop waits for running calls. All of it must be over within five seconds.
_FINISH_S = 1.0
# kubelet truncates longer messages itself.
_MESSAGE_LIMIT = 1024
# Seconds during which health changes are collected. A fault is promised to reach kubelet within a
# tenth of a second.
_AFTER_LISTS_S = 0.01
_PLUGIN_SERVICES = ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin")
_HEALTH_SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
# For the plugin the label is not the wire package. For health the two are the same. Health is
# listed because it is served.
_SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *_HEALTH_SERVICES)


class DraDriver(registration_rpc.RegistrationServicer):
    """Serves the devices of all classes as `topobus.dev`."""

    def __init__(
        self,
        *,
        sockets: DriverSockets,
        watch: FolderWatch,
        state: NodeState,
        forwarder: ClaimForwarder,
        metrics: CallMetrics,
        deadlines: DeadlineSettings,
        clock: Clock,
    ) -> None:
        self.status = "waiting for kubelet"
        """`registered`, or what stands in the way."""
        self._registry = Path(sockets.registration)
        self._service = Path(sockets.service)
        self._calls = 0
        self._tellings = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch = watch
        self._state = state
        self._forwarder = forwarder
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock = clock

    async def run(self) -> None:
        """Serve both sockets, and serve them again when one of them disappears."""
        while True:
            await self._watch.until(self._watch.folder.is_dir)
            try:
                await self._serve_once()
                self._set_status("our socket was removed")
            except (ConfigError, OSError) as err:
                if str(err) != self.status:
                    get_logger().error("driver.serve-failed", driver=DRIVER, error=str(err))
                self._set_status(str(err))
            await self._clock.sleep(self._deadlines.retry_s)

    async def take_over(self) -> None:
        """Clean up after the gateway that held the lock. kubelet forgot the health of the driver's
        devices when its stream ended, so all of it is sent again.
        """
        await self._remove_stale_sockets()
        self._tellings += 1
        self._state.changed.announce()

    async def _remove_stale_sockets(self) -> None:
        """Remove sockets of this driver without a listener: a gateway that was killed could not
        remove them, and kubelet dials a dead socket again and again.
        """
        for path, pattern in zip((self._service, self._registry), stale_patterns(DRIVER), strict=True):
            for name in (path.name, pattern):
                await asyncio.to_thread(remove_stale, path.parent, name)

    async def _serve_once(self) -> None:
        await self._remove_stale_sockets()
        # The service socket first: kubelet dials it as soon as it has read the registration socket.
        async with (
            serving(self._service, self._add_services),
            serving(self._registry, lambda server: registration_rpc.add_RegistrationServicer_to_server(self, server)),
        ):
            get_logger().info("driver.served", driver=DRIVER)
            sockets = [(path, identity(path)) for path in (self._service, self._registry)]
            try:
                await self._watch.until(lambda: any(identity(path) != own for path, own in sockets))
            finally:
                # Running calls about claims finish first, because kubelet repeats a call that was
                # cut off only after more than a minute.
                await is_set_within(self._idle, self._clock.timeout(_FINISH_S))
        get_logger().info("driver.lost", driver=DRIVER, why="a socket of ours was removed or replaced")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

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
        self,
        request: registration.InfoRequest,
        context: grpc.aio.ServicerContext[registration.InfoRequest, registration.PluginInfo],
    ) -> registration.PluginInfo:
        """Describe this driver to kubelet's plugin watcher."""
        return registration.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=str(self._service),
            supported_versions=list(_SUPPORTED_VERSIONS),
        )

    async def NotifyRegistrationStatus(
        self,
        request: registration.RegistrationStatus,
        context: grpc.aio.ServicerContext[registration.RegistrationStatus, registration.RegistrationStatusResponse],
    ) -> registration.RegistrationStatusResponse:
        """Record kubelet's decision. A refusal needs an operator."""
        if request.plugin_registered:
            get_logger().info("driver.registered", driver=DRIVER)
            self._set_status("registered")
        else:
            get_logger().error("driver.refused", driver=DRIVER, error=request.error)
            self._set_status(f"kubelet refused the driver: {request.error}")
        return registration.RegistrationStatusResponse()

    async def NodePrepareResources(
        self,
        request: dra.NodePrepareResourcesRequest,
        context: grpc.aio.ServicerContext[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse],
    ) -> dra.NodePrepareResourcesResponse:
        """Prepare claims. A failure is reported as the error of its claim."""
        with self._counted():
            return await answer(context, self._metrics, "NodePrepareResources", DRIVER, self._prepare(request))

    async def NodeUnprepareResources(
        self,
        request: dra.NodeUnprepareResourcesRequest,
        context: grpc.aio.ServicerContext[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse],
    ) -> dra.NodeUnprepareResourcesResponse:
        """Undo claims. The answer has an entry for every claim of the request."""
        with self._counted():
            return await answer(context, self._metrics, "NodeUnprepareResources", DRIVER, self._unprepare(request))

    async def NodeWatchResources(
        self,
        request: health.NodeWatchResourcesRequest,
        context: grpc.aio.ServicerContext[health.NodeWatchResourcesRequest, health.NodeWatchResourcesResponse],
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        """Send the complete health at once, after each change, and before kubelet's time limit."""
        sent: tuple[HealthEntry, ...] | None = None
        telling = self._tellings
        seen_at = int(self._clock.now().timestamp())
        deadline = 0.0
        while True:
            ticket = self._state.changed.ticket()
            entries = self._state.claims_health()
            if self._state.is_connected:
                seen_at = int(self._clock.now().timestamp())
            if entries != sent or telling != self._tellings or self._clock.monotonic() >= deadline:
                sent, telling = entries, self._tellings
                deadline = self._clock.monotonic() + self._deadlines.health_refresh_s
                yield self._health_message(entries, seen_at)
            if await is_set_within(ticket, self._clock.timeout(max(0.0, deadline - self._clock.monotonic()))):
                # Lists first: kubelet allocates by them, and only shows health to people.
                await self._clock.sleep(_AFTER_LISTS_S)

    async def _prepare(self, request: dra.NodePrepareResourcesRequest) -> dra.NodePrepareResourcesResponse:
        preparer = await self._forwarder.local_or_forwarded(
            "NodePrepareResources", request, dra.NodePrepareResourcesResponse
        )
        if not isinstance(preparer, ClaimPreparer):
            return preparer

        async def prepare(claim: ClaimKey) -> dra.NodePrepareResourceResponse:
            prepared = await _guarded(claim, "NodePrepareResources", preparer.prepare(claim))
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

        return dra.NodePrepareResourcesResponse(claims=await _for_each(request.claims, prepare))

    async def _unprepare(self, request: dra.NodeUnprepareResourcesRequest) -> dra.NodeUnprepareResourcesResponse:
        preparer = await self._forwarder.local_or_forwarded(
            "NodeUnprepareResources", request, dra.NodeUnprepareResourcesResponse
        )
        if not isinstance(preparer, ClaimPreparer):
            return preparer

        async def unprepare(claim: ClaimKey) -> dra.NodeUnprepareResourceResponse:
            error = await _guarded(claim, "NodeUnprepareResources", preparer.unprepare(claim))
            return dra.NodeUnprepareResourceResponse(error=error)

        return dra.NodeUnprepareResourcesResponse(claims=await _for_each(request.claims, unprepare))

    def _health_message(self, entries: Iterable[HealthEntry], seen_at: int) -> health.NodeWatchResourcesResponse:
        """Build the message with the complete health.

        The devices' own messages are left out when kubelet would not accept the size with them,
        because that would end the stream.
        """
        devices = [self._to_wire(entry, seen_at) for entry in entries]
        message = health.NodeWatchResourcesResponse(devices=devices)
        size_bytes = message.ByteSize()
        if size_bytes <= LIST_LIMIT_BYTES:
            return message
        get_logger().warning(
            "health.shortened",
            driver=DRIVER,
            devices=len(devices),
            size_bytes=size_bytes,
            limit_bytes=LIST_LIMIT_BYTES,
        )
        for device in devices:
            device.message = ""
        return health.NodeWatchResourcesResponse(devices=devices)

    def _to_wire(self, entry: HealthEntry, seen_at: int) -> health.DeviceHealth:
        pool = pool_of_class(self._state.node, class_of_device(DRIVER, entry.device) or "")
        return health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name=pool, device_name=entry.device),
            health=_HEALTH[entry.health],
            last_updated_time=seen_at,
            health_check_timeout_seconds=int(3 * self._deadlines.health_refresh_s),
            message=entry.message[:_MESSAGE_LIMIT],
        )

    def _set_status(self, status: str) -> None:
        self.status = status
        self._watch.announce()


async def _guarded(claim: ClaimKey, method: str, work: Awaitable[R]) -> R | str:
    """Return the result for one claim, or the text of an internal error."""
    try:
        return await work
    except Exception as err:  # noqa: BLE001
        # boundary: gRPC servicer, one claim. An internal error must not fail the other claims of
        # the call.
        get_logger().exception("claim.crashed", method=method, claim_uid=claim.uid)
        return f"claim {claim}: topobus gateway: a bug in {method}: {type(err).__name__}: {err}"


async def _for_each(claims: Iterable[dra.Claim], work: Callable[[ClaimKey], Coroutine[Any, Any, R]]) -> dict[str, R]:
    """Do the same for all claims at once. A slow one does not delay the others."""
    keys = [ClaimKey(namespace=claim.namespace, name=claim.name, uid=ClaimUid(claim.uid)) for claim in claims]
    async with asyncio.TaskGroup() as group:
        tasks = {key.uid: group.create_task(work(key)) for key in keys}
    return {uid: task.result() for uid, task in tasks.items()}
