"""The bus: state, events and asks over one supervised connection. No other room talks to NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from topobus.bus.asks.asks import Asks
from topobus.bus.asks.heavy_lane import Workload
from topobus.bus.connection.connection import Connection
from topobus.bus.failures import AmbiguousWrite, JetStreamError, NobodyThere
from topobus.bus.login.certificate_facts import CertificateFacts
from topobus.bus.server_config.nats_accounts import readable_streams
from topobus.bus.server_config.streams import stream_names
from topobus.bus.streams import provision
from topobus.bus.streams.events import Events, Received, Span, Start
from topobus.bus.streams.jetstream import JetStream
from topobus.bus.streams.state import Change, ChangeKind, Conflict, Entry, States, Unreadable, Written
from topobus.bus.streams.uplink import Uplink
from topobus.engine.health.silence import Answered, Silent
from topobus.formats.messages.nouns import Ask, Event, Notice, State
from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock, SystemClock
from topobus.process.config import NatsSettings
from topobus.process.logging import get_logger
from topobus.process.metrics import BusMetrics
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError, PeerUnavailable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = [
    "AmbiguousWrite",
    "Bus",
    "Change",
    "ChangeKind",
    "Conflict",
    "Entry",
    "NobodyThere",
    "Received",
    "Span",
    "Start",
    "Unreadable",
    "Written",
]

_MIB = 1024 * 1024
# How often the provisioner checks that all streams exist, and the pause after having made some. A
# deleted one is back within seconds.
_STREAM_LOOK_S = 5.0
# So many such looks lie between two comparisons of clocks: a minute.
_CLOCK_LOOKS = 12
_STREAM_PAUSE_S = 1.0

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")


class Bus:
    """State, events and asks of one process over one connection. Make with `connect` or `session`.

    Shapes: nouns of `topobus.formats.messages.catalogue`, with the parts of their key or subject by
    name: `node="n1", device_class="gpu"`.
    Errors: each method raises ContractError for a part that no subject can hold or a value that no
    contract accepts, and PeerUnavailable when NATS is away. Nothing is kept to be sent later.
    Cost: one round trip to the server for a read, write or ask, unless a method documents another.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._states = States(connection)
        self._events = Events(connection)
        self._asks = Asks(connection)
        self._reprovisioning: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._keeping_streams: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        settings: NatsSettings,
        *,
        name: str,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        readiness: Readiness | None = None,
        release: str | None = None,
    ) -> Self:
        """Connect to NATS, however long it takes, and log bus.waiting meanwhile.

        `release` is the release that peers see, in place of this package's.

        Shapes: registry — where the bus is counted; None: nowhere.
        Errors: ConfigError when a file of the login cannot be read.
        """
        connection = Connection(
            settings, name, clock or SystemClock(), BusMetrics(registry), readiness or Readiness(), release=release
        )
        await connection.open()
        return cls(connection)

    @classmethod
    @asynccontextmanager
    async def session(cls, settings: NatsSettings, *, name: str, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Connect for the length of a block, as `connect` does, and `close` at its end."""
        bus = await cls.connect(settings, name=name, clock=clock)
        try:
            yield bus
        finally:
            await bus.close()

    async def close(self) -> None:
        """Answer what has been asked already, then disconnect. Raises nothing.

        Other requests that still wait fail with ConnectionLost.
        """
        if self._stop_listening is not None:
            self._stop_listening()
        for task in (self._reprovisioning, self._keeping_streams):
            if task is not None:
                task.cancel()
        try:
            await self._asks.drain(timeout_s=3.0)
        finally:
            await self._connection.close()

    async def wait_crash(self) -> None:
        """Wait without end, unless this process breaks a promise of its own. That error is then
        raised.
        """
        await asyncio.shield(self._connection.crash)

    @property
    def is_connected(self) -> bool:
        """Say whether messages to the server come back."""
        return self._connection.is_connected

    async def wait_connected(self) -> None:
        """Wait until `is_connected`."""
        await self._connection.wait_up()

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version, or zeros when not connected."""
        return self._connection.server_version

    @property
    def release(self) -> str:
        """The release that peers see for this process."""
        return self._connection.release

    @property
    def clock_ahead_s(self) -> float | None:
        """By how many seconds this machine's clock is ahead of the server's.

        None when that is not known yet.
        """
        return self._connection.server_clock.ahead_s

    @property
    def wants_login(self) -> bool:
        """Return whether the server has users. False when not connected."""
        return self._connection.wants_login

    @property
    def certificate(self) -> CertificateFacts | None:
        """The facts of the server's certificate. None without TLS."""
        return self._connection.certificates.newest

    @property
    def is_encrypted(self) -> bool:
        """Return whether the connection is TLS. False when not connected."""
        return self._connection.is_encrypted

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when the connection is lost and when it is up again. Return what ends the
        calls.

        `is_connected` has the new state when the listener is called.
        """
        return self._connection.on_change(listener)

    async def provision(self) -> None:
        """Make all streams and buckets of the catalogue, or wait for the process that may. Waits
        for JetStream.

        It is done again after each reconnect, because a store may have been lost, and whenever a
        stream turns out to be gone.
        Errors: ConfigError when one exists and differs.
        """
        readiness = self._connection.readiness
        readiness.set("streams", is_ready=False, why="waiting for JetStream")
        jetstream = JetStream(self._connection)
        attempt = 0
        while True:
            try:
                await provision.provision(
                    jetstream,
                    self._connection.settings.replicas,
                    may_create=self._connection.may_provision,
                    provisioner=self._connection.settings.provisioner,
                    store_bytes=self._connection.settings.store_mib * _MIB,
                    only=readable_streams(self._connection.name) if self._connection.is_outside else None,
                )
                break
            except (PeerUnavailable, JetStreamError) as err:
                (get_logger().info if attempt % 10 == 0 else get_logger().debug)(
                    "bus.provision-waiting", error=str(err), attempt=attempt
                )
                readiness.set("streams", is_ready=False, why=str(err))
            await asyncio.sleep(full_jitter(attempt, most_s=5.0))
            attempt += 1
        readiness.set("streams", is_ready=True)
        self._connection.has_missed_stream.clear()
        if self._stop_listening is None:
            self._stop_listening = self._connection.on_change(self._provision_again)
            self._keeping_streams = asyncio.create_task(self._keep_streams(), name="bus-streams")

    def _provision_again(self) -> None:
        if self._reprovisioning is not None:
            self._reprovisioning.cancel()
            self._reprovisioning = None
        if self._connection.is_connected:
            self._reprovisioning = asyncio.create_task(self._provision_quietly(), name="bus-provision")

    async def _provision_quietly(self) -> None:
        try:
            await self.provision()
        except ConfigError as err:
            self._connection.readiness.set("streams", is_ready=False, why=str(err))
            get_logger().error("bus.provision-refused", **{**err.facts, "error": str(err)})

    async def _keep_streams(self) -> None:
        """Make streams again when they are deleted while this process runs.

        A process that reads or writes a stream that is gone learns it from the server. The
        provisioner also checks periodically, because other processes may not make streams.
        """
        jetstream = JetStream(self._connection)
        missed = self._connection.has_missed_stream
        looks = self._connection.name == self._connection.settings.provisioner
        count = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STREAM_LOOK_S if looks else None):
                    await missed.wait()
            count += 1
            try:
                if looks and count % _CLOCK_LOOKS == 0:
                    # The answer carries the server's time. A process that only watches patterns
                    # makes no other request that does.
                    await jetstream.stream_info(stream_names()[0])
                if missed.is_set() or await provision.find_missing(jetstream):
                    get_logger().info("bus.streams-missed")
                    await self._provision_quietly()
            except (PeerUnavailable, JetStreamError) as err:
                get_logger().debug("bus.streams-unseen", error=str(err))
            missed.clear()
            # A write that no stream takes for another reason than a missing stream must not make
            # this a busy loop.
            await asyncio.sleep(_STREAM_PAUSE_S)

    async def inspect(self) -> dict[str, str]:
        """Compare all streams and buckets with the catalogue and make nothing.

        Return each name with what is wrong, an empty text where nothing is.

        Errors: PeerUnavailable when there is no JetStream.
        """
        settings = self._connection.settings
        return await provision.inspect(
            JetStream(self._connection), settings.replicas, store_bytes=settings.store_mib * _MIB
        )

    # state

    async def get(self, state: State[M], **parts: str) -> Entry[M] | None:
        """Read one key from the leader. None when it does not exist.

        Errors: ContractError for bytes that are no such value, PeerUnavailable.
        """
        return await self._states.get(state, parts)

    async def get_or_last(self, state: State[M], **parts: str) -> Entry[M] | Unreadable[M] | None:
        """Read one key as `get` does, but return bytes that are no such value as an answer.

        That answer carries the newest value before them that can be read.

        Errors: PeerUnavailable.
        Cost: where the value cannot be read, one request for each that the bucket has kept.
        """
        return await self._states.get_or_last(state, parts)

    async def fingerprint(self, state: State[Any], **parts: str) -> str:
        """Return a text that differs for every stored value of a key, without decoding the value.

        Empty when the key does not exist.

        Errors: PeerUnavailable.
        Cost: one request.
        """
        return await self._states.fingerprint(state, parts)

    async def put(self, state: State[M], value: M, **parts: str) -> int:
        """Write a key whatever it holds, and return the revision.

        Errors: AmbiguousWrite when the write was not confirmed, PeerUnavailable when it surely was
        not done (StoreFull when there is no room), ContractError for a value that is larger than
        the bucket takes.
        """
        return await self._states.put(state, value, parts)

    async def compare_and_set(
        self, state: State[M], value: M, expected_revision: int, **parts: str
    ) -> Written | Conflict:
        """Write a key that is still at the expected revision. Revision 0: a key that does not
        exist.

        Errors: AmbiguousWrite when the write was not confirmed. It may still happen, so read again
        and write at the new revision.
        """
        return await self._states.compare_and_set(state, value, expected_revision, parts)

    async def delete(self, state: State[Any], **parts: str) -> None:
        """Delete a key, whatever it holds now. A key that does not exist is no error.

        Errors: AmbiguousWrite when the deletion was not confirmed, PeerUnavailable when it surely
        was not done.
        """
        await self._states.delete(state, parts)

    async def compare_and_delete(self, state: State[Any], expected_revision: int, **parts: str) -> Conflict | None:
        """Delete a key that is still at the expected revision.

        After a Conflict the newer value of the other writer is unchanged.

        Errors: AmbiguousWrite when the deletion was not confirmed. It may still happen, so read
        again.
        """
        return await self._states.compare_and_delete(state, expected_revision, parts)

    async def list(
        self, state: State[M], *, on_rejected: Callable[[str, str], None] | None = None, **parts: str
    ) -> tuple[Entry[M], ...]:
        """Read all entries that match, sorted by key.

        An entry that no contract accepts is logged, passed to `on_rejected` by key and reason, and
        left out.

        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        Cost: all matching values cross the wire. Use `watch` for repeated reads.
        """
        return await self._states.list(state, parts, on_rejected)

    async def keys(self, state: State[Any], **parts: str) -> tuple[dict[str, str], ...]:
        """Name all keys that match, by their parts, sorted.

        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        Cost: a consumer of each of the state's buckets, for headers alone. No value is read.
        """
        return await self._states.keys(state, parts)

    async def history(self, state: State[M], *, has_deleted: bool = False, **parts: str) -> tuple[Entry[M], ...]:
        """Read the older values of one key that the bucket has kept, oldest first. They serve when
        the newest cannot be read.

        Shapes: has_deleted — also those from before a deletion; without it a deleted key has no
        history.
        """
        return await self._states.history(state, parts, has_deleted=has_deleted)

    def watch(
        self, state: State[M], on_rejected: Callable[[str, str], None] | None = None, /, **parts: str
    ) -> AsyncGenerator[Change[M], None]:
        """Yield the present entries, SNAPSHOT_END, then every change, without end. A lost
        connection heals by itself.

        RESET is yielded when history was lost. The present entries then come again, and a
        SNAPSHOT_END. A value that no contract accepts is logged and passed to `on_rejected` by key
        and reason, and the reader keeps the last good one. When all parts of the key are given,
        only the newest of several close changes is yielded, because only that one is read.

        Errors: raises nothing while NATS is away or the bucket is gone: it waits.
        Cost: one consumer at the server. For one key there is none: the key is read when the server
        announces a write, and checked every 30 s.
        """
        return self._states.watch(state, parts, on_rejected)

    def watch_to_write(self, state: State[M], /, **parts: str) -> AsyncGenerator[Change[M], None]:
        """Watch as `watch` does, for a writer of these keys at their revisions: a value that no
        contract accepts is yielded as well, so that it can be overwritten.

        Shapes: such a change is UNREADABLE, with the key's revision, and the newest value before it
        that can be read, None where the bucket has kept none.
        """
        return self._states.watch(state, parts, yields_unreadable=True)

    # events

    async def publish(self, event: Event[M], value: M, *, event_id: str, **parts: str) -> int:
        """Store an event, and return its sequence.

        The same id within two minutes is stored once, so an unconfirmed one may be published again.

        Errors: AmbiguousWrite when it was not confirmed, PeerUnavailable when it surely was not
        stored (StoreFull when there is no room).
        """
        return await self._events.publish(event, value, event_id, parts)

    def follow(
        self,
        event: Event[M],
        *,
        start: Start = Start.PRESENT,
        on_waiting: Callable[[str], None] | None = None,
        on_replaced: Callable[[], None] | None = None,
        **parts: str,
    ) -> AsyncGenerator[Received[M], None]:
        """Yield every event that matches, without end, gap or duplicate. A lost connection heals by
        itself.

        Shapes: on_waiting — called with the reason while nothing can be read; on_replaced — called
        when the stream was lost or restored: all events that it has now come again.
        """
        return self._events.follow(event, start, parts, on_waiting, on_replaced)

    async def notify(self, notice: Notice[M], values: Mapping[str, M]) -> None:
        """Send notices to all listeners, each by its event id.

        Best effort: nothing is raised, kept or waited for when NATS is away.

        Cost: no round trip.
        """
        await self._events.notify(notice, values)

    def listen(
        self, notice: Notice[M], *, on_missed: Callable[[int], None] | None = None, **parts: str
    ) -> AsyncGenerator[M, None]:
        """Yield every notice that matches from now on, without end.

        Notices that come while NATS is away, or faster than they are read, are missed.

        Shapes: on_missed — called with the number that came too fast, before the next one that was
        not missed.
        """
        return self._events.listen(notice, parts, on_missed)

    async def last(self, event: Event[M], *, limit: int, **parts: str) -> tuple[Received[M], ...]:
        """Return the newest events that match, oldest first.

        Errors: PeerUnavailable when the stream cannot be read.
        Cost: two requests, and further reads, each twice as far back from the end, until there are
        enough. One event alone needs no consumer.
        """
        return await self._events.last(event, limit, parts)

    async def present(self, event: Event[M], **parts: str) -> tuple[Received[M], ...]:
        """Give the newest event of each subject that matches, in their order in the stream.

        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        """
        return await self._events.present(event, parts)

    async def span(self, event: Event[Any]) -> Span:
        """Return the range of events that an event's stream still has.

        Errors: PeerUnavailable.
        """
        return await self._events.span(event)

    def uplink(self) -> Uplink:
        """Return the way to the hub, for the process that reports there what this server stores.
        Only a node's relay uses it.
        """
        return Uplink(self._connection)

    # asks

    async def ask(self, ask: Ask[Q, R], request: Q, *, timeout_s: float | None = None, **parts: str) -> R:
        """Ask a peer.

        Errors: PeerUnavailable when there is no peer, none answers in time or the peer failed;
        ContractError when one cannot read the other; HardwareError when the peer's hardware failed.
        """
        return await self._asks.ask(ask, request, timeout_s, parts)

    async def is_answered(self, ask: Ask[Any, Any], *, timeout_s: float, **parts: str) -> Answered | Silent:
        """Return whether a process answers an ask, without asking it. Every permitted asker may
        call this.

        Raises nothing for a peer or a server that is away.
        """
        return await self._asks.is_answered(ask, timeout_s, parts)

    async def answer(
        self,
        ask: Ask[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        *,
        concurrency: int = 64,
        workload: Workload[Q, R] | None = None,
        **parts: str,
    ) -> None:
        """Answer an ask from now on, up to `concurrency` at a time.

        A TopobusError of the handler becomes an error answer. More requests wait in a bounded queue
        and are served asker by asker. `workload` decides which requests are expensive: these run
        after the others, few at a time.
        """
        await self._asks.answer(ask, handler, concurrency, parts, workload)

    async def stop_answering(self, *, timeout_s: float = 1.0, device_class: str = "") -> None:
        """Answer nothing from now on (for one class alone, if it is given), and finish what has
        arrived.

        The next instance takes over the answers while this one continues its other work.
        """
        await self._asks.drain(timeout_s=timeout_s, device_class=device_class)
