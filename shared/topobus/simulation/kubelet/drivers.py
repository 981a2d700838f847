"""kubelet's side of DRA: the plugin watcher, each driver's connection and its state, prepare and
unprepare of claims, and the health stream.

Order and deadlines follow the recorded transcript of kubelet 1.36: GetInfo (1 s),
NotifyRegistrationStatus (5 s), then the health stream. Node(Un)PrepareResources has 45 s. kubelet
1.36 watches the connection to the service socket, so it also detects a driver that died without
removing its sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from msgspec import Struct
from watchfiles import awatch

from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
from topobus.simulation.kubelet.endpoints import DevicePlugins
from topobus.simulation.kubelet.values import (
    ClaimDevice,
    ClaimReference,
    EventLog,
    KubeletTimings,
    PreparedClaim,
)
from topobus.simulation.kubelet.wire import (
    DialError,
    Tasks,
    dial,
    go_error,
    is_socket,
    outcome_of,
    shown,
    to_plain,
)

__all__ = ["DriverHealth", "Drivers"]

_Answer = TypeVar("_Answer", dra.NodePrepareResourcesResponse, dra.NodeUnprepareResourcesResponse)
# Pod workers ask a moment after the registration; in the recording it is 28 ms.
_OWED_AFTER_S = 0.03
_RETRY_FIRST_S = 0.1
_RETRY_LIMIT_S = 2.0
# Label in supported_versions to wire package: they differ for the
# plugin itself and agree for health.
_PLUGIN_PACKAGES = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}


class DriverHealth(Struct, frozen=True, kw_only=True):
    """A driver's last report of one device, as kubelet keeps it."""

    state: str
    """`Healthy`, `Unhealthy` or `Unknown`."""
    message: str = ""
    expires_at: float = 0.0


