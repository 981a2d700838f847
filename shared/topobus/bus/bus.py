"""The bus: state, events and asks over one supervised connection. No other room talks to NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self

from topobus.bus.asks.asks import Asks
from topobus.bus.connection.connection import Connection
from topobus.bus.failures import AmbiguousWrite, JetStreamError, NobodyThere
from topobus.bus.login.certificate_facts import CertificateFacts
from topobus.bus.server_config.nats_accounts import readable_streams
from topobus.bus.server_config.streams import stream_names
from topobus.bus.streams import provision
from topobus.bus.streams.events import Events, Received, Span, Start
from topobus.bus.streams.state import Change, ChangeKind, Conflict, Entry, States, Unreadable, Written
from topobus.bus.streams.uplink import Uplink
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


class Bus(States, Events, Asks):
    """State, events and asks of one process over one connection. Make with `connect` or `session`.

    What it reads, writes and asks is in the three modules of its bases. This class begins and ends,
    and makes the streams.

    Shapes: nouns of `topobus.formats.messages.catalogue`, with the parts of their key or subject by
    name: `node="n1", device_class="gpu"`.
    Errors: each method raises ContractError for a part that no subject can hold or a value that no
    contract accepts, and PeerUnavailable when NATS is away. Nothing is kept to be sent later.
    Cost: one round trip to the server for a read, write or ask, unless a method documents another.
    """

    def __init__(self, connection: Connection) -> None:
        States.__init__(self, connection)
        Events.__init__(self, connection)
        Asks.__init__(self, connection)
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
            await self.stop_answering(timeout_s=3.0)
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
        jetstream = self._jetstream
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
        jetstream = self._jetstream
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
        return await provision.inspect(self._jetstream, settings.replicas, store_bytes=settings.store_mib * _MIB)

    def uplink(self) -> Uplink:
        """Return the way to the hub, for the process that reports there what this server stores.
        Only a node's relay uses it.
        """
        return Uplink(self._connection)
