"""JetStream's API as plain requests: JSON in, JSON out, its errors as one type.

nats-py's own layer is not used: it hides error codes, creates buckets with fixed options,
and its watchers lose messages.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from topobus.bus.asks.ask_headers import SENT, now_ms
from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.failures import AmbiguousWrite, ConnectionLost, JetStreamError, NobodyThere
from topobus.bus.server_config.nats_accounts import IMPORTED_API
from topobus.formats.messages.releases import RELEASE
from topobus.process.backoff import full_jitter
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["API", "JetStream", "Stored", "StoredMessage", "StreamInfo"]

API = "$JS.API"
"""Where JetStream listens for requests about streams and consumers, in
the account that has them."""
# Since this release the server's answers about a stream carry its time. Before, a write of ours has
# to be read again.
_SAYS_ITS_TIME = (2, 10, 0)
# Before this release a server panics when a message is requested of a stream which another
# connection makes at that moment (jsMsgGetRequest has no store yet; seen on 2.9.10).
_READS_WHAT_IS_BEING_MADE = (2, 10, 0)
# From a stream's first description to its store: some milliseconds, more on a slow disk.
_IS_BEING_MADE_S = 0.25
# A write that may be repeated is sent again after so long: twice within the default timeout.
_REPEAT_AFTER_S = 2.0


class StreamInfo(Struct, frozen=True, kw_only=True):
    """The server's description of a stream."""

    config: dict[str, Any]
    created: str
    first_sequence: int
    last_sequence: int
    message_count: int
    size_bytes: int
    consumer_count: int


class StoredMessage(Struct, frozen=True, kw_only=True):
    """One message as the stream's leader has it."""

    subject: str
    sequence: int
    data: bytes
    headers: Headers
    time_ns: int
    """When it was stored: nanoseconds since 1970."""


class Stored(Struct, frozen=True, kw_only=True):
    """A stream's acknowledgement."""

    sequence: int
    is_duplicate: bool
    """True: a message of the same Nats-Msg-Id is there already, at this
    sequence, whichever client sent it."""


