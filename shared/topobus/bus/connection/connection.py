"""The supervised connection to NATS: one client at a time, which is replaced and never repaired.

nats-py's own reconnecting leaves clients that claim to be connected and receive nothing (read loop
dead after a late PONG), that are closed for good by any -ERR, or that replay requests whose callers
gave up. So it is switched off. When anything goes wrong, the client is thrown away, everything that
waited on it fails at once, and a new client is made, with full jitter, for as long as the process
runs. A canary decides whether a client is alive: every 3 s a message to ourselves must come back,
unless other messages and answers came meanwhile. Subscriptions made here move to the new client.
Other users are informed through `on_change`.

When the files of the login (password, authority) change, a new client is made with the new login
while the present one still runs. It takes over once it receives, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from topobus.bus.connection.canary import Canary
from topobus.bus.connection.client import GatedClient, headers_bytes
from topobus.bus.connection.dialing import Dialer
from topobus.bus.connection.endpoint import read_url
from topobus.bus.connection.nats_errors import NatsErrors, error_text, is_refused_login, next_step
from topobus.bus.connection.reply_inbox import Expectation, ReplyInbox, is_nobody, new_token
from topobus.bus.connection.retirement import Retirement
from topobus.bus.connection.server_clock import ServerClock
from topobus.bus.connection.subscriptions import Callback, Lasting, Subscriptions
from topobus.bus.failures import NobodyThere
from topobus.bus.feeds.shared_heartbeats import SharedHeartbeats
from topobus.bus.login.login import Login, LoginFiles
from topobus.bus.login.server_certificates import ServerCertificates
from topobus.bus.server_config.inboxes import SERVER, inbox_branch
from topobus.bus.server_config.nats_accounts import is_outside
from topobus.bus.server_config.nats_permissions import LEAF_PRINCIPALS, makes_consumers
from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock
from topobus.process.config import NatsSettings
from topobus.process.ended_tasks import end_tasks
from topobus.process.logging import get_logger
from topobus.process.metrics import BusMetrics
from topobus.process.quiet import QuietLog
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable

__all__ = ["OWN_RELEASE", "Connection", "Headers"]

OWN_RELEASE = importlib.metadata.version("topobus")
"""Read once, at the import: it is a file."""

Headers = dict[str, str]

# The server's max_payload counts headers too, nats-py's own check does not, and the
# server then closes the connection.
_HEADER_OVERHEAD = 16
# From this try on, the third, a wait is no longer momentary.
_EARNEST = 2


class Connection:
    """One process's connection. Make with `open`, end with `close`.

    Errors: a message sent while no client is up fails at once with PeerUnavailable; a request
    awaited when a client is lost fails with ConnectionLost.
    """

    def __init__(
        self,
        settings: NatsSettings,
        name: str,
        clock: Clock,
        metrics: BusMetrics,
        readiness: Readiness,
        *,
        new_client: Callable[[str], GatedClient] | None = None,
        release: str | None = None,
    ) -> None:
        """Prepare a connection.

        `new_client` makes each client, in place of nats-py's, from the reason why it must use TLS
        (empty: none). `release` is the release that peers see.
        """
        self.settings = settings
        self.name = name
        self.clock = clock
        self.metrics = metrics
        self.readiness = readiness
        self._servers, self._url = read_url(settings.url)
        self.instance = f"{name}-{secrets.token_hex(4)}"
        self.generation = 0
        self.release = release or OWN_RELEASE
        self.server_clock = ServerClock(readiness)
        self.quiet = QuietLog(clock)
        """For lines that anybody on the bus can cause."""
        self._client: GatedClient | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._up: asyncio.Event = asyncio.Event()
        self._mailbox = ReplyInbox(name)
        self._nats_errors = NatsErrors(metrics, readiness, clock)
        self.certificates = ServerCertificates(settings, metrics, clock)
        self._canary = Canary(self._mailbox)
        self._subscriptions = Subscriptions(self._canary.note_heard)
        self._listeners: list[Callable[[], None]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._dialer = Dialer(
            self, self._servers, self._mailbox, self._subscriptions, self._canary, new_client or GatedClient
        )
        self.files = LoginFiles(settings)
        self.retirement = Retirement()
        """Of clients that others have taken over from."""
        self.heartbeats = SharedHeartbeats()
        """Of all feeds that read over this connection."""
        self.settled_streams: dict[
            str, int
        ] = {}  # `topobus.bus.streams.jetstream` keeps it: the generation in which each was seen to be made.
        self.has_missed_stream = asyncio.Event()
        """Set when the server answered that a stream of the catalogue is gone; cleared by the task
        that provisions the streams."""
        self.crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when this process has broken its own promise and must end."""

    # life

    async def open(self) -> None:
        """Connect, however long it takes."""
        self.readiness.set("bus", is_ready=False, why=f"waiting for NATS at {self._url}")
        self._supervisor = asyncio.create_task(self._supervise(), name="bus-supervisor")
        self._supervisor.add_done_callback(self._on_supervisor_done)
        up = asyncio.create_task(self._up.wait())
        try:
            await asyncio.wait({up, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
            if self._supervisor.done():
                self._supervisor.result()
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            up.cancel()

    async def close(self) -> None:
        """Stop the supervision and the client. Requests that still wait fail with
        ConnectionLost.
        """
        if self._supervisor is not None:
            await end_tasks(self._supervisor)
            self._supervisor = None
        await self.certificates.close()
        self._drop("closed")
        await self.retirement.close()
        if ending := self._dialer.closing | self._subscriptions.draining:
            await asyncio.wait(ending, timeout=1.0)
        if self.generation:
            # A connection that never came up keeps its reason.
            self.readiness.set("bus", is_ready=False, why="closed")

    @property
    def is_connected(self) -> bool:
        """Say whether a client is up: its last canary came back, and nats-py has not closed it
        since.
        """
        return self._up.is_set() and self._client is not None and self._client.is_connected

    @property
    def may_provision(self) -> bool:
        """Return whether we may make streams. Where each process is a user of its own, one of them
        alone has that right.
        """
        is_of_a_kind = self.settings.user in (*LEAF_PRINCIPALS, self.name) or bool(self.settings.zone)
        return self.name == self.settings.provisioner or not is_of_a_kind

    @property
    def is_outside(self) -> bool:
        """Return whether we are in an account without streams. A server with accounts puts each
        kind of process on one side.
        """
        return self.settings.zone == "vendor" or (self.settings.zone == "core" and is_outside(self.name))

    @property
    def makes_consumers(self) -> bool:
        """Say whether we may make consumers."""
        return makes_consumers(self.name)

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version, or zeros when not connected."""
        if self._client is None:
            return (0, 0, 0)
        version = self._client.connected_server_version
        return (version.major, version.minor, version.patch)

    @property
    def wants_login(self) -> bool:
        """Return whether the server has users. False when not connected."""
        return self._client is not None and bool(self._client._server_info.get("auth_required"))

    @property
    def is_encrypted(self) -> bool:
        """Return whether the client uses TLS. False when not connected."""
        return isinstance(self._client, GatedClient) and self._client.is_encrypted

    @property
    def max_message_bytes(self) -> int:
        """The largest message, headers included, that the server takes."""
        return (self._client.max_payload if self._client is not None else 1024 * 1024) - _HEADER_OVERHEAD

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when a client is lost and when a new one is up. Return what ends the
        calls.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def wait_up(self) -> None:
        """Wait until a client is up, as `is_connected` defines it.

        nats-py marks a client closed some turns of the event loop before it calls us. A caller that
        fails to send in between, waits here and tries again would take all turns, and the client
        would never be replaced. So a closed client is reported as lost here, and the wait
        continues.
        """
        while not self.is_connected:
            if self._up.is_set():
                self._lost.set()
                await asyncio.sleep(0)
            await self._up.wait()

    # talk

    def new_inbox(self) -> str:
        """Return a fresh subject where only we listen and only the server may publish."""
        return f"{inbox_branch(self.name, SERVER)}.{new_token()}"

    async def publish(
        self, subject: str, payload: bytes = b"", *, headers: Headers | None = None, reply: str = ""
    ) -> None:
        """Send, or fail at once: nothing is kept for later.

        Errors: PeerUnavailable when not connected, ContractError when the
        message is too large for the server.
        """
        await self._send(self._client, subject, payload, headers, reply)

    async def answer(self, request: Msg, payload: bytes = b"", *, headers: Headers | None = None) -> None:
        """Send an answer, by the client that the request came by while that one lives.

        Errors: as `publish`.
        """
        await self._send(self.retirement.answering(request, self._client), request.reply, payload, headers, "")

    async def _send(
        self, client: Client | None, subject: str, payload: bytes, headers: Headers | None, reply: str
    ) -> None:
        if client is None or not client.is_connected:
            raise PeerUnavailable(f"cannot send to {subject}: not connected to NATS at {self._url}", subject=subject)
        size = len(payload) + headers_bytes(headers or {})
        if size > self.max_message_bytes:
            raise ContractError(
                f"cannot send to {subject}: the message has {size} bytes with headers, the server takes "
                f"{self.max_message_bytes}",
                next_step="raise max_payload in the NATS server's configuration",
                subject=subject,
                size_bytes=size,
            )
        try:
            await client.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.Error as err:
            raise PeerUnavailable(f"cannot send to {subject}: {error_text(err)}", subject=subject) from err

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        timeout_s: float,
        headers: Headers | None = None,
        answerer: str = SERVER,
        prepare: Callable[[Expectation], None] | None = None,
    ) -> Msg:
        """Send, and await one answer of `answerer`, by its connection name. `prepare` gets the
        expectation before anything is sent.

        Errors: NobodyThere and plain PeerUnavailable when surely nothing happened; ConnectionLost
        and TimeoutError when that is not known.
        """
        with self._mailbox.expect(answerer) as expected:
            if prepare is not None:
                prepare(expected)
            await self.publish(subject, payload, headers=headers, reply=expected.subject)
            async with asyncio.timeout(timeout_s):
                answer = await expected.answer
        if is_nobody(answer):
            raise NobodyThere(f"no process answers at {subject}", subject=subject)
        return answer

    async def barrier(self, *, timeout_s: float = 5.0) -> None:
        """Wait until the server has seen all that we sent before.

        It sends a message to ourselves and does not use nats-py's flush: its PING overtakes queued
        commands, and a flush given up kills the read loop later.
        Errors: PeerUnavailable when not connected, TimeoutError when the message does not come back
        in time.
        """
        client = self._client
        if client is None:
            raise PeerUnavailable("not connected to NATS")
        await self._dialer.echo(client, timeout_s)

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> Lasting:
        """Listen at a subject for as long as the connection lives, on whatever client."""
        lasting = self._subscriptions.add(subject, callback, queue)
        client = self._client
        if client is not None and client.is_connected:
            try:
                await self._subscriptions.attach(client, lasting)
            except BaseException:
                # The caller would have no way to end it.
                await self._subscriptions.remove(lasting)
                raise
        return lasting

    async def unsubscribe(self, lasting: Lasting) -> None:
        """Stop listening. Messages that have arrived already are dropped.

        Use `drain` to keep them.
        """
        await self._subscriptions.remove(lasting)

    async def drain(self, lasting: Lasting, *, timeout_s: float = 2.0) -> None:
        """Stop listening, and let the callback see everything that the server had sent already."""
        await self._subscriptions.drain(lasting, timeout_s=timeout_s)

    # supervision

    async def _supervise(self) -> None:
        async with self.files.watched():
            attempt = 0
            while True:
                try:
                    await self._connect()
                except (OSError, TimeoutError, nats.errors.Error, PeerUnavailable, ConfigError) as err:
                    if isinstance(err, ConfigError) and self.generation == 0:
                        raise
                    error = await self.certificates.explain(self._nats_errors.last or error_text(err))
                    self._report_waiting(error, attempt)
                    self.readiness.set("bus", is_ready=False, why=f"waiting for NATS at {self._url}: {error}")
                else:
                    attempt = 0
                    await self._stay()
                await self.files.pause(full_jitter(attempt, most_s=5.0))
                attempt += 1

    def _report_waiting(self, error: str, attempt: int) -> None:
        """Log that there is no client: at the first try, the third, and then every tenth.

        A wait of hours must show, and must not fill the disk. One failed try is normal when the
        server starts at the same time. A longer wait must be reported, and a refused login does not
        resolve by waiting.
        """
        log = get_logger()
        is_reported = attempt in (0, _EARNEST) or attempt % 10 == 0
        if is_reported and is_refused_login(error):
            log.error(
                "bus.waiting",
                url=self._url,
                user=self.settings.user or "none",
                error=error,
                attempt=attempt,
                next_step=next_step(error),
            )
        else:
            tell = (log.warning if attempt >= _EARNEST else log.info) if is_reported else log.debug
            tell("bus.waiting", url=self._url, error=error, attempt=attempt, next_step=next_step(error))

    async def _stay(self) -> None:
        """Return when a client is lost and no other has taken over from it."""
        while (client := self._client) is not None:
            loss = asyncio.create_task(self._wait_for_loss(client), name="bus-loss")
            change = asyncio.create_task(self._change_over(), name="bus-change-over")
            try:
                await asyncio.wait({loss, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(loss, change)
            for task in (task for task in (loss, change) if not task.cancelled()):
                task.result()

    async def _change_over(self) -> None:
        """Return when a client with a newer login has taken over."""
        attempt = 0
        while True:
            login = await self.files.next()
            try:
                client, lost, fresh = await self._dialer.dial(login, self._note_error, is_beside=True)
            except (OSError, TimeoutError, nats.errors.Error, PeerUnavailable) as err:
                # The server may learn of the user later.
                (get_logger().warning if attempt == 0 else get_logger().debug)(
                    "bus.login-refused", url=self._url, error=error_text(err)
                )
                self.metrics.changeovers.labels("refused").inc()
                await self.files.pause(full_jitter(attempt, most_s=5.0))
                attempt += 1
                continue
            former = self._client
            live = self._subscriptions.hand_over(client, fresh)
            self.metrics.changeovers.labels("changed").inc()
            self._come_up(client, lost, login)
            if former is not None:
                self.retirement.retire(former, live)
            return

    def _on_supervisor_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (err := task.exception()) is not None and not self.crash.done():
            self.crash.set_exception(err)
            get_logger().error("bus.supervision-ended", url=self._url, error=repr(err))
            # No task may await the crash (a connect that fails raises it as well).
            self.crash.exception()

    async def _connect(self) -> None:
        login = await self.files.read()
        client, lost, fresh = await self._dialer.dial(login, self._note_error)
        self._subscriptions.hand_over(client, fresh)
        self._come_up(client, lost, login)

    def _come_up(self, client: GatedClient, lost: asyncio.Event, login: Login) -> None:
        """Make a client the present one, and call all listeners."""
        self._client, self._lost = client, lost
        self.files.use(login)
        self.generation += 1
        self._nats_errors.clear_denials()
        self.certificates.take(client)
        self.metrics.connects.inc()
        self.metrics.is_connected.set(1)
        self._up.set()
        self.readiness.set("bus", is_ready=True)
        get_logger().info(
            "bus.connected", url=self._url, server=".".join(map(str, self.server_version)), generation=self.generation
        )
        self._notify_listeners()

    async def _wait_for_loss(self, client: GatedClient) -> None:
        """Return when the client is lost."""
        lost = self._lost
        reason = "closed"
        while not (lost.is_set() or client.is_closed):
            if await self._canary.wait_for_silence(lost) and not await self._dialer.is_alive(client):
                reason = "closed" if lost.is_set() else "canary"
                break
        if client is not self._client:
            return  # Another one took over just now.
        get_logger().warning("bus.lost", url=self._url, reason=reason, error=str(client.last_error or ""))
        self.readiness.set("bus", is_ready=False, why=f"lost NATS at {self._url}")
        self._drop(reason)

    def _note_error(self, client: GatedClient, err: Exception) -> None:
        self.certificates.note_error(err, client)
        self._nats_errors.note(err, is_current=client is self._client)

    def _drop(self, reason: str) -> None:
        """Give a client up: fail what waits on it, and close it aside, since closing may hang with
        the server.
        """
        client, self._client = self._client, None
        was_up = self._up.is_set()
        self._up.clear()
        self.metrics.is_connected.set(0)
        self._subscriptions.detach_all()
        self._mailbox.fail_all()
        if client is not None:
            self._dialer.close_aside(client, reason)
        if was_up:
            self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in list(self._listeners):
            listener()