class Drivers:
    """All DRA drivers that the plugin watcher registered."""

    def __init__(
        self,
        folder: Path,
        log: EventLog,
        timings: KubeletTimings,
        monotonic: Callable[[], float],
        *,
        wipe_slices: Callable[[str], object] | None,
        device_plugins: DevicePlugins,
    ) -> None:
        self._folder = folder
        self._log = log
        self._timings = timings
        self._monotonic = monotonic
        self._wipe_slices = wipe_slices
        self._wipes_at_once = asyncio.Event()
        self._device_plugins = device_plugins
        self._tasks = Tasks()
        self._watchers: dict[Path, asyncio.Task[None]] = {}
        self._drivers: dict[str, list[_Driver]] = {}
        self._health: dict[tuple[str, str, str], DriverHealth] = {}
        self._absent: dict[str, asyncio.Task[None]] = {}
        self._owed: dict[tuple[str, str], ClaimReference] = {}
        self._asked: Counter[tuple[str, str]] = Counter()
        """Of what is owed, for what a call runs now."""
        self._answered = asyncio.Event()
        """Set, and replaced, whenever such a call has ended."""
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Watch the folder, and register the sockets that are there already."""
        self._stopping = asyncio.Event()
        self._wipe("")
        is_watching = asyncio.Event()
        self._tasks.spawn(self._watch_folder(is_watching))
        self._tasks.spawn(self._repeat_owed())
        await is_watching.wait()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        self._stopping.set()
        await self._tasks.close()
        self._watchers.clear()
        self._absent.clear()
        for driver in [instance for instances in self._drivers.values() for instance in instances]:
            await driver.channel.close()
        self._drivers.clear()
        self._health.clear()

    def names(self) -> tuple[str, ...]:
        """Drivers registered now."""
        return tuple(sorted(self._drivers))

    def _driver(self, name: str) -> _Driver | None:
        """The instance to call: of those that are connected the newest, else the newest of all."""
        instances = self._drivers.get(name, [])
        return next(
            (instance for instance in reversed(instances) if instance.is_connected),
            instances[-1] if instances else None,
        )

    def device_health(self, driver: str, pool: str, device: str) -> DriverHealth:
        """The health of a device as pod status would show it.

        Unknown when nothing was reported or it is too old.
        """
        driver_health = self._health.get((driver, pool, device))
        if driver_health is None:
            return DriverHealth(state="Unknown")
        return (
            driver_health
            if self._monotonic() <= driver_health.expires_at
            else DriverHealth(state="Unknown", message=driver_health.message)
        )

    async def prepare(self, claims: Iterable[ClaimReference]) -> tuple[PreparedClaim, ...]:
        """Prepare claims, one call per driver with all its claims.

        Nothing is rolled back when another driver fails.
        """
        wanted = tuple(claims)
        devices: dict[str, list[ClaimDevice]] = {claim_reference.uid: [] for claim_reference in wanted}
        errors: dict[str, str] = {}
        for name in sorted({driver for claim_reference in wanted for driver in claim_reference.drivers}):
            batch = [claim_reference for claim_reference in wanted if name in claim_reference.drivers]
            answers, failure = await self._prepare_one(name, batch)
            for claim_reference in batch:
                answer = answers.get(claim_reference.uid)
                if failure or answer is None or answer.error:
                    detail = failure or (
                        answer.error
                        if answer
                        else f"NodePrepareResources left out claim {claim_reference.namespace}/{claim_reference.name}"
                    )
                    errors.setdefault(claim_reference.uid, detail)
                    continue
                devices[claim_reference.uid].extend(_claim_device(name, device) for device in answer.devices)
        return tuple(
            PreparedClaim(
                uid=claim_reference.uid,
                devices=tuple(devices[claim_reference.uid]),
                error=errors.get(claim_reference.uid, ""),
            )
            for claim_reference in wanted
        )

    async def unprepare(self, claims: Iterable[ClaimReference]) -> dict[str, str]:
        """Unprepare claims, and return uid to error text.

        A claim that fails is due again when its driver registers again.
        """
        wanted = tuple(claims)
        errors: dict[str, str] = {}
        self.owe(wanted)
        for name in sorted({driver for claim_reference in wanted for driver in claim_reference.drivers}):
            errors |= await self._pay(name, {claim_reference.uid for claim_reference in wanted})
        return errors

    def owe(self, claims: Iterable[ClaimReference]) -> None:
        """Note claims that are due to be unprepared at the next comparison, or when their driver
        registers again.
        """
        for claim_reference in claims:
            for name in claim_reference.drivers:
                self._owed[(name, claim_reference.uid)] = claim_reference

    async def compare(self) -> dict[str, str]:
        """Unprepare all claims that are due, when the present calls have ended. Return uid to error
        text.
        """
        while self._asked:
            await self._answered.wait()
        return await self.pay_all()

    async def pay_all(self) -> dict[str, str]:
        """Unprepare all claims that are due, without those of a present call. Return uid to error
        text.
        """
        errors: dict[str, str] = {}
        for name in sorted({driver for driver, _ in self._owed}):
            if name in self._drivers:
                errors |= await self._pay(name)
        return errors

    async def _prepare_one(
        self, name: str, claims: list[ClaimReference]
    ) -> tuple[dict[str, dra.NodePrepareResourceResponse], str]:
        driver = self._driver(name)
        if driver is None:
            return {}, f"DRA driver {name} is not registered"
        answer = await driver.prepare(claims)
        return ({}, answer) if isinstance(answer, str) else (answer, "")

    async def _pay(self, name: str, uids: Collection[str] = ()) -> dict[str, str]:
        """Call NodeUnprepareResources for all claims of one driver that are due, without those of a
        present call, except `uids`.

        One pod worker asks for a claim, and it waits for the answer before it asks again.
        """
        claims = [
            claim
            for (driver, uid), claim in sorted(self._owed.items())
            if driver == name and (uid in uids or not self._asked[(driver, uid)])
        ]
        driver = self._driver(name)
        if not claims:
            return {}
        if driver is None:
            return {claim.uid: f"DRA driver {name} is not registered" for claim in claims}
        keys = [(name, claim.uid) for claim in claims]
        self._asked.update(keys)
        try:
            answer = await driver.unprepare(claims)
        finally:
            self._asked.subtract(keys)
            self._asked = +self._asked
            self._answered.set()
            self._answered = asyncio.Event()
        if isinstance(answer, str):
            return {claim.uid: answer for claim in claims}
        errors: dict[str, str] = {}
        for claim in claims:
            if claim.uid not in answer:
                errors[claim.uid] = f"NodeUnprepareResources left out claim {claim.namespace}/{claim.name}"
            elif answer[claim.uid].error:
                errors[claim.uid] = answer[claim.uid].error
            else:
                self._owed.pop((name, claim.uid), None)
        self._log.add("NodeUnprepareResources.answered", name, {"errors": errors})
        return errors

    async def _repeat_owed(self) -> None:
        """Unprepare again, period after period, the claims that failed."""
        while True:
            await asyncio.sleep(self._timings.reconcile_s)
            await self.pay_all()

    async def _watch_folder(self, is_watching: asyncio.Event) -> None:
        """Keep one task per socket. Names that begin with a dot and files that are no sockets are
        ignored.
        """
        self._scan_sockets()
        is_watching.set()
        # yield_on_timeout: a socket made between the look above and the start of the
        # watch is found at the next turn.
        async for _ in awatch(
            self._folder, stop_event=self._stopping, debounce=100, step=20, rust_timeout=500, yield_on_timeout=True
        ):
            self._scan_sockets()

    def _scan_sockets(self) -> None:
        present = {path for path in self._folder.rglob("*") if not path.name.startswith(".") and is_socket(path)}
        for path in self._watchers.keys() - present:
            self._watchers.pop(path).cancel()
        for path in sorted(present - self._watchers.keys()):
            self._watchers[path] = self._tasks.spawn(self._serve_socket(path))

    async def _serve_socket(self, path: Path) -> None:
        """Register the plugin behind one socket, with back-off, then hold its connection.

        Removal of the socket cancels this.
        """
        pause_s = _RETRY_FIRST_S
        driver: _Driver | None = None
        leave: Callable[[], object] | None = None
        try:
            while driver is None and leave is None:
                registered = await self._register(path)
                if isinstance(registered, _Driver):
                    driver = registered
                elif registered is not None:
                    leave = registered
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _RETRY_LIMIT_S)
            if driver is not None:
                await self._hold(driver)
            else:
                await asyncio.Event().wait()
        finally:
            if leave is not None:
                leave()
            if driver is not None:
                instances = self._drivers.get(driver.name, [])
                if driver in instances:
                    instances.remove(driver)
                if not instances:
                    self._drivers.pop(driver.name, None)
                self._log.add("Deregistered", driver.name)
                self._watch_absence(driver)
                await driver.channel.close()

    async def _hold(self, driver: _Driver) -> None:
        """Keep what belongs to a registered driver until this is cancelled."""

        async def pay() -> None:
            await asyncio.sleep(_OWED_AFTER_S)
            await self._pay(driver.name)

        def drop_health(gone: str) -> None:
            self._health = {key: value for key, value in self._health.items() if key[0] != gone}

        async with asyncio.TaskGroup() as group:
            group.create_task(driver.follow_health(self._take, drop_health))
            group.create_task(pay())
            group.create_task(driver.follow_connection(self._watch_absence))

    def _watch_absence(self, driver: _Driver) -> None:
        """Begin to wait for a driver that has no connected instance any more, or stop waiting
        because it has one.
        """
        name = driver.name
        if any(each_driver.is_connected for each_driver in self._drivers.get(name, [])):
            if name in self._absent:
                self._absent.pop(name).cancel()
        elif name not in self._absent and not self._stopping.is_set():
            self._absent[name] = self._tasks.spawn(self._wipe_later(name))

    def wipe_at_once(self) -> None:
        """Wait no longer for drivers that are away, and for those that go from now on."""
        self._wipes_at_once.set()

    async def _wipe_later(self, driver: str) -> None:
        """Delete the slices of a driver that stayed away."""
        try:
            async with asyncio.timeout(self._timings.wipe_s):
                await self._wipes_at_once.wait()
        except TimeoutError:
            pass
        self._absent.pop(driver, None)
        self._wipe(driver)

    def _wipe(self, driver: str) -> None:
        if self._wipe_slices is not None:
            self._wipe_slices(driver)
            self._log.add("WipeSlices", driver)

    async def _register(self, path: Path) -> _Driver | Callable[[], object] | None:
        """Ask a plugin for its information, connect to its service, and report the outcome to it.

        None when it must be tried again. kubelet's device manager takes over a device plugin that
        comes this way, and the answer is the function that releases it.
        """
        try:
            channel = await dial(path, self._timings.dial_s)
        except DialError as err:
            self._log.add(
                "GetInfo.failed",
                path.name,
                {"error": f"RegisterPlugin error -- dial failed at socket {path}, err: {err}"},
            )
            return None
        taken: _Driver | Callable[[], object] | None = None
        has_info = False
        try:
            stub = registration_rpc.RegistrationStub(channel)
            self._log.add("GetInfo", path.name, deadline_s=self._timings.get_info_s)
            info = await stub.GetInfo(registration.InfoRequest(), timeout=self._timings.get_info_s)
            has_info = True
            taken_or_error = await self._take_plugin(info, Path(info.endpoint) if info.endpoint else path)
            error = taken_or_error if isinstance(taken_or_error, str) else ""
            taken = None if isinstance(taken_or_error, str) else taken_or_error
            status = registration.RegistrationStatus(plugin_registered=not error, error=error)
            self._log.add("NotifyRegistrationStatus", info.name, to_plain(status), self._timings.notify_s)
            await stub.NotifyRegistrationStatus(status, timeout=self._timings.notify_s)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as err:
            if isinstance(err, grpc.aio.AioRpcError):
                asked = "NotifyRegistrationStatus" if has_info else "GetInfo"
                self._log.add(
                    f"{asked}.failed",
                    path.name,
                    {"error": f"RegisterPlugin error -- {asked} at socket {path}, err: {go_error(err)}"},
                )
            if isinstance(taken, _Driver):
                await taken.channel.close()
            elif taken is not None:
                taken()
            if isinstance(err, asyncio.CancelledError):
                raise
            return None
        finally:
            await channel.close()
        if isinstance(taken, _Driver):
            self._drivers.setdefault(taken.name, []).append(taken)
            self._watch_absence(taken)
            self._log.wake()
        return taken

    async def _take_plugin(self, info: registration.PluginInfo, socket: Path) -> _Driver | Callable[[], object] | str:
        """Validate and connect by the plugin's type. A text is the reason for a refusal."""
        if info.type == "DevicePlugin":
            return await self._device_plugins.connect_watched(info.name, socket, tuple(info.supported_versions))
        error = _validate(info)
        if error:
            return error
        if any(driver.socket == socket for driver in self._drivers.get(info.name, [])):
            return (
                f"RegisterPlugin error -- plugin registration failed with err: endpoint {socket} already "
                f"registered for DRA driver plugin {info.name}"
            )
        try:
            service = await dial(socket, self._timings.dial_s)
        except DialError as err:
            return f"RegisterPlugin error -- dial {socket} failed with err: {err}"
        return _Driver(info.name, socket, service, tuple(info.supported_versions), self._log, self._timings)

    def _take(self, driver: str, message: health.NodeWatchResourcesResponse, plain: dict[str, Any]) -> None:
        for device in message.devices:
            state = {health.HEALTHY: "Healthy", health.UNHEALTHY: "Unhealthy"}.get(device.health, "Unknown")
            allowed_s = (
                device.health_check_timeout_seconds
                if device.health_check_timeout_seconds > 0
                else self._timings.health_timeout_s
            )
            self._health[(driver, device.device.pool_name, device.device.device_name)] = DriverHealth(
                state=state, message=device.message, expires_at=self._monotonic() + allowed_s
            )
        self._log.add("NodeWatchResources.send", driver, plain)


