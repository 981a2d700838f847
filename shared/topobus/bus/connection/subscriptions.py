"""Subscriptions that outlive their client: made again on each new client of the connection, and
ended without losing what has arrived.

Nothing is kept for a client that is lost. Messages sent meanwhile are gone, and a reader that must
not miss any reads them again from a stream or a bucket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from topobus.bus.connection.client import GatedClient
from topobus.bus.connection.nats_errors import error_text
from topobus.values.errors import PeerUnavailable

__all__ = ["Callback", "Fresh", "Lasting", "Subscriptions", "drain_quietly"]

Callback = Callable[[Msg], Awaitable[None]]

# For so long after a change of clients, a message that the older client has passed on may still be
# in the newer one's socket.
_TWICE_S = 10.0


class Lasting:
    """A subscription that outlives its client: the connection makes it again on each new one."""

    def __init__(self, subject: str, queue: str, callback: Callback) -> None:
        self.subject = subject
        self.queue = queue
        self.callback = callback
        self.client: GatedClient | None = None
        self.live: Subscription | None = None
        self.seen: set[tuple[str, str]] | None = None
        """While two clients listen: what came already, by subject and
        reply; None: only one does."""

    def is_second(self, message: Msg) -> bool:
        """Return whether this message came by another client before.

        The server gives each message of a queue group to one client only, and a message without a
        reply subject changes nothing when it comes twice.
        """
        if self.seen is None or self.queue or not message.reply:
            return False
        if (message.subject, message.reply) in self.seen:
            return True
        self.seen.add((message.subject, message.reply))
        return False


Fresh = dict[Lasting, Subscription]
"""What listens on a client that is not the present one yet."""


class Subscriptions:
    """The lasting subscriptions of one connection. `on_message` is called for each message, before
    its callback.
    """

    def __init__(self, on_message: Callable[[], None]) -> None:
        self._on_message = on_message
        self._lasting: list[Lasting] = []
        self._draining: set[asyncio.Task[None]] = set()
        self._ending: asyncio.TimerHandle | None = None

    def add(self, subject: str, callback: Callback, queue: str) -> Lasting:
        """Add a subscription. The next client has it, or `attach` makes it on the present one."""
        lasting = Lasting(subject, queue, callback)
        self._lasting.append(lasting)
        return lasting

    async def attach(self, client: GatedClient, lasting: Lasting) -> None:
        """Make one subscription on a client, once.

        Errors: raises PeerUnavailable when the client cannot subscribe.
        """
        if lasting.client is client:
            # Made while this client was being set up, and attached from both sides. Twice would
            # deliver every message twice.
            return
        lasting.client = client
        live = await self._listen(client, lasting)
        if lasting.client is client:
            lasting.live = live
        else:
            # Another client took over meanwhile.
            await _unsubscribe_quietly(live)

    async def _listen(self, client: GatedClient, lasting: Lasting) -> Subscription:
        async def on_message(message: Msg) -> None:
            self._on_message()
            if not lasting.is_second(message):
                await lasting.callback(message)

        try:
            return await client.listen_at_once(lasting.subject, on_message, queue=lasting.queue)
        except nats.errors.Error as err:
            raise PeerUnavailable(f"cannot listen at {lasting.subject}: {error_text(err)}") from err

    async def attach_beside(self, client: GatedClient, fresh: Fresh, *, is_beside: bool) -> bool:
        """Make every subscription that is not in `fresh` yet on a client that is not the present
        one, and add it to `fresh`.

        True when there was any.

        Shapes: is_beside — another client has the subscriptions as well: each message counts once,
        whichever client it comes by, until some time after `hand_over` or `stop_beside`.
        Errors: raises PeerUnavailable when the client cannot subscribe.
        """
        missing = [lasting for lasting in self._lasting if lasting not in fresh]
        for lasting in missing:
            if is_beside and lasting.seen is None:
                lasting.seen = set()
            fresh[lasting] = await self._listen(client, lasting)
        return bool(missing)

    def hand_over(self, client: GatedClient, fresh: Fresh) -> list[Subscription]:
        """Make a second client the present one.

        Return the subscriptions to drain: those of the first client, and those that were ended
        meanwhile.
        """
        drained = [live for lasting, live in fresh.items() if lasting not in self._lasting]
        for lasting in self._lasting:
            if lasting.live is not None:
                drained.append(lasting.live)
            lasting.client, lasting.live = client, fresh[lasting]
        self.stop_beside()
        return drained

    def stop_beside(self) -> None:
        """Stop counting each message once, after the time in which one may still come twice."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_later(_TWICE_S, self._forget_seen)

    def _forget_seen(self) -> None:
        for lasting in self._lasting:
            lasting.seen = None

    def detach_all(self) -> None:
        """Forget the client: it was lost, and its subscriptions with it."""
        for lasting in self._lasting:
            lasting.client = lasting.live = None

    async def remove(self, lasting: Lasting) -> None:
        """Stop listening. Messages that have arrived already are dropped."""
        self._remove(lasting)
        live, lasting.live, lasting.client = lasting.live, None, None
        if live is not None:
            await _unsubscribe_quietly(live)

    async def drain(self, lasting: Lasting, *, timeout_s: float) -> None:
        """Stop listening, and let the callback see everything that the server had sent before,
        within the time.
        """
        self._remove(lasting)
        live, lasting.live = lasting.live, None
        if live is None:
            return
        # A task of its own, never cancelled: cancelling nats-py's flush inside kills the client's
        # read loop (`topobus.bus.connection.connection`).
        task = asyncio.create_task(drain_quietly(live))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        await asyncio.wait({task}, timeout=timeout_s)

    def _remove(self, lasting: Lasting) -> None:
        if lasting in self._lasting:
            self._lasting.remove(lasting)

    @property
    def draining(self) -> frozenset[asyncio.Task[None]]:
        """The tasks that still drain. Await them before closing the client."""
        return frozenset(self._draining)


async def _unsubscribe_quietly(live: Subscription) -> None:
    with suppress(nats.errors.Error):
        await live.unsubscribe()


async def drain_quietly(live: Subscription) -> None:
    """Stop listening, and let the callback see what has been sent.

    A client that is lost meanwhile ends it.
    """
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await live.drain()  # type: ignore[no-untyped-call]  # nats-py leaves it untyped