class JetStream:
    """JetStream over a supervised connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the API (`STREAM.INFO.X`).

        Errors: JetStreamError when it refuses, PeerUnavailable when it does not answer.
        """
        subject = f"{IMPORTED_API if self.connection.is_outside else API}.{verb}"
        try:
            answer = await self.connection.request(
                subject,
                msgspec.json.encode(payload) if payload is not None else b"",
                timeout_s=self.connection.settings.timeout_s,
            )
        except TimeoutError as err:
            raise PeerUnavailable(
                f"JetStream does not answer at {subject}",
                next_step="see the NATS server's log and its disk: a server whose disk was full may have to be "
                "restarted",
                subject=subject,
            ) from err
        except NobodyThere as err:
            raise PeerUnavailable(
                f"JetStream does not listen at {subject}",
                next_step="start nats-server with JetStream on (-js); if it runs with users, give it their file of "
                "this release (topobus keys make)"
                if self.connection.is_outside
                else "start nats-server with JetStream on (-js)",
                subject=subject,
            ) from err
        try:
            return _checked(answer.data, subject)
        except JetStreamError as err:
            if err.err_code == JetStreamError.STREAM_NOT_FOUND:
                self.connection.settled_streams[_stream_of(verb)] = 0
                self.connection.has_missed_stream.set()
            raise

    async def stream_names(self) -> set[str]:
        """Name all streams of the server's account."""
        names: set[str] = set()
        while True:
            raw = await self.call("STREAM.NAMES", {"offset": len(names)})
            page = raw.get("streams") or []
            names.update(page)
            if not page or len(names) >= int(raw["total"]):
                return names

    async def stream_info(self, stream: str) -> StreamInfo | None:
        """Describe a stream. None when there is none."""
        asked_ms = now_ms(self.connection.clock)
        try:
            raw = await self.call(f"STREAM.INFO.{stream}")
        except JetStreamError as err:
            if err.err_code == JetStreamError.STREAM_NOT_FOUND:
                return None
            raise
        if isinstance(raw.get("ts"), str):
            # The answers of servers since 2.10 carry their time.
            self.connection.server_clock.note(
                asked_ms, now_ms(self.connection.clock), _parse_time(raw["ts"]) / 1_000_000
            )
        state = raw["state"]
        return StreamInfo(
            config=raw["config"],
            created=raw["created"],
            first_sequence=state["first_seq"],
            last_sequence=state["last_seq"],
            message_count=state["messages"],
            size_bytes=state["bytes"],
            consumer_count=state["consumer_count"],
        )

    async def subject_counts(self, stream: str, pattern: str = ">") -> dict[str, int]:
        """Count the messages of each subject of a stream that matches.

        Asks for page after page where there are very many.
        """
        counts: dict[str, int] = {}
        while True:
            raw = await self.call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(counts)})
            page = raw["state"].get("subjects")
            counts.update(page if isinstance(page, dict) else {})
            # A server that does not list all at once gives their total number.
            if not page or len(counts) >= int(raw.get("total", 0)):
                return counts

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """Read the newest message of a subject from the stream's leader.

        Replicas may lag, and a ledger must not be read from one.
        """
        return await self._message(stream, {"last_by_subj": subject})

    async def message_at(self, stream: str, sequence: int) -> StoredMessage | None:
        """Read the message at a sequence from the stream's leader."""
        return await self._message(stream, {"seq": sequence})

    async def next_message(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """Read the oldest message of a subject from a sequence on.

        None when there is none, which costs the server a look at what came since.
        """
        return await self._message(stream, {"seq": sequence, "next_by_subj": subject})

    async def messages_of(self, stream: str, subject: str) -> AsyncGenerator[StoredMessage, None]:
        """Read all messages of one subject that are there now, oldest first, without a consumer.

        Cost: one request per message. The oldest may be dropped while others write: between two
        messages that are gone at the end there may have been others (`oldest_sequence`).
        """
        newest = await self.last_message(stream, subject)
        position = 0
        while newest is not None and position < newest.sequence:
            message = await self.next_message(stream, subject, position + 1)
            if message is None or message.sequence > newest.sequence:
                return
            position = message.sequence
            yield message

    async def oldest_sequence(self, stream: str, subject: str) -> int:
        """Give the sequence of the oldest message of one subject that is still there.

        0: there is none.
        """
        message = await self.next_message(stream, subject, 1)
        return message.sequence if message is not None else 0

    async def _settle(self, stream: str) -> None:
        """Wait until a stream that may have just been made again has its store: after a reconnect,
        and after it was missed.

        A server since 2.10 needs no wait.
        """
        connection = self.connection
        generation = connection.generation
        if (
            connection.server_version >= _READS_WHAT_IS_BEING_MADE
            or connection.settled_streams.get(stream, 1) == generation
        ):
            return
        if await self.stream_info(stream) is None:
            raise JetStreamError(404, JetStreamError.STREAM_NOT_FOUND, "stream not found")
        await connection.clock.sleep(_IS_BEING_MADE_S)
        connection.settled_streams[stream] = generation

    async def _message(self, stream: str, query: dict[str, Any]) -> StoredMessage | None:
        await self._settle(stream)
        try:
            raw = await self.call(f"STREAM.MSG.GET.{stream}", query)
        except JetStreamError as err:
            if err.err_code == JetStreamError.MESSAGE_NOT_FOUND:
                return None
            raise
        message = raw["message"]
        time_ns = _parse_time(message["time"])
        self.connection.server_clock.note_stored(stream, message["seq"], time_ns / 1_000_000)
        return StoredMessage(
            subject=message["subject"],
            sequence=message["seq"],
            data=base64.b64decode(message.get("data") or ""),
            headers=_parse_headers(base64.b64decode(message.get("hdrs") or "")),
            time_ns=time_ns,
        )

    async def store(
        self, subject: str, payload: bytes, *, stream: str, headers: Headers, is_repeatable: bool = False
    ) -> Stored:
        """Publish, and await the stream's acknowledgement.

        What the server surely did not take (no leader yet, no listener) is sent again until the
        timeout. What it may have taken is not, unless the message may be repeated (it carries a
        Nats-Msg-Id, and expects nothing).
        Errors: JetStreamError when the stream refuses, AmbiguousWrite when the outcome is unknown,
        PeerUnavailable when it surely was not written.
        """
        timeout_s = self.connection.settings.timeout_s
        deadline = self.connection.clock.monotonic() + timeout_s
        attempt = 0
        while True:
            left_s = deadline - self.connection.clock.monotonic()
            failure: Exception
            asked_ms = now_ms(self.connection.clock)
            try:
                answer = await self.connection.request(
                    subject,
                    payload,
                    headers={
                        "Nats-Expected-Stream": stream,
                        **headers,
                        RELEASE: self.connection.release,
                        SENT: str(asked_ms),
                    },
                    timeout_s=_try_s(left_s, is_repeatable),
                )
                acknowledged = _checked(answer.data, subject)
                if self.connection.server_version < _SAYS_ITS_TIME:
                    self.connection.server_clock.note_write(
                        stream, int(acknowledged["seq"]), asked_ms, now_ms(self.connection.clock)
                    )
                return Stored(sequence=int(acknowledged["seq"]), is_duplicate=acknowledged.get("duplicate") is True)
            except JetStreamError as err:
                if not err.is_temporary:
                    raise
                failure = err
            except (TimeoutError, ConnectionLost) as err:
                if not is_repeatable or self.connection.clock.monotonic() >= deadline:
                    raise AmbiguousWrite(
                        f"the write to {subject} was not confirmed: it may or may not have happened",
                        next_step="read the value again before deciding",
                        subject=subject,
                    ) from err
                failure = err
            except NobodyThere as err:
                # No stream takes the subject, or JetStream is off. The keeper of the streams finds
                # out which.
                self.connection.has_missed_stream.set()
                failure = err
            except PeerUnavailable as err:
                failure = err
            pause_s = full_jitter(attempt, least_s=0.05, most_s=1.0)
            attempt += 1
            if self.connection.clock.monotonic() + pause_s >= deadline:
                raise PeerUnavailable(f"cannot write to {subject}: {failure}", subject=subject) from failure
            await asyncio.sleep(pause_s)


def _try_s(left_s: float, is_repeatable: bool) -> float:
    """Give how long one try may take: all that is left, unless there may be another."""
    return max(min(left_s, _REPEAT_AFTER_S) if is_repeatable else left_s, 0.05)


def _stream_of(verb: str) -> str:
    """Return the stream that a verb names. Empty when it names none.

    >>> [_stream_of(verb) for verb in ("STREAM.INFO.EVENTS", "STREAM.MSG.GET.EVENTS", "CONSUMER.CREATE.EVENTS.reader-1", "STREAM.NAMES")]
    ['EVENTS', 'EVENTS', 'EVENTS', '']
    """  # noqa: E501
    parts = verb.split(".")
    return "".join(parts[3:4] if parts[1] == "MSG" else parts[2:3])


def _checked(data: bytes, subject: str) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as err:
        raise PeerUnavailable(f"what answers at {subject} is not JetStream: {data[:80]!r}") from err
    error = raw.get("error")
    if isinstance(error, dict):
        raise JetStreamError(
            int(error.get("code", 500)), int(error.get("err_code", 0)), str(error.get("description", ""))
        )
    return raw


def _parse_headers(raw: bytes) -> Headers:
    lines = raw.decode("utf-8", "replace").split("\r\n")[1:]
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _parse_time(text: str) -> int:
    """Read the server's time (RFC 3339, up to nine decimals) as nanoseconds since 1970.

    >>> _parse_time("1970-01-01T00:00:01.000000002Z"), _parse_time("1970-01-01T01:00:01.5+01:00")
    (1000000002, 1500000000)
    """
    match = re.fullmatch(r"([^.Z+]+?)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", text)
    if match is None:
        raise ContractError(f"not a time: {text!r}")
    seconds = int(datetime.fromisoformat(match[1] + match[3]).timestamp())
    return seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))
