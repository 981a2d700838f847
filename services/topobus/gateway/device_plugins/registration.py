"""Registers one resource with kubelet as a device plugin, and registers again whenever kubelet or
the socket went away.

Rules that kubelet imposes: serve before Register. Use a new socket name for each server, because
kubelets before 1.36 confuse two servers of one resource. Register again when kubelet.sock is
another file, when our socket disappeared (kubelet deletes all sockets when it starts), when the
streams ended, or when kubelet opened no stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from topobus.gateway.config import SHORT_NAME, DeadlineSettings
from topobus.gateway.device_plugins.device_plugin import DevicePlugin
from topobus.gateway.device_plugins.sockets import (
    FolderWatch,
    dialling,
    identity,
    serving,
)
from topobus.gateway.device_plugins.vendor_plugins import VendorPlugins
from topobus.gateway.device_plugins.withdrawn_plugin import WithdrawnPlugin
from topobus.gateway.node_state import NodeState, Offer
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError
from topobus.values.names import is_extended_resource_name, to_dns_label

__all__ = ["KUBELET_SOCKET", "PluginRegistrar", "short_name", "socket_pattern"]

KUBELET_SOCKET = "kubelet.sock"
# In seconds: long enough to avoid a busy loop with a kubelet that keeps closing its streams.
_QUICK_S = 0.05
# Timeout of Register in seconds: kubelet dials us back for up to 10 s before it answers.
_REGISTER_S = 15.0
# A registration that has lasted this many seconds was a good one, so no dispute with another plugin
# ended it.
_SETTLED_S = 1.0
_STREAM_CLOSED = "kubelet closed its stream"
# Seconds that a gateway that ends waits for the next one to be registered. Stopping must be over
# within five seconds. On a loaded machine two were not enough.
_HAND_OVER_S = 3.0


def socket_pattern() -> str:
    """Return the pattern of the sockets that gateways create in kubelet's folder."""
    return "topobus-*-*.sock"