def _validate(info: registration.PluginInfo) -> str:
    if info.type != "DRAPlugin":
        return f"RegisterPlugin error -- no handler registered for plugin type: {info.type}"
    if not any(label in _PLUGIN_PACKAGES for label in info.supported_versions):
        offered = " ".join(info.supported_versions)
        return (
            "RegisterPlugin error -- plugin validation failed with err: none of the DRA gRPC services are "
            f"supported: [{offered}]"
        )
    return ""


def _claim_device(driver: str, device: dra.Device) -> ClaimDevice:
    return ClaimDevice(
        driver=driver,
        pool=device.pool_name,
        device=device.device_name,
        requests=tuple(device.request_names),
        cdi_devices=tuple(device.cdi_device_ids),
        share_id=device.share_id,
    )


class _Driver:
    """A registered driver. Several of one name may be registered at once, as in a
    rolling update.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        channel: grpc.aio.Channel,
        versions: tuple[str, ...],
        log: EventLog,
        timings: KubeletTimings,
    ) -> None:
        self.name = name
        self.socket = socket
        self.channel = channel
        self.is_connected = True
        self._versions = versions
        self._package = next(package for label, package in _PLUGIN_PACKAGES.items() if label in versions)
        self._log = log
        self._timings = timings

    async def prepare(self, claims: Iterable[ClaimReference]) -> dict[str, dra.NodePrepareResourceResponse] | str:
        """Call NodePrepareResources. A text is Go's error."""
        request = dra.NodePrepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        answer = await self._ask("NodePrepareResources", request, dra.NodePrepareResourcesResponse)
        return answer if isinstance(answer, str) else dict(answer.claims)

    async def unprepare(self, claims: Iterable[ClaimReference]) -> dict[str, dra.NodeUnprepareResourceResponse] | str:
        """Call NodeUnprepareResources. A text is Go's error."""
        request = dra.NodeUnprepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        answer = await self._ask("NodeUnprepareResources", request, dra.NodeUnprepareResourcesResponse)
        return answer if isinstance(answer, str) else dict(answer.claims)

    async def _ask(self, method: str, request: Message, answer: type[_Answer]) -> _Answer | str:
        self._log.add(method, self.name, to_plain(request), self._timings.dra_s)
        call = self.channel.unary_unary(
            f"/{self._package}.DRAPlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return await outcome_of(call(request, timeout=self._timings.dra_s))
        except grpc.aio.AioRpcError as err:
            return f"{method} failed: {go_error(err)}"

    async def follow_connection(self, on_change: Callable[[_Driver], None]) -> None:
        """Call back, without end, when the connection is lost and when it is up again."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            is_connected = state is grpc.ChannelConnectivity.READY
            if is_connected is not self.is_connected:
                self.is_connected = is_connected
                self._log.add("Connected" if is_connected else "Disconnected", self.name, {"socket": self.socket.name})
                on_change(self)
            await self.channel.wait_for_state_change(state)

    async def follow_health(
        self,
        take: Callable[[str, health.NodeWatchResourcesResponse, dict[str, Any]], None],
        forget: Callable[[str], None],
    ) -> None:
        """Hold the health stream, opened again after a pause whenever it ends.

        Does nothing for a driver that offers none.
        """
        # 1.36 opens v1alpha1 although v1 is offered.
        offered = [api for api in ("v1alpha1", "v1") if f"{api}.DRAResourceHealth" in self._versions]
        if not offered:
            return
        api = offered[0]
        open_stream = self.channel.unary_stream(
            f"/{api}.DRAResourceHealth/NodeWatchResources",
            request_serializer=health.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health.NodeWatchResourcesResponse.FromString,
        )
        while True:
            self._log.add("NodeWatchResources.open", self.name, {"api": api})
            try:
                async for message in open_stream(health.NodeWatchResourcesRequest()):
                    take(self.name, message, await shown(message))
            except grpc.aio.AioRpcError:
                # Any end of the stream is answered by a new one.
                pass
            finally:
                forget(self.name)
                self._log.add("NodeWatchResources.closed", self.name, {"api": api})
            await asyncio.sleep(self._timings.health_retry_s)


def _claim(claim_reference: ClaimReference) -> dra.Claim:
    return dra.Claim(namespace=claim_reference.namespace, uid=claim_reference.uid, name=claim_reference.name)
