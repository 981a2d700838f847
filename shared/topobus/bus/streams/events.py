"""Events on the bus: CloudEvents in streams, published with acknowledgement, followed without gap
or duplicate. And notices, which are neither stored nor acknowledged.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from nats.aio.msg import Msg

from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.failures import JetStreamError
from topobus.bus.feeds.feed import Delivery, Feed, From, Mark
from topobus.bus.feeds.pattern_feed import PatternFeed
from topobus.bus.feeds.read_timeout import ReadTimeout
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.nouns import Event, Notice, from_token, stored_subject
from topobus.formats.messages.releases import RELEASE
from topobus.process.logging import get_logger
from topobus.process.tracing import injected
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.timestamps import rfc3339

__all__ = ["Events", "Received", "Span", "Start"]

M = TypeVar("M")

# The header by which a stream detects a repetition.
_ID = "Nats-Msg-Id"
# Printable ASCII that a CloudEvents header carries as it is; space, quote and percent are
# escaped (HTTP binding 3.1.3.2).
_SAFE = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
# So many notices wait for their reader, some KiB each; more are dropped, and counted.
_UNREAD_NOTICES = 4096


class Start(Enum):
    """Where a follower begins."""

    PRESENT = "present"
    """The newest event of each subject, then what comes."""
    ALL = "all"
    NEW = "new"


@dataclass(frozen=True, kw_only=True)
class Received(Generic[M]):
    """One event."""

    parts: dict[str, str]
    sequence: int
    time: str
    """When the stream stored it; RFC 3339, UTC."""
    value: M
    is_replay: bool
    """True for what was there before the follower began."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The range of events that a stream still has."""

    created: str
    """When the stream was made: another time is another stream."""
    oldest: int
    """The sequence of the oldest event that is still there; one more than `newest` when none is."""
    newest: int


