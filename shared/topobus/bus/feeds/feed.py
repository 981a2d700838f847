"""A feed: delivers every message of a stream under a filter, in order, without gap or duplicate,
until its reader stops.

It uses a named, ephemeral, in-memory *pull* consumer. Pulling gives back-pressure: messages that
were not requested stay on the server, so no queue overflows and nothing is dropped at the client.
The consumer is disposable. After a gap in its numbers, missing heartbeats, a lost connection or an
unexpected status it is created again from the last position. When the stream was lost or rolled
back (another creation time, fewer messages than seen, another message at our position), the feed
delivers RESET and then everything from the start.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct, structs
from nats.aio.msg import Msg

from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.connection.subscriptions import Lasting
from topobus.bus.failures import JetStreamError
from topobus.bus.feeds.numbers import read_count
from topobus.bus.feeds.shared_heartbeats import BEAT_S, Seat
from topobus.bus.streams.jetstream import JetStream, StoredMessage
from topobus.process.backoff import full_jitter
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["Delivery", "Feed", "FeedReports", "From", "Mark", "Place"]

# What one pull may bring, in messages of the largest size: bounds our
# memory, whatever the reader does.
_BATCH_BYTES = 8 * 1024 * 1024
# How long a pull waits for messages. Short while the beginning is read: afterwards another
# pull asks for fewer heartbeats.
_EAGER_EXPIRES_S = 5
_EXPIRES_S = 30
# While the beginning is read each feed asks for heartbeats: two of them before its end show that
# the server stalls (see _Snapshot). Afterwards one feed asks for all (see shared_heartbeats),
# because each heartbeat wakes up this process and the server.
_EAGER_HEARTBEAT_S = 1
# Silence is so many missed heartbeats, or the missing status at the end of a pull, and some slack
# for a busy machine.
_MISSED_HEARTBEATS = 2
_BUSY_S = 1.0
# The server removes a consumer without a pull for so long. A reader that paused longer gets a new
# one.
_INACTIVE_S = 30
_NANO = 1_000_000_000


class From(Enum):
    """Where a feed begins."""

    NEWEST_OF_EACH = "last_per_subject"
    """The newest message of each subject, then what comes."""
    ALL = "all"
    NEW = "new"


class Mark(Enum):
    """Items of a feed that are not messages."""

    CAUGHT_UP = "caught-up"
    """All that was there at the start has been delivered. Comes once, and once after each RESET."""
    RESET = "reset"
    """The stream is another one now: what was delivered before is void."""


class Delivery(StoredMessage, frozen=True, kw_only=True):
    """One stored message of a feed."""

    is_replay: bool
    """True for what was there before the feed began."""

    @classmethod
    def of(cls, stored: StoredMessage, *, is_replay: bool) -> Delivery:
        """Make one of a message that was read by itself."""
        return cls(**structs.asdict(stored), is_replay=is_replay)


class Place(Struct, frozen=True):
    """The position of a delivered message, which the server writes into its reply subject."""

    consumer_sequence: int
    sequence: int
    time_ns: int
    pending: int

    @classmethod
    def parse(cls, reply: str) -> Place:
        """Read both forms: nine tokens, and the newer one with domain and account in front (server
        flag js_ack_fc_v2).

        Errors: raises ContractError for anything else.

        >>> Place.parse("$JS.ACK.S.c.1.7.6.1700000000000000001.0")
        Place(consumer_sequence=6, sequence=7, time_ns=1700000000000000001, pending=0)
        """
        tokens = reply.split(".")
        if tokens[:2] == ["$JS", "ACK"] and (len(tokens) == 9 or len(tokens) >= 11):
            last = 9 if len(tokens) == 9 else 11
            try:
                sequence, consumer_sequence, time_ns, pending = map(read_count, tokens[last - 4 : last])
            except ContractError:
                pass
            else:
                return cls(consumer_sequence, sequence, time_ns, pending)
        raise ContractError(f"not a delivery of JetStream: its reply subject is {reply!r}")


class _Reopen(Exception):
    """Raised inside when the consumer must be made again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FeedReports:
    """Tells people of one feed: that it waits, that it reads again, that it began again."""

    def __init__(self, connection: Connection, stream: str, on_waiting: Callable[[str], None] | None) -> None:
        """`on_waiting` is called with the reason, each time that a read failed."""
        self._connection = connection
        self._stream = stream
        self._on_waiting = on_waiting
        self._is_first = True
        self._waits = False

    def failed(self, err: Exception) -> None:
        """Tell that a read failed. The bus logs what comes after a start, so only the first try is
        told to people.
        """
        error = str(err)
        if isinstance(err, JetStreamError) and err.lacks_consumers:
            error = (
                f"stream {self._stream} has as many readers as it may have: end some of them, or wait until theirs "
                "run out"
            )
        self._waits = self._waits or self._is_first
        level = "info" if self._is_first else "debug"
        self._is_first = False
        getattr(get_logger(), level)("feed.waiting", stream=self._stream, error=error)
        if self._on_waiting is not None:
            self._on_waiting(error)

    def read(self) -> None:
        """Tell that the feed reads, if it was told that it waits."""
        if self._waits:
            get_logger().info("feed.healed", stream=self._stream)
        self._is_first = self._waits = False

    def reopened(self, reason: str, position: int) -> None:
        """Count and log that the feed begins again, at the start or at its position."""
        self._connection.metrics.resyncs.labels(self._stream, reason).inc()
        get_logger().info("feed.reopened", stream=self._stream, reason=reason, position=position)


