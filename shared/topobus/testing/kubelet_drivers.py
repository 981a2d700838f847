"""kubelet's side of DRA: the plugin watcher, prepare and unprepare of claims, and the health stream.

Flows in: sockets under plugins_registry, claims. Flows out: calls to each driver, prepared claims, device health, events. Order and deadlines follow
the recorded transcript of kubelet 1.36: GetInfo (1 s), NotifyRegistrationStatus (5 s), then the health stream; Node(Un)PrepareResources (45 s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import grpc.aio
from msgspec import Struct
from watchfiles import awatch

from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
from topobus.testing.kubelet_values import ClaimDevice, ClaimReference, EventLog, KubeletTimings, PreparedClaim
from topobus.testing.kubelet_wire import DialError, Tasks, dial, go_error, is_socket, outcome_of, to_plain

__all__ = ["DriverHealth", "Drivers"]

# Label in supported_versions to wire package: they differ for the plugin itself and agree for health.
_PLUGIN_PACKAGES = {"v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1", "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1"}
_RETRY_FIRST_S = 0.1
_RETRY_LIMIT_S = 2.0


class DriverHealth(Struct, frozen=True, kw_only=True):
    """What a driver last said of one device, as kubelet keeps it."""

    state: str
    """`Healthy`, `Unhealthy` or `Unknown`."""
    message: str = ""
    expires_at: float = 0.0


class _Driver:
    """A registered driver."""

    def __init__(self, name: str, socket: Path, channel: grpc.aio.Channel, versions: tuple[str, ...]) -> None:
        self.name = name
        self.socket = socket
        self.channel = channel
        self.versions = versions
        self.package = next(package for label, package in _PLUGIN_PACKAGES.items() if label in versions)


class Drivers:
    """All DRA drivers that the plugin watcher registered."""

    def __init__(
        self,
        folder: Path,
        log: EventLog,
        timings: KubeletTimings,
        monotonic: Callable[[], float],
        *,
        health_api: str,
        wipe_slices: Callable[[str], object] | None = None,
    ) -> None:
        self._folder = folder
        self._log = log
        self._timings = timings
        self._monotonic = monotonic
        self._health_api = health_api
        self._wipe_slices = wipe_slices
        self._tasks = Tasks()
        self._watchers: dict[Path, asyncio.Task[None]] = {}
        self._drivers: dict[str, _Driver] = {}
        self._health: dict[tuple[str, str, str], DriverHealth] = {}
        self._owed: dict[tuple[str, str], ClaimReference] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Watch the folder; sockets that are there already are registered too."""
        self._stopping = asyncio.Event()
        self._wipe("")
        is_watching = asyncio.Event()
        self._tasks.spawn(self._watch_folder(is_watching))
        await is_watching.wait()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        self._stopping.set()
        await self._tasks.close()
        self._watchers.clear()
        for driver in self._drivers.values():
            await driver.channel.close()
        self._drivers.clear()
        self._health.clear()

    def names(self) -> tuple[str, ...]:
        """Drivers registered now."""
        return tuple(sorted(self._drivers))

    def device_health(self, driver: str, pool: str, device: str) -> DriverHealth:
        """What pod status would show for a device; Unknown when nothing was said or it is too old."""
        known = self._health.get((driver, pool, device))
        if known is None:
            return DriverHealth(state="Unknown")
        return known if self._monotonic() <= known.expires_at else DriverHealth(state="Unknown", message=known.message)

    async def prepare(self, claims: Iterable[ClaimReference]) -> tuple[PreparedClaim, ...]:
        """Prepare claims, one call a driver with all its claims; nothing is rolled back when another driver fails."""
        wanted = tuple(claims)
        devices: dict[str, list[ClaimDevice]] = {one.uid: [] for one in wanted}
        errors: dict[str, str] = {}
        for name in sorted({driver for one in wanted for driver in one.drivers}):
            batch = [one for one in wanted if name in one.drivers]
            answers, failure = await self._prepare_one(name, batch)
            for one in batch:
                answer = answers.get(one.uid)
                if failure or answer is None or answer.error:
                    detail = failure or (answer.error if answer else f"NodePrepareResources left out claim {one.namespace}/{one.name}")
                    errors.setdefault(one.uid, detail)
                    continue
                devices[one.uid].extend(_claim_device(name, device) for device in answer.devices)
        return tuple(PreparedClaim(uid=one.uid, devices=tuple(devices[one.uid]), error=errors.get(one.uid, "")) for one in wanted)

    async def unprepare(self, claims: Iterable[ClaimReference]) -> dict[str, str]:
        """Unprepare claims; uid to error text. What fails is owed and repeated when its driver registers again."""
        wanted = tuple(claims)
        errors: dict[str, str] = {}
        for name in sorted({driver for one in wanted for driver in one.drivers}):
            for one in (one for one in wanted if name in one.drivers):
                self._owed[(name, one.uid)] = one
            errors |= await self._pay(name)
        return errors

    async def _prepare_one(self, name: str, claims: list[ClaimReference]) -> tuple[dict[str, dra.NodePrepareResourceResponse], str]:
        driver = self._drivers.get(name)
        if driver is None:
            return {}, f"DRA driver {name} is not registered"
        request = dra.NodePrepareResourcesRequest(claims=[_claim(one) for one in claims])
        self._log.add("NodePrepareResources", name, to_plain(request), self._timings.dra_s)
        call = driver.channel.unary_unary(
            f"/{driver.package}.DRAPlugin/NodePrepareResources",
            request_serializer=dra.NodePrepareResourcesRequest.SerializeToString,
            response_deserializer=dra.NodePrepareResourcesResponse.FromString,
        )
        try:
            answer = await outcome_of(call(request, timeout=self._timings.dra_s))
        except grpc.aio.AioRpcError as err:
            return {}, f"NodePrepareResources failed: {go_error(err)}"
        return dict(answer.claims), ""

    async def _pay(self, name: str) -> dict[str, str]:
        """Call NodeUnprepareResources for all that is owed to one driver."""
        claims = [one for (driver, _), one in sorted(self._owed.items()) if driver == name]
        driver = self._drivers.get(name)
        if not claims:
            return {}
        if driver is None:
            return {one.uid: f"DRA driver {name} is not registered" for one in claims}
        request = dra.NodeUnprepareResourcesRequest(claims=[_claim(one) for one in claims])
        self._log.add("NodeUnprepareResources", name, to_plain(request), self._timings.dra_s)
        call = driver.channel.unary_unary(
            f"/{driver.package}.DRAPlugin/NodeUnprepareResources",
            request_serializer=dra.NodeUnprepareResourcesRequest.SerializeToString,
            response_deserializer=dra.NodeUnprepareResourcesResponse.FromString,
        )
        try:
            answer = await outcome_of(call(request, timeout=self._timings.dra_s))
        except grpc.aio.AioRpcError as err:
            return {one.uid: f"NodeUnprepareResources failed: {go_error(err)}" for one in claims}
        errors: dict[str, str] = {}
        for one in claims:
            if one.uid not in answer.claims:
                errors[one.uid] = f"NodeUnprepareResources left out claim {one.namespace}/{one.name}"
            elif answer.claims[one.uid].error:
                errors[one.uid] = answer.claims[one.uid].error
            else:
                self._owed.pop((name, one.uid), None)
        return errors

    async def _watch_folder(self, is_watching: asyncio.Event) -> None:
        """Keep one task a socket: names that begin with a dot and files that are no sockets are none of ours."""
        self._look()
        is_watching.set()
        # yield_on_timeout: a socket made between the look above and the start of the watch is found at the next turn.
        async for _ in awatch(self._folder, stop_event=self._stopping, debounce=100, step=20, rust_timeout=500, yield_on_timeout=True):
            self._look()

    def _look(self) -> None:
        present = {path for path in self._folder.rglob("*") if not path.name.startswith(".") and is_socket(path)}
        for path in self._watchers.keys() - present:
            self._watchers.pop(path).cancel()
        for path in sorted(present - self._watchers.keys()):
            self._watchers[path] = self._tasks.spawn(self._serve_socket(path))

    async def _serve_socket(self, path: Path) -> None:
        """Register the plugin behind one socket, with back-off, then hold its health stream; removal of the socket cancels this."""
        pause_s = _RETRY_FIRST_S
        driver: _Driver | None = None
        try:
            while driver is None:
                driver = await self._register(path)
                if driver is None:
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _RETRY_LIMIT_S)
            await self._pay(driver.name)
            await self._stream_health(driver)
        finally:
            if driver is not None:
                if self._drivers.get(driver.name) is driver:
                    del self._drivers[driver.name]
                self._log.add("Deregistered", driver.name)
                if not self._stopping.is_set():
                    self._tasks.spawn(self._wipe_later(driver.name))
                await driver.channel.close()

    async def _wipe_later(self, driver: str) -> None:
        """Delete the slices of a driver that stays away."""
        await asyncio.sleep(self._timings.wipe_s)
        if driver not in self._drivers:
            self._wipe(driver)

    def _wipe(self, driver: str) -> None:
        if self._wipe_slices is not None:
            self._wipe_slices(driver)
            self._log.add("WipeSlices", driver)

    async def _register(self, path: Path) -> _Driver | None:
        """Ask who is there, connect to its service, and tell it the outcome; None when it must be tried again."""
        try:
            channel = await dial(path, self._timings.dial_s)
        except DialError:
            return None
        driver: _Driver | None = None
        try:
            stub = registration_rpc.RegistrationStub(channel)
            self._log.add("GetInfo", path.name, deadline_s=self._timings.get_info_s)
            info = await stub.GetInfo(registration.InfoRequest(), timeout=self._timings.get_info_s)
            error = _validate(info)
            if not error:
                socket = Path(info.endpoint) if info.endpoint else path
                try:
                    service = await dial(socket, self._timings.dial_s)
                except DialError as err:
                    error = f"RegisterPlugin error -- dial {socket} failed with err: {err}"
                else:
                    driver = _Driver(info.name, socket, service, tuple(info.supported_versions))
            status = registration.RegistrationStatus(plugin_registered=not error, error=error)
            self._log.add("NotifyRegistrationStatus", info.name, to_plain(status), self._timings.notify_s)
            await stub.NotifyRegistrationStatus(status, timeout=self._timings.notify_s)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as err:
            if driver is not None:
                await driver.channel.close()
            if isinstance(err, asyncio.CancelledError):
                raise
            return None
        finally:
            await channel.close()
        if driver is not None:
            self._drivers[driver.name] = driver
            self._log.wake()
        return driver

    async def _stream_health(self, driver: _Driver) -> None:
        """Hold the health stream, opened again after a pause whenever it ends; nothing to do for a driver that offers none."""
        offered = [api for api in (self._health_api, "v1alpha1", "v1") if f"{api}.DRAResourceHealth" in driver.versions]
        if not offered:
            await asyncio.Event().wait()
        api = offered[0]
        open_stream = driver.channel.unary_stream(
            f"/{api}.DRAResourceHealth/NodeWatchResources",
            request_serializer=health.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health.NodeWatchResourcesResponse.FromString,
        )
        while True:
            self._log.add("NodeWatchResources.open", driver.name, {"api": api})
            try:
                async for message in open_stream(health.NodeWatchResourcesRequest()):
                    self._take(driver.name, message)
            except grpc.aio.AioRpcError:
                # Any end of the stream is answered by a new one.
                pass
            finally:
                self._health = {key: value for key, value in self._health.items() if key[0] != driver.name}
                self._log.add("NodeWatchResources.closed", driver.name, {"api": api})
            await asyncio.sleep(self._timings.health_retry_s)

    def _take(self, driver: str, message: health.NodeWatchResourcesResponse) -> None:
        for one in message.devices:
            state = {health.HEALTHY: "Healthy", health.UNHEALTHY: "Unhealthy"}.get(one.health, "Unknown")
            allowed_s = one.health_check_timeout_seconds if one.health_check_timeout_seconds > 0 else self._timings.health_timeout_s
            self._health[(driver, one.device.pool_name, one.device.device_name)] = DriverHealth(
                state=state, message=one.message, expires_at=self._monotonic() + allowed_s
            )
        self._log.add("NodeWatchResources.send", driver, to_plain(message))


def _validate(info: registration.PluginInfo) -> str:
    if info.type != "DRAPlugin":
        return f"RegisterPlugin error -- no handler registered for plugin type: {info.type}"
    if not any(label in _PLUGIN_PACKAGES for label in info.supported_versions):
        offered = " ".join(info.supported_versions)
        return f"RegisterPlugin error -- plugin validation failed with err: none of the DRA gRPC services are supported: [{offered}]"
    return ""


def _claim(one: ClaimReference) -> dra.Claim:
    return dra.Claim(namespace=one.namespace, uid=one.uid, name=one.name)


def _claim_device(driver: str, one: dra.Device) -> ClaimDevice:
    return ClaimDevice(
        driver=driver,
        pool=one.pool_name,
        device=one.device_name,
        requests=tuple(one.request_names),
        cdi_devices=tuple(one.cdi_device_ids),
        share_id=one.share_id,
    )
