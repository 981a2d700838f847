"""The client of an in-memory nats-server: the part of nats-py's interface that the runtime uses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import nats.errors
from nats.aio.client import ServerVersion
from nats.aio.msg import Msg

if TYPE_CHECKING:
    from lab.memory_nats.memory_server import MemoryNats

__all__ = ["MemoryClient", "Subscription"]

_VERSION = "2.10.27"
_MAX_PAYLOAD = 1024 * 1024
Headers = Mapping[str, str]
Callback = Callable[[Msg], Awaitable[None]]


class Subscription:
    """One subscription of one client: passes messages to its callback, one after the other."""

    def __init__(self, client: MemoryClient, subject: str, queue: str, callback: Callback) -> None:
        self.client = client
        self.subject = subject
        self.queue = queue
        self._callback = callback
        self._arrived: deque[Msg] = deque()
        self._pump: asyncio.Task[None] | None = None

    def deliver(self, message: Msg) -> None:
        """Queue a message. Unlike nats-py, it has no limit beyond which messages are dropped."""
        self._arrived.append(message)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._hand_over(), name=f"memory-nats-{self.subject}")

    async def unsubscribe(self) -> None:
        """Stop, and drop the messages that wait."""
        self.client.server.remove_subscription(self)
        self._arrived.clear()

    async def drain(self) -> None:
        """Stop, and pass on the messages that have arrived."""
        self.client.server.remove_subscription(self)
        if self._pump is not None:
            await asyncio.wait({self._pump})

    def stop(self) -> None:
        """End with the client."""
        self._arrived.clear()
        if self._pump is not None:
            self._pump.cancel()

    async def _hand_over(self) -> None:
        while self._arrived:
            message = self._arrived.popleft()
            try:
                await self._callback(message)
            except Exception as err:  # noqa: BLE001
                # boundary: as nats-py's own loop over a subscription, which calls the error
                # callback and continues.
                await self.client.report_error(err)


class MemoryClient:
    """The part of `nats.aio.client.Client` that the runtime uses, over a `MemoryNats`."""

    def __init__(self, server: MemoryNats) -> None:
        self.server = server
        self.is_connected = False
        self.is_closed = False
        self.max_payload = _MAX_PAYLOAD
        self.last_error: Exception | None = None
        self.connected_server_version = ServerVersion(_VERSION)
        # It has no users.
        self._server_info: dict[str, object] = {}
        self._on_closed: Callable[[], Awaitable[None]] | None = None
        self._on_error: Callable[[Exception], Awaitable[None]] | None = None

    async def connect(
        self,
        servers: list[str],
        *,
        closed_cb: Callable[[], Awaitable[None]] | None = None,
        error_cb: Callable[[Exception], Awaitable[None]] | None = None,
        **_options: object,
    ) -> None:
        """Connect, when the server is at one of these addresses and not stopped.

        Errors: raises NoServersError otherwise.
        """
        self._on_closed, self._on_error = closed_cb, error_cb
        await asyncio.sleep(0)
        if not self.server.is_running or self.server.url not in servers:
            raise nats.errors.NoServersError
        self.server.clients.add(self)
        self.is_connected = True

    async def listen_at_once(self, subject: str, callback: Callback, *, queue: str = "") -> Subscription:
        """Listen. The server knows of it when it has processed the command, in the order of all
        commands.
        """
        self._check()
        subscription = Subscription(self, subject, queue, callback)
        self.server.send(lambda: self.server.listen(subscription))
        return subscription

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: Headers | None = None
    ) -> None:
        """Send. The server processes it later."""
        self._check()
        sent = dict(headers or {})
        self.server.send(lambda: self.server.receive(subject, payload, reply, sent))

    async def close(self) -> None:
        """Disconnect in order."""
        await self.lose(is_failure=False)

    async def lose(self, *, is_failure: bool = True) -> None:
        """Disconnect. `is_failure`: the server or the network caused it."""
        self.server.disconnect(self)
        was_closed, self.is_connected, self.is_closed = self.is_closed, False, True
        if not was_closed and self._on_closed is not None:
            await self._on_closed()
        if is_failure:
            self.last_error = nats.errors.UnexpectedEOF()

    async def report_error(self, err: Exception) -> None:
        """Pass an error to the error callback."""
        if self._on_error is not None:
            await self._on_error(err)

    def _check(self) -> None:
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
