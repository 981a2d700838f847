"""Decides where kubelet's calls about claims are handled: in this process when it holds the node
lock, else in the gateway that holds it.

Flows in: calls to any of our drivers. Flows out: this process' claim preparer, or the other
gateway's answer. Kubelet calls the gateway that registered last. During a roll-over that is
the new one, which does not hold the lock yet; it forwards the calls, so none is lost while
it waits or while the lock changes hands. Both calls are idempotent, so a forwarded call
that was cut off is sent again.
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
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable

__all__ = ["ClaimForwarder"]

R = TypeVar("R", bound=Message)

_SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_RETRY_S = 0.05
# What a gateway answers that ends in this very moment, or has ended.
_ENDING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class ClaimForwarder:
    """One gateway's way to whoever works on claims."""

    def __init__(self, kubelet: KubeletSettings, lock: NodeLock, limit_s: float) -> None:
        self._kubelet = kubelet
        self._lock = lock
        self._limit_s = limit_s
        self._preparer: ClaimPreparer | None = None
        self._opened = asyncio.Event()

    def open(self, preparer: ClaimPreparer) -> None:
        """Work on claims here from now on: it is our turn."""
        self._preparer = preparer
        self._opened.set()

    async def local_or_forwarded(self, driver: str, method: str, request: Message, reply: type[R]) -> ClaimPreparer | R:
        """Give our own preparer when it is our turn, else the answer of the gateway whose turn it
        is.

        Errors: raises CallRefused with the other's own error, PeerUnavailable when
        nobody has the turn for too long.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                while self._preparer is None:
                    answer = await self._pass_on(driver, method, request, reply)
                    if answer is not None:
                        return answer
                    await self._wait_a_moment()
                return self._preparer
        except TimeoutError as err:
            raise PeerUnavailable(
                f"another gateway has this node's turn and did not answer {method} within {self._limit_s} s",
                next_step="see why it hangs, or end it: this one then goes on",
            ) from err

    async def _pass_on(self, driver: str, method: str, request: Message, reply: type[R]) -> R | None:
        """Ask the other gateway; None when it is ending, or about to begin."""
        instance = self._lock.other_instance()
        if instance is None:
            return None
        path = Path(
            driver_sockets(self._kubelet.plugins_dir, self._kubelet.plugins_registry_dir, driver, instance).service
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
                    get_logger().debug(
                        "claims.pass-failed", driver=driver, method=method, instance=instance, error=err.details()
                    )
                    return None
                raise CallRefused(err.code(), err.details() or err.code().name) from err
        get_logger().info("claims.passed-on", driver=driver, method=method, instance=instance)
        return answer

    async def _wait_a_moment(self) -> None:
        try:
            async with asyncio.timeout(_RETRY_S):
                await self._opened.wait()
        except TimeoutError:
            return
