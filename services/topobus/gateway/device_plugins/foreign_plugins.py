"""Acts as kubelet for other vendors' device plugins: they register here as they would with kubelet,
without knowing Topobus.

A device host for each resource gives its devices an inventory, health, hints and a ledger, and
offers them to kubelet as device plugin and as DRA driver. At start all sockets in the folder are
removed and kubelet.sock is created again, as kubelet does. This is how plugins notice that they
must register again.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import grpc
import grpc.aio
import msgspec

from topobus.bus.connection.nats_errors import error_text
from topobus.devicekit.containers.cdi_files import write
from topobus.devicekit.host.metrics import DeviceSeries
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import DeviceServiceSettings, DriverSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.gateway.asks import Preference
from topobus.gateway.config import ForeignSettings
from topobus.gateway.device_plugins.device_plugin import BeforeStart
from topobus.gateway.device_plugins.foreign_driver import ForeignDriver, ForeignEndpoint
from topobus.gateway.device_plugins.malformed_calls import Malformed, reading
from topobus.gateway.device_plugins.registration import KUBELET_SOCKET
from topobus.gateway.device_plugins.rules.foreign import ForeignDevice, class_of_resource
from topobus.gateway.device_plugins.sockets import (
    FolderWatch,
    dialling,
    identity,
    serving,
)
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.process.backoff import full_jitter
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.sysfs.tree import HardwareSettings
from topobus.values.errors import ConfigError
from topobus.values.idset import NodeSet
from topobus.values.names import is_extended_resource_name
from topobus.values.outcome import Refusal, refuse
from topobus.values.vendor_profiles import VendorProfile, is_named_by

__all__ = ["ForeignPlugins"]

_VERSION = "v1beta1"
_PART = "foreign-plugins"
# The resources that were registered, so that their devices are Unknown and not forgotten until the
# plugins are back.
_KNOWN_FILE = "topobus-resources.json"
# Seconds before a device host that has ended is started again, at first and at most.
_AGAIN_S, _AGAIN_MOST_S = 0.5, 60.0


class ForeignPlugins(rpc.RegistrationServicer):
    """The Registration service and the plugins that use it."""

    def __init__(
        self,
        settings: ForeignSettings,
        runtime: Runtime,
        cdi_folders: tuple[Path, ...],
        watchdog_s: float,
        *,
        own_prefix: str,
        profiles: Collection[VendorProfile],
    ) -> None:
        """Errors: raises ConfigError when a plugin has registered before with a resource that a
        profile names.
        """
        self._settings = settings
        self._runtime = runtime
        self._cdi_folders = cdi_folders
        self._own_prefix = own_prefix
        self._profiles = profiles
        self._folder = Path(settings.dir)
        self._watch = FolderWatch(self._folder, watchdog_s)
        self._drivers: dict[str, ForeignDriver] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._hosts: dict[str, _HostReport] = {}
        self._series: DeviceSeries | None = None
        """The series of all plugins' devices together. None on a node where no plugin has ever
        registered."""
        self._is_served = False
        self._why_not_served = ""
        self._group: asyncio.TaskGroup | None = None
        self._known = _load(self._folder / _KNOWN_FILE)
        if rivals := [resource for resource in self._known if is_named_by(resource, profiles)]:
            raise ConfigError(
                f"gateway: profiles: {', '.join(profiles)} name {', '.join(rivals)}, with which a device "
                f"plugin has registered in foreign.dir {settings.dir}",
                next_step=f"remove that plugin, the pods with its devices and {self._folder / _KNOWN_FILE}, or take its "  # noqa: E501
                "vendor out of the setting profiles",
                key="profiles",
            )

    def resource_of(self, device_class: str) -> str:
        """Return the resource of a class. Empty for a class of ours."""
        return next((resource for resource in self._known if class_of_resource(resource) == device_class), "")

    def failures(self) -> dict[str, str]:
        """Return, by resource, why its device host has ended and is not running again yet."""
        return {resource: host.failure for resource, host in sorted(self._hosts.items()) if host.failure}

    def before_start(self, device_class: str) -> BeforeStart:
        """Return the function that calls the plugin before each start of a container, as kubelet
        does, even weeks after Allocate.
        """

        async def call(names: list[str]) -> Refusal | None:
            driver = self._drivers.get(device_class)
            if driver is None:
                return refuse("plugin-gone", f"no device plugin has registered for {device_class}")
            return await asyncio.to_thread(driver.pre_start, names)

        return call

    def preference(self, device_class: str, timeout_s: float) -> Preference:
        """Return the function that asks the plugin for its own choice, as kubelet does where the
        plugin's options allow it.
        """

        async def call(available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...] | None:
            driver = self._drivers.get(device_class)
            if driver is None:
                return None
            return await asyncio.to_thread(driver.preferred, available, must_include, size, timeout_s)

        return call

    async def run(self) -> None:
        """Serve until cancelled, and serve again when the socket or the folder disappears.

        Errors: raises ConfigError when the folder cannot be used at the start.
        """
        self._runtime.readiness.set(_PART, is_ready=False, why="not served yet")
        async with asyncio.TaskGroup() as group:
            self._group = group
            for resource in self._known:
                self._serve_devices(resource)
            group.create_task(self._watch.run())
            while True:
                try:
                    await self._serve_once()
                except (ConfigError, OSError) as err:
                    text = f"gateway: foreign.dir: cannot serve in {self._folder}: {err}"
                    if not self._is_served:
                        raise ConfigError(
                            text, next_step="set TOPOBUS_GATEWAY__FOREIGN__DIR", key="foreign.dir"
                        ) from err
                    # An installer may be replacing the folder. What has registered is still followed.
                    get_logger().error("foreign.not-served", error=text)
                    self._why_not_served = text
                    self._report_readiness()
                    await self._runtime.clock.sleep(_AGAIN_S)

    async def _serve_once(self) -> None:
        """Serve until the socket disappears.

        Errors: raises ConfigError or OSError when the folder cannot be used.
        """
        await asyncio.to_thread(_remove_sockets, self._folder)
        path = self._folder / KUBELET_SOCKET
        async with serving(path, lambda server: rpc.add_RegistrationServicer_to_server(self, server)):
            own = identity(path)
            get_logger().info("foreign.served", socket=str(path))
            self._is_served, self._why_not_served = True, ""
            self._report_readiness()
            await self._watch.until(lambda: identity(path) != own)

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.Empty]
    ) -> pb.Empty:
        """Handle a registration in kubelet's order: check, dial, get the options, answer, then
        follow the list.

        The newest registration wins. A plugin that is refused because its device host does not
        start is still followed, because not every plugin registers again.
        """
        refusal = await self._connect(request)
        if refusal:
            get_logger().warning(
                "foreign.refused", resource=request.resource_name, endpoint=request.endpoint, error=refusal
            )
            await context.abort(grpc.StatusCode.UNKNOWN, refusal)
        return pb.Empty()

    async def _connect(self, request: pb.RegisterRequest) -> str:
        resource = request.resource_name
        if request.version != _VERSION:
            return f'requested API version "{request.version}" is not supported. Supported version is ["{_VERSION}"]'
        if not is_extended_resource_name(resource):
            return f'the ResourceName "{resource}" is invalid'
        if resource.partition("/")[0] == self._own_prefix:
            return f"{resource} is of our own domain: resources of {self._own_prefix} are offered by the gateway itself"
        if is_named_by(resource, self._profiles):
            return (
                f"{resource} is offered by the gateway itself: take its vendor out of the setting profiles, or "
                "remove this device plugin"
            )
        other = self.resource_of(class_of_resource(resource))
        if other not in ("", resource):
            return f"{resource} and {other} would both be class {class_of_resource(resource)}"
        if not request.endpoint or "/" in request.endpoint:
            return f"the endpoint {request.endpoint!r} is not a file name"
        socket = self._folder / request.endpoint
        async with dialling(socket) as channel:
            try:
                async with asyncio.timeout(self._settings.dial_s):
                    await channel.channel_ready()
                    options: pb.DevicePluginOptions | Malformed = await channel.unary_unary(
                        "/v1beta1.DevicePlugin/GetDevicePluginOptions",
                        request_serializer=pb.Empty.SerializeToString,
                        response_deserializer=reading(pb.DevicePluginOptions.FromString),
                    )(pb.Empty())
            except TimeoutError:
                return "failed to dial device plugin: context deadline exceeded"
            except grpc.aio.AioRpcError as err:
                return f"failed to get device plugin options: {err.details()}"
        if isinstance(options, Malformed):
            return f"failed to get device plugin options: the answer of {options}"
        await self._record_resource(resource)
        driver = self._serve_devices(resource)
        driver.endpoint = ForeignEndpoint(
            socket=socket,
            needs_pre_start=options.pre_start_required,
            has_preference=options.get_preferred_allocation_available,
        )
        if resource in self._streams:
            self._streams[resource].cancel()
        if self._group is not None:
            self._streams[resource] = self._group.create_task(self._follow(driver, driver.endpoint))
        self._report_readiness()
        if failure := await self._hosts[resource].why_not_begun(self._runtime, self._settings.dial_s):
            return f"{resource} is not served now, and tried again: {failure}"
        get_logger().info(
            "foreign.registered", resource=resource, device_class=driver.device_class, endpoint=request.endpoint
        )
        return ""

    async def _follow(self, driver: ForeignDriver, endpoint: ForeignEndpoint) -> None:
        """Receive lists until the stream ends.

        Then the list is unknown, unless a newer registration serves it.
        """
        why = "it ended the stream"
        async with dialling(endpoint.socket) as channel:
            try:
                lists = channel.unary_stream(
                    "/v1beta1.DevicePlugin/ListAndWatch",
                    request_serializer=pb.Empty.SerializeToString,
                    response_deserializer=reading(pb.ListAndWatchResponse.FromString),
                )
                async for message in lists(pb.Empty()):
                    if isinstance(message, Malformed):
                        why = f"its list of {message}"
                        break
                    endpoint = driver.endpoint = msgspec.structs.replace(
                        endpoint, listed=tuple(map(_device, message.devices))
                    )
            except grpc.aio.AioRpcError as err:
                why = err.details() or err.code().name
        if driver.endpoint is endpoint:
            driver.lost = why
            driver.endpoint = None
            self._report_readiness()
            get_logger().warning("foreign.lost", resource=driver.resource, why=why)

    def _serve_devices(self, resource: str) -> ForeignDriver:
        """Run the device host of a resource, once."""
        device_class = class_of_resource(resource)
        if device_class in self._drivers:
            return self._drivers[device_class]
        driver = ForeignDriver(device_class, resource, self._cdi_folders, allocate_s=self._settings.allocate_s)
        self._drivers[device_class] = driver
        settings = DeviceServiceSettings(
            node=self._runtime.node,
            hardware=HardwareSettings(rescan_s=self._settings.look_s),
            drivers=DriverSettings(timeout_s=2 * self._settings.allocate_s, first_wait_s=self._settings.look_s),
            # The plugin's report counts at once, because it decides itself when a device is healthy
            # again.
            health=HealthSettings(poll_s=self._settings.look_s, hold_s=0.0),
        )
        self._hosts[resource] = report = _HostReport(self._report_readiness)
        if self._group is not None:
            self._group.create_task(self._host(settings, driver, report))
        return driver

    async def _host(self, settings: DeviceServiceSettings, driver: ForeignDriver, report: _HostReport) -> None:
        """Run the device host of one plugin, and run it again when it ends.

        A failure ends only this class's host, with what it has published so far.
        """
        # A readiness of its own, because a plugin that is away must not make the gateway unready.
        own = replace(self._runtime, readiness=report)
        attempt, pause_s = 0, _AGAIN_S
        while True:
            try:
                # Imported for the first plugin, in a thread beside the event loop. On most nodes
                # there is none, and the 2 MiB stay free for the node's state.
                host = await asyncio.to_thread(_load_host)
                self._series = self._series or DeviceSeries(self._runtime.registry)
                registry = DriverRegistry(drivers=(driver,))
                await host.serve_devices(
                    settings, own, driver.device_class, registry=registry, resource=driver.resource, series=self._series
                )
            except Exception as err:  # noqa: BLE001
                # boundary: a vendor's plugin. A failure caused by its devices or its answers must
                # not end the gateway for all others.
                attempt = 0 if report.is_ready else attempt + 1
                pause_s = full_jitter(attempt, least_s=_AGAIN_S, most_s=_AGAIN_MOST_S)
                get_logger().exception(
                    "foreign.host-failed",
                    resource=driver.resource,
                    device_class=driver.device_class,
                    retry_after_s=round(pause_s, 1),
                )
                report.fail(f"its device host ended: {error_text(err)}")
            # Otherwise its handlers would answer, beside those of the next host, with a state that
            # is no longer updated.
            await self._runtime.bus.stop_answering(device_class=driver.device_class)
            await self._runtime.clock.sleep(pause_s)

    def _report_readiness(self) -> None:
        """Report in readiness why plugins cannot register, and which plugins are away.

        It is only a remark, because neither is the gateway's failure.
        """
        if not self._is_served:
            return
        away = sorted(driver.resource for driver in self._drivers.values() if driver.endpoint is None)
        words = [self._why_not_served] if self._why_not_served else []
        words += [f"waiting for the device plugin of {', '.join(away)}"] if away else []
        words += [
            f"{resource}: {remark}" for resource, host in sorted(self._hosts.items()) for remark in host.report_lines()
        ]
        self._runtime.readiness.set(_PART, is_ready=True, why="; ".join(words))

    async def _record_resource(self, resource: str) -> None:
        if resource not in self._known:
            self._known = tuple(sorted((*self._known, resource)))
            await asyncio.to_thread(write, self._folder, _KNOWN_FILE, json.dumps({"resources": self._known}).encode())


class _HostReport(Readiness):
    """The readiness of one plugin's device host, which is a remark in the gateway's own, and
    whether the host has ended.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._news = tell
        self._has_begun = asyncio.Event()
        self.failure = ""
        """Why the host ended. Empty while it runs."""

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Store the part's readiness and update the gateway's remark: the host is running."""
        super().set(part, is_ready, why)
        super().set("host", is_ready=True)
        self.failure = ""
        self._has_begun.set()
        self._news()

    def fail(self, why: str) -> None:
        """Note that the host has ended."""
        super().set("host", is_ready=False, why=why)
        self.failure = why
        self._has_begun.set()
        self._news()

    async def why_not_begun(self, runtime: Runtime, limit_s: float) -> str:
        """Wait until the host has begun or ended. Returns why it ended, empty when it began."""
        if not await is_set_within(self._has_begun, runtime.clock.timeout(limit_s)):
            return f"its device host has not begun within {limit_s:g} s"
        return self.failure

    def report_lines(self) -> list[str]:
        """List what prevents the host from being ready, and its remarks, by part."""
        if self.failure:
            return [self.failure]
        return [text.removeprefix("ready: ") for text in self.report().values() if text != "ready"]


def _load_host() -> ModuleType:
    from topobus.devicekit.host import host

    return host


def _device(device: pb.Device) -> ForeignDevice:
    # Some plugins send -1 for "unknown". Only the exact word means healthy. No node has an id
    # beyond the kernel's range: such a device has no opinion, as with a negative id.
    nodes = tuple(sorted({node.ID for node in device.topology.nodes if 0 <= node.ID <= NodeSet.MAX_ID}))
    return ForeignDevice(id=device.ID, is_healthy=device.health == "Healthy", nodes=nodes)


def _remove_sockets(folder: Path) -> None:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if identity(path) is not None:
            path.unlink(missing_ok=True)


def _load(path: Path) -> tuple[str, ...]:
    try:
        resources = json.loads(path.read_bytes())["resources"] if path.exists() else []
        return tuple(sorted(str(resource) for resource in resources))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(
            f"gateway: foreign.dir: cannot read {path}: {err}", next_step="remove the file; plugins register again"
        ) from err
