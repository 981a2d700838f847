"""Subscriptions that outlive their client: made again on each new client of the connection, and ended without losing what has arrived.

Flows in: subjects with callbacks, and each new client. Flows out: messages to the callbacks, and word of each one that comes. Nothing is kept for a client that is lost: what was
sent meanwhile is gone, and who must not miss anything reads it from a stream or a bucket again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from topobus.domain.errors import PeerUnavailable
from topobus.runtime.nats_errors import error_text

__all__ = ["PENDING_BYTES", "PENDING_MESSAGES", "Callback", "Lasting", "Subscriptions"]

Callback = Callable[[Msg], Awaitable[None]]

# Pending limits of one subscription. nats-py's own (512 Ki messages, 128 MiB) are more memory than a whole service may use.
PENDING_MESSAGES = 4096
PENDING_BYTES = 8 * 1024 * 1024


class Lasting:
    """A subscription that outlives its client: the connection makes it again on each new one."""

    def __init__(self, subject: str, queue: str, callback: Callback) -> None:
        self.subject = subject
        self.queue = queue
        self.callback = callback
        self.client: Client | None = None
        self.live: Subscription | None = None


class Subscriptions:
    """The lasting subscriptions of one connection; `on_heard` is called for each message, before its callback."""

    def __init__(self, on_heard: Callable[[], None]) -> None:
        self._on_heard = on_heard
        self._lasting: list[Lasting] = []
        self._draining: set[asyncio.Task[None]] = set()

    def add(self, subject: str, callback: Callback, queue: str) -> Lasting:
        """Take a subscription in; the next client has it, or `attach` puts it on the present one."""
        lasting = Lasting(subject, queue, callback)
        self._lasting.append(lasting)
        return lasting

    async def attach_all(self, client: Client) -> None:
        """Put every subscription on a new client.

        Errors: raises PeerUnavailable when the client cannot listen.
        """
        for lasting in list(self._lasting):
            await self.attach(client, lasting)

    async def attach(self, client: Client, lasting: Lasting) -> None:
        """Put one subscription on a client, once.

        Errors: raises PeerUnavailable when the client cannot listen.
        """
        if lasting.client is client:
            # Made while this client was being set up, and attached from both sides: once is enough, twice would be every message twice.
            return
        lasting.client = client

        async def on_message(message: Msg) -> None:
            self._on_heard()
            await lasting.callback(message)

        try:
            lasting.live = await client.subscribe(
                lasting.subject,
                queue=lasting.queue,
                cb=on_message,
                pending_msgs_limit=PENDING_MESSAGES,
                pending_bytes_limit=PENDING_BYTES,
            )
        except nats.errors.Error as err:
            raise PeerUnavailable(f"cannot listen at {lasting.subject}: {error_text(err)}") from err

    def detach_all(self) -> None:
        """Forget the client: it was lost, and its subscriptions with it."""
        for lasting in self._lasting:
            lasting.client = lasting.live = None

    async def remove(self, lasting: Lasting) -> None:
        """Stop listening. Messages that have arrived already are dropped."""
        self._remove(lasting)
        if lasting.live is not None:
            with suppress(nats.errors.Error):
                await lasting.live.unsubscribe()
            lasting.live = None

    async def drain(self, lasting: Lasting, *, timeout_s: float) -> None:
        """Stop listening, and let the callback see everything that the server had sent already, within the time."""
        self._remove(lasting)
        live, lasting.live = lasting.live, None
        if live is None:
            return
        # A task of its own, never cancelled: cancelling nats-py's flush inside kills the client's read loop (`topobus.runtime.connection`).
        task = asyncio.create_task(_drain_quietly(live))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        await asyncio.wait({task}, timeout=timeout_s)

    def _remove(self, lasting: Lasting) -> None:
        if lasting in self._lasting:
            self._lasting.remove(lasting)

    @property
    def draining(self) -> frozenset[asyncio.Task[None]]:
        """What still drains; whoever closes the client waits for it."""
        return frozenset(self._draining)


async def _drain_quietly(live: Subscription) -> None:
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await live.drain()  # type: ignore[no-untyped-call]  # nats-py leaves it untyped