class Events:
    """Publishes and follows events, sends and hears notices.

    Shapes: parts — of the subject by name.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._source = quote(f"/topobus/{connection.name}", safe=_SAFE)

    async def publish(self, event: Event[M], value: M, *, event_id: str, **parts: str) -> int:
        """Store an event, and return its sequence.

        The same id within two minutes is stored once, so an unconfirmed one may be published again.

        Errors: AmbiguousWrite when it was not confirmed, PeerUnavailable when it surely was not
        stored (StoreFull when there is no room).
        """
        subject = event.subject(**parts)
        headers = {_ID: event_id, **self._attributes(event, event_id, parts, self._now())}
        outcome = "failed"
        try:
            sequence = await self._store_event(event.stream, subject, encode(value), headers)
            outcome = "written"
            return sequence
        except JetStreamError as err:
            raise err.refusal(f"cannot publish {subject}", event.stream) from err
        finally:
            self._connection.metrics.writes.labels(event.name, outcome).inc()

    async def notify(self, notice: Notice[M], values: Mapping[str, M]) -> None:
        """Send notices to all listeners, each by its event id.

        Best effort: one that cannot be sent now is logged, counted and dropped.

        Cost: no round trip.
        """
        time = self._now()
        for event_id, value in values.items():
            await self._send_notice(notice, value, event_id, time)

    async def _send_notice(self, notice: Notice[M], value: M, event_id: str, time: str) -> None:
        # By the parts inside the value, as readers check it.
        parts = {part: getattr(value, part) for part in notice.parts}
        subject = notice.subject(**parts)
        headers = self._attributes(notice, event_id, parts, time)
        headers[RELEASE] = self._connection.release
        outcome = "failed"
        try:
            await self._connection.publish(subject, encode(value), headers=headers)
            outcome = "sent"
        except (PeerUnavailable, ContractError) as err:
            # Too large for the server, or the server is away: the decision that it
            # goes with must not wait for it.
            self._connection.quiet.warning("notice.dropped", subject, subject=subject, error=str(err))
        finally:
            self._connection.metrics.writes.labels(notice.name, outcome).inc()

    async def listen(
        self, notice: Notice[M], *, on_missed: Callable[[int], None] | None = None, **parts: str
    ) -> AsyncGenerator[M, None]:
        """Yield every notice that matches from now on, without end.

        Notices that come while NATS is away, or faster than they are read, are missed.

        Shapes: on_missed — called with the number that came too fast, before the next one that was
        not missed.
        """
        arrived: asyncio.Queue[tuple[Msg, int]] = asyncio.Queue(maxsize=_UNREAD_NOTICES)
        missed = 0

        async def take(message: Msg) -> None:
            nonlocal missed
            # Dropped here, where it can be counted: the client's own limit is for the bytes of all
            # messages.
            if arrived.full():
                missed += 1
            else:
                arrived.put_nowait((message, missed))
                missed = 0

        lasting = await self._connection.subscribe(notice.pattern(**parts), take)
        try:
            while True:
                message, dropped = await arrived.get()
                if dropped and on_missed is not None:
                    on_missed(dropped)
                value = self._read_notice(notice, message)
                if value is not None:
                    yield value
        finally:
            await self._connection.unsubscribe(lasting)

    def _read_notice(self, notice: Notice[M], message: Msg) -> M | None:
        try:
            value = decode(message.data, notice.message, where=message.subject)
            if notice.subject(**{part: getattr(value, part) for part in notice.parts}) != message.subject:
                raise ContractError(f"{message.subject}: the content of the notice belongs to another subject")
        except ContractError as err:
            self._connection.metrics.rejects.labels(notice.name).inc()
            self._connection.quiet.warning(
                "event.rejected", message.subject, **{**err.facts, "subject": message.subject, "error": str(err)}
            )
            return None
        return value

    def _now(self) -> str:
        return rfc3339(self._connection.clock.now())

    def _attributes(self, noun: Event[Any] | Notice[Any], event_id: str, parts: dict[str, str], time: str) -> Headers:
        """Give the headers of a CloudEvent in binary mode, and those of the present trace."""
        return injected(
            {
                "Content-Type": "application/json",
                "ce-specversion": "1.0",
                "ce-id": quote(event_id, safe=_SAFE),
                "ce-type": noun.event_type,
                "ce-source": self._source,
                "ce-subject": quote("/".join(parts[part] for part in noun.parts), safe=_SAFE),
                "ce-time": time,
            }
        )

    async def _store_event(self, stream: str, subject: str, data: bytes, headers: Headers) -> int:
        """Store an event, and return its sequence, or that of the same event that is there already.

        A stream takes an id for a repetition whichever process used it, and others that write to
        the stream can guess ours. Then ours gets another one.
        """
        stored = await self._jetstream.store(subject, data, stream=stream, headers=headers, is_repeatable=True)
        if not stored.is_duplicate:
            return stored.sequence
        known_event = await self._jetstream.message_at(stream, stored.sequence)
        if known_event is not None and known_event.subject == subject:
            return stored.sequence
        get_logger().warning(
            "event.id-taken", subject=subject, event_id=headers[_ID], by=known_event.subject if known_event else ""
        )
        own = {**headers, _ID: f"{headers[_ID]}.{secrets.token_hex(11)}"}
        return (await self._jetstream.store(subject, data, stream=stream, headers=own, is_repeatable=True)).sequence

    async def follow(
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

        Shapes: on_waiting — called with the reason each time that a read failed; on_replaced —
        called when the stream was lost or restored: all events that it has now come again.
        """
        beginning = {Start.PRESENT: From.NEWEST_OF_EACH, Start.ALL: From.ALL, Start.NEW: From.NEW}[start]
        feed = self._feed(event, parts, beginning, on_waiting=on_waiting)
        async with aclosing(feed.messages()) as items:
            async for item in items:
                if item is Mark.RESET and on_replaced is not None:
                    on_replaced()
                if isinstance(item, Delivery):
                    received = self._read_event(event, item)
                    if received is not None:
                        yield received

    async def present(self, event: Event[M], **parts: str) -> tuple[Received[M], ...]:
        """Give the newest event of each subject that matches, in their order in the stream.

        Those that no contract accepts are logged and left out.
        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        """
        newest: dict[str, Received[M]] = {}
        patience = ReadTimeout(f"read {event.stream}", limit_s=self._connection.settings.timeout_s)
        async with aclosing(self._feed(event, parts, From.NEWEST_OF_EACH).messages()) as items:
            while (item := await patience.next(items)) is not Mark.CAUGHT_UP:
                if item is Mark.RESET:
                    newest.clear()
                elif (received := self._read_event(event, item)) is not None:
                    newest[item.subject] = received
        return tuple(newest.values())

    async def span(self, event: Event[Any]) -> Span:
        """Describe what the stream still has, by one request.

        Errors: raises PeerUnavailable when the stream cannot be read.
        """
        try:
            info = await self._jetstream.stream_info(event.stream)
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {event.stream}: {err}") from err
        if info is None:
            raise PeerUnavailable(f"stream {event.stream} does not exist")
        return Span(created=info.created, oldest=max(info.first_sequence, 1), newest=info.last_sequence)

    async def last(self, event: Event[M], *, limit: int, **parts: str) -> tuple[Received[M], ...]:
        """Return the newest events that match, oldest first.

        Looks back from the end, twice as far each time, so that half a gigabyte of decisions is not
        read to see the last twenty.

        Errors: PeerUnavailable when the stream cannot be read.
        Cost: one request for one event, which needs no consumer; else two, and those further reads.
        """
        try:
            newest = await self._jetstream.last_message(event.stream, event.pattern(**parts))
            if limit <= 0 or newest is None:
                return ()
            if limit == 1 and (only := self._read_event(event, Delivery.of(newest, is_replay=True))) is not None:
                # Without a consumer: the last event of a service must be readable also when users have
                # taken all consumers that the stream may have.
                return (only,)
            if limit == 1 and event.is_whole(parts):
                return await self._read_subject(event, newest.subject)
            info = await self._jetstream.stream_info(event.stream)
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {event.stream}: {err}") from err
        if info is None:
            return ()
        back = 2 * limit
        while True:
            behind = max(newest.sequence - back, 0)
            newest_events = await self._read_span(event, behind, newest.sequence, parts)
            if len(newest_events) >= limit or behind < info.first_sequence:
                return tuple(newest_events[-limit:])
            back *= 2

    async def _read_subject(self, event: Event[M], subject: str) -> tuple[Received[M], ...]:
        """Return the newest readable event of one subject whose newest event cannot be read.

        Without a consumer.
        """
        newest: tuple[Received[M], ...] = ()
        try:
            async with aclosing(self._jetstream.messages_of(event.stream, subject)) as messages:
                async for message in messages:
                    received = self._read_event(event, Delivery.of(message, is_replay=True))
                    newest = (received,) if received is not None else newest
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {event.stream}: {err}") from err
        return newest

    async def _read_span(self, event: Event[M], behind: int, upto: int, parts: dict[str, str]) -> list[Received[M]]:
        span: list[Received[M]] = []
        patience = ReadTimeout(f"read {event.stream}", limit_s=self._connection.settings.timeout_s)
        feed = self._feed(event, parts, From.ALL, behind=behind)
        async with aclosing(feed.messages()) as items:
            while True:
                item = await patience.next(items)
                if not isinstance(item, Delivery):
                    if item is Mark.CAUGHT_UP:
                        return span
                    span.clear()
                    continue
                received = self._read_event(event, item)
                if received is not None:
                    span.append(received)
                if item.sequence >= upto:
                    return span

    def _feed(
        self,
        event: Event[Any],
        parts: dict[str, str],
        start: From,
        *,
        behind: int = 0,
        on_waiting: Callable[[str], None] | None = None,
    ) -> Feed | PatternFeed:
        connection, pattern = self._connection, event.pattern(**parts)
        if connection.makes_consumers:
            return Feed(connection, event.stream, pattern, start, behind=behind, on_waiting=on_waiting)
        # To a subscriber's account the server gives what was stored at the event's own subject.
        hints = pattern if connection.name == "user" else stored_subject(pattern)
        return PatternFeed(connection, event.stream, pattern, hints, start, behind=behind, on_waiting=on_waiting)

    def _read_event(self, event: Event[M], item: Delivery) -> Received[M] | None:
        try:
            tokens = item.subject.split(".")[-len(event.parts) :]
            value = decode(item.data, event.message, where=item.subject)
        except ContractError as err:
            self._connection.metrics.rejects.labels(event.name).inc()
            fields = {**err.facts, "subject": item.subject, "sequence": item.sequence, "error": str(err)}
            self._connection.quiet.warning("event.rejected", item.subject, **fields)
            return None
        return Received(
            parts={part: from_token(token) for part, token in zip(event.parts, tokens, strict=True)},
            sequence=item.sequence,
            time=rfc3339(datetime.fromtimestamp(item.time_ns / 1e9, UTC)),
            value=value,
            is_replay=item.is_replay,
        )
