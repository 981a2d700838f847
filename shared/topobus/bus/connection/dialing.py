"""Makes the clients of a connection: each has all subscriptions of the connection, and has received
a message of its own, before it is used.

A client is made alone or beside a live one. `topobus.bus.connection.connection` decides which of
them is the present one, and when another is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import nats.errors
from nats.aio.msg import Msg

from topobus.bus.connection.canary import Canary
from topobus.bus.connection.client import GatedClient, connect_client
from topobus.bus.connection.endpoint import why_tls
from topobus.bus.connection.nats_errors import error_text
from topobus.bus.connection.reply_inbox import ReplyInbox
from topobus.bus.connection.retirement import close_quietly
from topobus.bus.connection.subscriptions import Fresh, Subscriptions
from topobus.bus.login.login import Login
from topobus.values.errors import PeerUnavailable

if TYPE_CHECKING:
    from topobus.bus.connection.connection import Connection

__all__ = ["Dialer"]

_CANARY_TIMEOUT_S = 1.5
# The first message to ourselves on a new client: the server may still be busy with all clients that
# reconnected at the same time.
_FIRST_CANARY_TIMEOUT_S = 2.0


class Dialer:
    """Makes clients, checks whether they live, and closes those that do not."""

    def __init__(
        self,
        connection: Connection,
        servers: list[str],
        mailbox: ReplyInbox,
        subscriptions: Subscriptions,
        canary: Canary,
        new_client: Callable[[str], GatedClient],
    ) -> None:
        self._connection = connection
        self._servers = servers
        self._mailbox = mailbox
        self._subscriptions = subscriptions
        self._canary = canary
        self._new_client = new_client
        self.closing: set[asyncio.Task[None]] = set()
        """Clients that are ending; closing the connection waits for them."""

    async def dial(
        self, login: Login, on_error: Callable[[GatedClient, Exception], None], *, is_beside: bool = False
    ) -> tuple[GatedClient, asyncio.Event, Fresh]:
        """Make a client that has all subscriptions and receives.

        Shapes: is_beside — another client is live and continues; result — the client, the event
        that is set when it is lost, and the argument for `Subscriptions.hand_over`, which must be
        called without another turn of the loop.
        Errors: raises OSError, TimeoutError, nats.errors.Error or PeerUnavailable when there is
        none; nothing has changed then.
        """
        settings = self._connection.settings
        client = self._new_client(why_tls(settings))
        lost = asyncio.Event()
        fresh: Fresh = {}

        async def on_closed() -> None:
            lost.set()

        async def note_error(err: Exception) -> None:
            on_error(client, err)

        try:
            await connect_client(
                client,
                self._servers,
                settings,
                name=self._connection.instance,
                login=login,
                on_closed=on_closed,
                on_error=note_error,
            )
            if not is_beside:
                self._mailbox.renew()
            await client.listen_at_once(self._mailbox.pattern, self._on_answer)
            await self._subscriptions.attach_beside(client, fresh, is_beside=is_beside)
            await self.echo(client, _FIRST_CANARY_TIMEOUT_S)
            # Repeated until no subscription was added meanwhile, because the caller makes it the
            # present client without another turn of the loop.
            while await self._subscriptions.attach_beside(client, fresh, is_beside=is_beside):
                await self.echo(client, _FIRST_CANARY_TIMEOUT_S)
        except BaseException:
            self._subscriptions.stop_beside()
            self.close_aside(client, "connect")
            raise
        return client, lost, fresh

    async def is_alive(self, client: GatedClient) -> bool:
        """Return whether a client sends and receives."""
        # Twice: when our own process was stopped, the first timeout fires before the echo in the
        # socket has been read.
        for _ in range(2):
            try:
                await self.echo(client, _CANARY_TIMEOUT_S)
            except TimeoutError:
                continue
            except PeerUnavailable:
                return False
            return True
        return False

    async def echo(self, client: GatedClient, timeout_s: float) -> None:
        """Send a message to ourselves by a client, and wait until it comes back by the same.

        Errors: raises PeerUnavailable when it cannot be sent, TimeoutError when
        it does not come back in time.
        """
        started = self._connection.clock.monotonic()
        with self._mailbox.expect(self._connection.name) as expected:
            # While two clients listen, the echo must come by the client under test.
            expected.accepts = lambda message: message._client is client
            try:
                await client.publish(expected.subject, b"")
            except nats.errors.Error as err:
                raise PeerUnavailable(f"cannot reach NATS: {error_text(err)}") from err
            async with asyncio.timeout(timeout_s):
                await expected.answer
        self._connection.metrics.echo_s.observe(self._connection.clock.monotonic() - started)

    def close_aside(self, client: GatedClient, reason: str) -> None:
        """Close a client without waiting for it, which may hang with its server."""
        self._connection.metrics.losses.labels(reason).inc()
        task = asyncio.create_task(close_quietly(client))
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    async def _on_answer(self, message: Msg) -> None:
        self._mailbox.take(message)
        self._canary.put_off()
