"""Decides where kubelet's calls about claims are handled: in this process when it holds the node
lock, else in the gateway that holds it.

Kubelet calls the gateway that registered last. During a roll-over that is the new one, which does
not hold the lock yet. It forwards the calls, so none is lost while it waits or while the lock
changes hands. Prepare and unprepare are idempotent, so a forwarded call that was cut off is sent
again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from topobus.gateway.claims.claims import ClaimPreparer
from topobus.gateway.claims.rules.socket_paths import driver_sockets
from topobus.gateway.config import KubeletSettings
from topobus.gateway.device_plugins.sockets import CallRefused, dialling
from topobus.gateway.node_lock import NodeLock
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.values.dra_names import DRIVER
from topobus.values.errors import PeerUnavailable

__all__ = ["ClaimForwarder"]

R = TypeVar("R", bound=Message)

_SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_RETRY_S = 0.05
# The answers of a gateway that is ending or has ended.
_ENDING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class ClaimForwarder:
    """Passes calls to the gateway that holds the node lock."""

    def __init__(self, kubelet: KubeletSettings, lock: NodeLock, limit_s: float) -> None:
        self._kubelet = kubelet
        self._lock = lock
        self._limit_s = limit_s
        self._preparer: ClaimPreparer | None = None
        self._opened = asyncio.Event()

    def open(self, preparer: ClaimPreparer) -> None:
        """Handle claims in this process from now on, because it holds the node lock."""
        self._preparer = preparer
        self._opened.set()

    async def local_or_forwarded(self, method: str, request: Message, reply: type[R]) -> ClaimPreparer | R:
        """Return this gateway's preparer when it holds the node lock, else the answer of the
        gateway that holds it.

        Errors: raises CallRefused with the other gateway's own error, PeerUnavailable when no
        gateway holds the lock for too long.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                while self._preparer is None:
                    answer = await self._pass_on(method, request, reply)
                    if answer is not None:
                        return answer
                    await is_set_within(self._opened, asyncio.timeout(_RETRY_S))
                return self._preparer
        except TimeoutError as err:
            raise PeerUnavailable(
                f"another gateway holds this node's lock and did not answer {method} within {self._limit_s} s",
                next_step="find out why it hangs, or end it: then this one takes over",
            ) from err

    async def _pass_on(self, method: str, request: Message, reply: type[R]) -> R | None:
        """Call the other gateway. None when it is ending, or about to begin.

        Errors: raises CallRefused with its error.
        """
        instance = self._lock.other_instance()
        if instance is None:
            return None
        path = Path(
            driver_sockets(self._kubelet.plugins_dir, self._kubelet.plugins_registry_dir, DRIVER, instance).service
        )
        async with dialling(path) as channel:
            call = channel.unary_unary(
                f"{_SERVICE}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,
            )
            try:
                answer = await call(request, timeout=self._limit_s)
            except grpc.aio.AioRpcError as err:
                if err.code() in _ENDING:
                    get_logger().debug("claims.pass-failed", method=method, instance=instance, error=err.details())
                    return None
                raise CallRefused(err.code(), err.details() or err.code().name) from err
        get_logger().info("claims.passed-on", method=method, instance=instance)
        return answer