def short_name(name: str) -> str:
    """Return the part of a socket's name that identifies a resource, shortened because a unix
    socket's path has 107 bytes at most.

    >>> short_name("gpu-h100"), short_name("gpu-nvidia-h100-80gb-hbm3")
    ('gpu-h100', 'gpu-nvidi-9b1fe0')
    """
    label = to_dns_label(name)
    return (
        label
        if len(label) <= SHORT_NAME
        else f"{label[: SHORT_NAME - 7]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    )


class PluginRegistrar:
    """Serves one resource and keeps it registered."""

    def __init__(
        self,
        offer: Offer,
        plugin: Callable[[Broadcast], DevicePlugin | WithdrawnPlugin],
        *,
        watch: FolderWatch,
        state: NodeState,
        deadlines: DeadlineSettings,
        clock: Clock,
        is_awaited: Callable[[], bool],
        vendors: VendorPlugins | None,
    ) -> None:
        """`plugin` makes the servicer for kubelet's calls on one socket, which announces its
        streams. `vendors` is given where the resource's name is a vendor's.
        """
        self.resource = offer.resource
        self.status = "waiting for kubelet"
        """`registered`, or what prevents it."""
        self.rival = ""
        """The other vendor's device plugin that has the resource. Empty: none."""
        self._plugin = plugin
        self._watch = watch
        self._state = state
        self._deadlines = deadlines
        self._clock = clock
        self._is_awaited = is_awaited
        self._vendors = vendors
        self._is_over = False
        # It includes a vendor's resource name, because several resources of a class could otherwise
        # get the same name.
        self._short_name = short_name(offer.name if vendors is None else re.sub("[^a-z0-9]", "-", offer.resource))
        self._was_registered = False
        # Unique for this process, because kubelet may still use a socket of an earlier one.
        self._token = uuid.uuid4().hex[:8]
        self._server_number = 0

    async def run(self) -> None:
        """Serve and register, again and again.

        For a withdrawn resource it ends when kubelet has the empty list and no pod has a device
        through it.
        """
        while True:
            await self._watch.until(self._watch.folder.is_dir)
            try:
                why, pause_s = await self._one_registration()
            except (ConfigError, OSError) as err:
                why, pause_s = str(err), self._deadlines.retry_s
                if why != self.status:
                    get_logger().error("plugin.serve-failed", resource=self.resource, error=why)
            if self._is_over:
                return
            self._set_status(why)
            await asyncio.sleep(pause_s)

    async def _one_registration(self) -> tuple[str, float]:
        """Serve on a new socket until it can no longer be used.

        Returns the reason, and the seconds to wait before the next registration.
        Errors: raises ConfigError.
        """
        if not is_extended_resource_name(self.resource):
            raise ConfigError(
                f"{self.resource} is no name that kubelet takes for a resource", next_step="rename the class or pool"
            )
        if await self._look_for_rival():
            return self.rival, self._deadlines.retry_s
        self._server_number += 1
        path = self._watch.folder / f"topobus-{self._short_name}-{self._token}-{self._server_number % 100:02d}.sock"
        # It announces its streams where the folder's changes are announced: to wait for one thing
        # costs less than to wait for the first of two, and this is done each `watchdog_s`.
        plugin = self._plugin(self._watch)
        async with serving(path, lambda server: rpc.add_DevicePluginServicer_to_server(plugin, server)):
            own, kubelet_path = identity(path), self._watch.folder / KUBELET_SOCKET
            await self._watch.until(lambda: identity(kubelet_path) is not None or identity(path) != own)
            if identity(path) != own:
                return "kubelet removed our socket", _QUICK_S
            while True:
                kubelet, streams_before = identity(kubelet_path), plugin.streams_seen
                refusal = await self._look_for_rival() or await self._register(kubelet_path, path)
                if refusal:
                    return refusal, self._deadlines.retry_s
                self._was_registered = True
                seen = self._watch.until(
                    lambda: plugin.streams_seen != streams_before,  # noqa: B023 - awaited at once
                    self._clock.timeout(self._deadlines.first_list_s),
                )
                if not await seen:
                    get_logger().warning(
                        "plugin.unwatched", resource=self.resource, waited_s=self._deadlines.first_list_s
                    )
                    return f"kubelet did not ask for the list within {self._deadlines.first_list_s} s", _QUICK_S
                self._set_status("registered")
                since_s = self._clock.monotonic()
                try:
                    why = await self._stay(plugin, path, own, kubelet_path, kubelet)
                except asyncio.CancelledError:
                    if self._is_awaited():
                        await self._hand_over(plugin)
                    raise
                self._is_over = isinstance(plugin, WithdrawnPlugin) and plugin.is_over
                if self._is_over or why != _STREAM_CLOSED or self._clock.monotonic() - since_s < _SETTLED_S:
                    return why, _QUICK_S
                # Register again at once on the same socket. Kubelets with a race (before 1.36)
                # disconnect this gateway when the one that it replaces ends. Until it is registered
                # again, kubelet counts its devices as unhealthy and admits no pod that asks for
                # one.

    async def _look_for_rival(self) -> str:
        """Return which plugin of the vendor has the resource. Registering would take the resource
        away from that plugin, which would then do the same to us.
        """
        if self._vendors is None:
            return ""
        rival = await self._vendors.rival_of(
            self.resource, own_sockets=f"topobus-{self._short_name}-*.sock", is_first=not self._was_registered
        )
        if rival and rival != self.rival:
            step = "remove that device plugin from the node, or take its vendor out of the setting profiles"
            get_logger().error("profile.rival", resource=self.resource, why=rival, next_step=step)
        self.rival = rival
        return rival

    async def _register(self, kubelet_path: Path, path: Path) -> str:
        """Call Register. Returns the error, empty when kubelet accepted."""
        request = pb.RegisterRequest(version="v1beta1", endpoint=path.name, resource_name=self.resource)
        async with dialling(kubelet_path) as channel:
            try:
                await rpc.RegistrationStub(channel).Register(request, timeout=_REGISTER_S)
            except grpc.aio.AioRpcError as err:
                text = err.details() or err.code().name
                why = f"registration failed: {text}"
                if why != self.status:
                    # Logged once, because a dead kubelet would fill the log every second.
                    get_logger().warning(
                        "plugin.register-failed", resource=self.resource, code=err.code().name, error=text
                    )
                return why
        get_logger().info(
            "plugin.registered",
            resource=self.resource,
            endpoint=path.name,
            devices=len(self._state.entries(self.resource)),
        )
        return ""

    async def _stay(
        self,
        plugin: DevicePlugin | WithdrawnPlugin,
        path: Path,
        own: tuple[int, int, int] | None,
        kubelet_path: Path,
        kubelet: tuple[int, int, int] | None,
    ) -> str:
        """Wait for whatever ends this registration."""
        await self._watch.until(
            lambda: not plugin.open_streams or identity(path) != own or identity(kubelet_path) not in (kubelet, None)
        )
        if identity(kubelet_path) not in (kubelet, None):
            why = "kubelet was started again"
        elif identity(path) != own:
            why = "kubelet removed our socket"
        else:
            why = _STREAM_CLOSED
        get_logger().info("plugin.lost", resource=self.resource, why=why)
        return why

    async def _hand_over(self, plugin: DevicePlugin | WithdrawnPlugin) -> None:
        """Keep the list until kubelet has the next gateway's, because without a list every device
        would be unhealthy for a moment.
        """
        limit = self._clock.timeout(_HAND_OVER_S)
        if await self._watch.until(lambda: not plugin.open_streams, limit):
            get_logger().info("plugin.handed-over", resource=self.resource)
        else:
            get_logger().warning("plugin.not-taken-over", resource=self.resource, waited_s=_HAND_OVER_S)

    def _set_status(self, status: str) -> None:
        self.status = status
        self._watch.announce()