class _Snapshot:
    """Decides when all that was there has been delivered.

    The server's count of pending messages does not show it. When a key is overwritten so often
    meanwhile that its first value is gone, a consumer of the newest of each stalls (2.10, 2.15)
    with nothing pending, or delivers others twice (2.9). Instead: deliver up to the newest message
    that matches, look again, deliver up to what is the newest now. In the first round each key's
    value of the beginning came, unless newer ones replaced it. These are at or before the second
    round's end.
    """

    def __init__(self, jetstream: JetStream, stream: str, pattern: str) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._pattern = pattern
        self._target = 0
        self._rounds = 0

    async def is_complete(self, position: int) -> bool:
        """Say whether the snapshot ends at this position.

        Costs a request in each of the two rounds.
        """
        if position < self._target:
            return False
        if self._rounds == 2:
            return True
        self._rounds += 1
        newest = await self._jetstream.last_message(self._stream, self._pattern)
        self._target = newest.sequence if newest is not None else 0
        return position >= self._target


class _Consumer:
    """One consumer at the server, which has one subscription here. Anything wrong with it raises
    _Reopen: it is disposable.
    """

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._name = f"{connection.instance}-{secrets.token_hex(4)}"
        self._inbox = connection.new_inbox()
        self._arrived: asyncio.Queue[Msg | _Reopen] = asyncio.Queue()
        self._generation = connection.generation
        self._server = ""
        self._seat: Seat | None = None
        """None until the feed has caught up."""
        self._expected = 1
        """The number of the next message."""
        self._wanted = 0
        """How many messages the server still owes us."""
        self._silence_s = 0.0
        """After how many seconds of silence something is wrong."""
        self._idle = 0

    @asynccontextmanager
    async def opened(self, jetstream: JetStream, config: Mapping[str, Any]) -> AsyncGenerator[None, None]:
        """Subscribe and make the consumer; remove both in the end."""
        forget = self._connection.on_change(lambda: self._restart("connection-lost"))
        lasting: Lasting | None = None
        try:
            lasting = await self._connection.subscribe(self._inbox, self._on_message)
            answer = await jetstream.call(
                f"CONSUMER.CREATE.{self._stream}.{self._name}.{config['filter_subject']}",
                {"stream_name": self._stream, "config": {**config, "name": self._name}},
            )
            cluster = answer.get("cluster")
            # Empty where there is only one server. Where the server of a cluster is unknown, no other
            # consumer is known to share this one's fate.
            self._server = str(cluster.get("leader") or self._name) if isinstance(cluster, dict) else ""
            yield
        finally:
            forget()
            if self._seat is not None:
                self._seat.leave()
            if lasting is not None:
                await self._connection.unsubscribe(lasting)
            await self._remove()

    def check_connection(self) -> None:
        """Raise _Reopen when the connection is another one than at the beginning."""
        if self._generation != self._connection.generation or not self._connection.is_connected:
            raise _Reopen("connection-lost")

    async def receive(self, *, is_caught_up: bool) -> tuple[Msg, Place]:
        """Wait for the next message. More are pulled when the server owes none."""
        while True:
            if self._wanted <= 0:
                await self._pull(is_caught_up=is_caught_up)
            message = await self._next()
            status = (message.headers or {}).get("Status") if not message.data else None
            if status is not None and message.subject == self._inbox:
                self._wanted = _read_status(status, message.headers or {}, self._wanted, self._expected)
                self._idle += 1
                if self._idle >= 2 and not is_caught_up:
                    # The server stalls before the end (see _Snapshot). A consumer that starts
                    # at our position does not.
                    raise _Reopen("stalled")
            elif not self._is_stray(message):
                place = Place.parse(message.reply)
                if place.consumer_sequence != self._expected:
                    raise _Reopen("gap")
                self._idle = 0
                self._expected += 1
                self._wanted -= 1
                self._connection.metrics.pending.labels(self._stream).set(place.pending)
                return message, place

    def _restart(self, reason: str) -> None:
        self._arrived.put_nowait(_Reopen(reason))

    async def _on_message(self, message: Msg) -> None:
        self._arrived.put_nowait(message)
        if self._seat is not None:
            self._seat.note_message()

    async def _pull(self, *, is_caught_up: bool) -> None:
        self._wanted = max(1, _BATCH_BYTES // self._connection.max_message_bytes)
        if is_caught_up and self._seat is None:
            self._seat = self._connection.heartbeats.enter(self._server, self._restart)
        if self._seat is None:
            expires_s, heartbeat_s = _EAGER_EXPIRES_S, _EAGER_HEARTBEAT_S
            self._silence_s = _MISSED_HEARTBEATS * heartbeat_s + _BUSY_S
        else:
            expires_s, heartbeat_s = _EXPIRES_S, BEAT_S if self._seat.takes_beats() else 0
            self._silence_s = expires_s + _BUSY_S
        request = {"batch": self._wanted, "expires": expires_s * _NANO}
        if heartbeat_s:
            request["idle_heartbeat"] = heartbeat_s * _NANO
        await self._connection.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}",
            msgspec.json.encode(request),
            reply=self._inbox,
        )

    async def _next(self) -> Msg:
        if self._seat is not None:
            self._seat.is_waiting = True
        if self._arrived.empty():
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await self._arrived.get()
            except TimeoutError as err:
                raise _Reopen("silence") from err
        else:
            message = self._arrived.get_nowait()
        if isinstance(message, _Reopen):
            raise message
        if self._seat is not None:
            self._seat.is_waiting = False
        return message

    def _is_stray(self, message: Msg) -> bool:
        """Return whether a message is another consumer's delivery, which another client had the
        server send to this inbox: it is not of this stream, or not of this filter.
        """
        if f".{self._stream}.{self._name}." in message.reply or not message.reply.startswith("$JS.ACK."):
            return False
        self._connection.metrics.strays.labels(self._stream, "consumer").inc()
        self._connection.quiet.warning("feed.dropped", self._stream, stream=self._stream, reply=message.reply[:200])
        return True

    async def _remove(self) -> None:
        """Ask the server to remove the consumer. If that fails, the server removes it after some
        time without pulls.
        """
        if self._connection.is_connected:
            try:
                await self._connection.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}")
            except PeerUnavailable:
                pass


class Feed:
    """Reads one stream. Use `messages()` once."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        pattern: str,
        start: From,
        *,
        behind: int = 0,
        on_waiting: Callable[[str], None] | None = None,
        has_data: bool = True,
    ) -> None:
        """Make a feed.

        `behind`: skip all up to this sequence. `on_waiting` is called with the reason, each time
        that a read failed. `has_data`: false for headers alone.
        """
        self._has_data = has_data
        self._reports = FeedReports(connection, stream, on_waiting)
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._stream = stream
        self._pattern = pattern
        self._start = start
        self._created = ""
        self._position = behind
        self._position_ns = 0
        self._is_caught_up = False
        self._began_at = 0

    async def messages(self) -> AsyncGenerator[Delivery | Mark, None]:
        """Yield messages and marks until closed."""
        attempt = 0
        while True:
            await self._connection.wait_up()
            try:
                if await self._is_replaced():
                    self._reports.reopened("replaced", self._position)
                    self._position = self._position_ns = 0
                    self._is_caught_up = False
                    yield Mark.RESET
                async with aclosing(self._read_one_consumer()) as items:
                    async for item in items:
                        attempt = 0
                        self._reports.read()
                        yield item
            except _Reopen as err:
                self._reports.reopened(err.reason, self._position)
            except (PeerUnavailable, JetStreamError, ContractError) as err:
                self._reports.failed(err)
            await asyncio.sleep(full_jitter(attempt))
            attempt += 1

    async def _is_replaced(self) -> bool:
        """Return whether the stream is another one than the known one, and remember the present
        one.
        """
        info = await self._jetstream.stream_info(self._stream)
        if info is None:
            raise PeerUnavailable(
                f"stream {self._stream} does not exist", next_step="start topobus-controller: it makes them"
            )
        if not self._created:
            self._created, self._began_at = info.created, info.last_sequence
            if self._start is From.NEW:
                # Fixed now, so that what comes while we are away later is not skipped.
                self._start, self._position, self._is_caught_up = From.ALL, info.last_sequence, True
            return False
        is_other = info.created != self._created or info.last_sequence < self._position or not await self._is_anchored()
        if is_other:
            self._created, self._began_at = info.created, info.last_sequence
        return is_other

    async def _is_anchored(self) -> bool:
        """Return whether the message at our position is the one that we delivered. A store that was
        restored and written to has another one there.
        """
        if not self._position_ns:
            return True
        stored = await self._jetstream.message_at(self._stream, self._position)
        # A missing message is no proof: newer ones of its subject may have replaced it.
        return stored is None or stored.time_ns == self._position_ns

    async def _read_one_consumer(self) -> AsyncGenerator[Delivery | Mark, None]:
        consumer = _Consumer(self._connection, self._stream)
        async with consumer.opened(self._jetstream, self._consumer_config()):
            snapshot = _Snapshot(self._jetstream, self._stream, self._pattern)
            if not self._is_caught_up and await snapshot.is_complete(self._position):
                self._is_caught_up = True
                yield Mark.CAUGHT_UP
            consumer.check_connection()
            while True:
                message, place = await consumer.receive(is_caught_up=self._is_caught_up)
                if place.sequence <= self._position:
                    continue
                yield self._delivery(message, place)
                self._position, self._position_ns = place.sequence, place.time_ns
                if not self._is_caught_up and await snapshot.is_complete(self._position):
                    self._is_caught_up = True
                    yield Mark.CAUGHT_UP

    def _delivery(self, message: Msg, place: Place) -> Delivery:
        return Delivery(
            subject=message.subject,
            headers=message.headers or {},
            data=message.data,
            sequence=place.sequence,
            time_ns=place.time_ns,
            is_replay=place.sequence <= self._began_at,
        )

    def _consumer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "filter_subject": self._pattern,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE_S * _NANO,
            "max_waiting": 8,
        }
        if not self._has_data:
            config["headers_only"] = True
        if self._position:
            return config | {"deliver_policy": "by_start_sequence", "opt_start_seq": self._position + 1}
        return config | {"deliver_policy": self._start.value}


def _read_status(status: str, headers: Headers, wanted: int, expected: int) -> int:
    """Return how many messages the server still owes us after this status.

    Errors: raises _Reopen when the consumer is gone, or when the server's count differs from ours:
    then the last messages were dropped on the way.
    """
    if status == "100":
        if _count(headers, "Nats-Last-Consumer", expected - 1) != expected - 1:
            raise _Reopen("gap")
        return wanted
    if status in ("404", "408"):
        if _count(headers, "Nats-Pending-Messages", wanted) != wanted:
            raise _Reopen("gap")
        return 0
    raise _Reopen(f"status-{status}")


def _count(headers: Headers, key: str, default: int) -> int:
    """Read a number that the server may leave out. A text that is no number reads as a gap."""
    try:
        return read_count(headers[key]) if key in headers else default
    except ContractError:
        return -1
