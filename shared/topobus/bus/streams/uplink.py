"""A node's own server on one side, the hub behind it on the other: stored messages are read as they
are, and published at the up subjects with an acknowledgement.

Nothing is decoded: what a newer service wrote crosses unchanged. Nothing is tried twice here,
because the caller may know a newer value by then. The subjects are those of
`topobus.bus.server_config.up_subjects`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from topobus.bus.asks.ask_headers import SENT, now_ms
from topobus.bus.connection.connection import Connection
from topobus.bus.failures import AmbiguousWrite, ConnectionLost, JetStreamError, NobodyThere
from topobus.bus.feeds.bucket_feed import BucketFeed
from topobus.bus.feeds.feed import Delivery, Feed, From, Mark
from topobus.bus.server_config.up_subjects import up_stored_subject, up_subject
from topobus.bus.streams.provision import bucket_stream, bucket_subject
from topobus.formats.messages.nouns import Event, State, from_token
from topobus.formats.messages.releases import RELEASE
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = [
    "Acknowledged",
    "CutOff",
    "Delivery",
    "HubEntry",
    "HubRefused",
    "Mark",
    "NotWritten",
    "Uplink",
    "event_parts",
    "state_change",
    "written_by",
]

_OPERATION = "KV-Operation"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_STREAM = "Nats-Expected-Stream"
# No stream has so many messages: a write that expects it is always refused, with the
# sequence that there is. 2^53 - 1.
_NEVER = "9007199254740991"
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")
# Headers that a server adds to a stored message, and those of the first write's expectations:
# neither belongs to the event.
_SERVERS_HEADERS = "Nats-"
_MESSAGE_ID = "Nats-Msg-Id"


class CutOff(PeerUnavailable):
    """Raised when the hub is not there: surely nothing was written."""


class HubRefused(PeerUnavailable):
    """Raised when the hub's store refuses a message. Surely nothing was written."""

    # JSStreamMessageExceedsMaximumErr: larger than the stream takes.
    _TOO_LARGE = 10054

    @property
    def is_for_good(self) -> bool:
        """Say whether the same message is refused each time."""
        return self.facts.get("err_code") == self._TOO_LARGE


class NotWritten(Struct, frozen=True, kw_only=True):
    """A compare-and-set's answer when the hub has another value than expected."""


class Acknowledged(Struct, frozen=True, kw_only=True):
    """The hub's stream has a message."""

    sequence: int
    is_duplicate: bool = False
    """True when it had it before, by its id: the sequence is that of the first one."""


class HubEntry(Struct, frozen=True, kw_only=True):
    """The hub's value of one key."""

    sequence: int
    """0: it never had anything."""
    data: bytes = b""
    is_there: bool = False
    """False for a key that was deleted or never written."""
    written_by: str = ""
    """The release of the writer at the node; empty when the writer did not give it."""


class Uplink:
    """The way from one node's server to the hub. Made by `Bus.uplink`.

    Errors: methods that reach the hub raise CutOff when surely nothing was done, AmbiguousWrite
    when the outcome is unknown, HubRefused when the store refused.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # the node's own server

    def values(self, state: State[Any], *, node: str) -> AsyncGenerator[Delivery | Mark, None]:
        """Yield the newest value of each key of a node, CAUGHT_UP, then every later one.

        RESET when the store was lost.
        """
        if state.classes_apart:
            return BucketFeed(self._connection, state, {"node": node}).messages()
        pattern = bucket_subject(state, state.key_pattern(node=node))
        return Feed(self._connection, bucket_stream(state), pattern, From.NEWEST_OF_EACH).messages()

    def events(self, event: Event[Any], *, node: str, behind: int) -> AsyncGenerator[Delivery | Mark, None]:
        """Yield every event of a node after a sequence, and those to come.

        RESET when the store was lost, then from its beginning.
        """
        return Feed(self._connection, event.stream, event.pattern(node=node), From.ALL, behind=behind).messages()

    # the hub

    async def sequence_at_hub(self, noun: State[Any] | Event[Any], **parts: str) -> int:
        """Ask for the sequence of the newest message under one subject, without reading it.

        0: there is none.

        Cost: a write that is refused, some 150 bytes each way.
        """
        try:
            await self._request(up_subject(noun, **parts), b"", {_EXPECTED: _NEVER, _EXPECTED_STREAM: _stream(noun)})
        except JetStreamError as err:
            if err.err_code in JetStreamError.CONFLICTS and (match := _LAST_SEQUENCE.search(err.description)):
                return int(match[1])
            raise _refused(err, noun) from err
        raise HubRefused(
            f"the hub did not compare before it wrote {noun.name}",
            next_step="see that its nats-server is 2.10 or later",
        )

    async def value_at_hub(self, state: State[Any], **parts: str) -> HubEntry:
        """Read the hub's value of one key.

        A replicated hub may answer with a slightly older value.
        """
        try:
            answer = await self._send(up_stored_subject(state, **parts), b"", {})
        except JetStreamError as err:
            raise _refused(err, state) from err
        headers = answer.headers or {}
        status = headers.get("Status", "")
        if status == "404":
            return HubEntry(sequence=0)
        if status or "Nats-Sequence" not in headers:
            raise HubRefused(f"the hub cannot be read: {status or answer.data[:200]!r}")
        is_there = _OPERATION not in headers and "Nats-Marker-Reason" not in headers
        return HubEntry(
            sequence=int(headers["Nats-Sequence"]),
            data=answer.data if is_there else b"",
            is_there=is_there,
            written_by=headers.get(RELEASE, ""),
        )

    async def write(
        self, state: State[Any], data: bytes | None, expected: int, /, *, written_by: str, **parts: str
    ) -> Acknowledged | NotWritten:
        """Write a key of the hub's copy that is at the expected sequence. None deletes it.

        Shapes: written_by — the release of the writer of the value here, empty when it is not
        known.
        """
        headers = {
            _EXPECTED: str(expected),
            _EXPECTED_STREAM: _stream(state),
            **({_OPERATION: "DEL"} if data is None else {}),
        }
        headers |= {RELEASE: written_by} if written_by else {}
        try:
            return await self._request(up_subject(state, **parts), data or b"", headers)
        except JetStreamError as err:
            if err.err_code in JetStreamError.CONFLICTS:
                return NotWritten()
            raise _refused(err, state) from err

    async def store_event(self, event: Event[Any], delivery: Delivery, *, id_ending: str) -> Acknowledged:
        """Store one of the node's events at the hub, with its own id and an ending.

        Within two minutes it is stored once, however often it is sent with that ending.

        Errors: ContractError for a subject that is none of this event's.
        """
        headers = {
            key: value
            for key, value in delivery.headers.items()
            if not key.startswith(_SERVERS_HEADERS) or key == _MESSAGE_ID
        }
        if id_ending and _MESSAGE_ID in headers:
            headers[_MESSAGE_ID] = f"{headers[_MESSAGE_ID]}.{id_ending}"
        try:
            return await self._request(
                up_subject(event, **event_parts(event, delivery.subject)),
                delivery.data,
                {**headers, _EXPECTED_STREAM: event.stream},
            )
        except JetStreamError as err:
            raise _refused(err, event) from err

    async def _request(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> Acknowledged:
        # The time of this very message: after a cut, what it carries is as old as the cut was long,
        # although its writer's clock is right.
        answer = await self._send(subject, payload, {**headers, SENT: str(now_ms(self._connection.clock))})
        try:
            raw = msgspec.json.decode(answer.data, type=dict[str, Any])
        except msgspec.MsgspecError as err:
            raise HubRefused(f"what answers at {subject} is not JetStream: {answer.data[:80]!r}") from err
        error = raw.get("error")
        if isinstance(error, dict):
            raise JetStreamError(
                int(error.get("code", 500)), int(error.get("err_code", 0)), str(error.get("description", ""))
            )
        return Acknowledged(sequence=int(raw["seq"]), is_duplicate=bool(raw.get("duplicate", False)))

    async def _send(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> Msg:
        try:
            return await self._connection.request(
                subject, payload, headers=dict(headers), timeout_s=self._connection.settings.timeout_s
            )
        except NobodyThere as err:
            raise CutOff(
                "the hub is not there", next_step="nothing to do: what is stored here is sent when it is back"
            ) from err
        except (TimeoutError, ConnectionLost) as err:
            raise AmbiguousWrite(
                f"the hub did not answer at {subject}", next_step="nothing to do: it is asked again", subject=subject
            ) from err


def state_change(state: State[Any], delivery: Delivery) -> tuple[dict[str, str], bytes | None]:
    """Read a stored message of a bucket: its key's parts, and its value as it is.

    None for a deletion.

    Errors: raises ContractError for a key that the state does not make.
    """
    parts = state.parse_key(delivery.subject.removeprefix(bucket_subject(state, "")))
    is_deletion = _OPERATION in delivery.headers or "Nats-Marker-Reason" in delivery.headers
    return parts, None if is_deletion else delivery.data


def event_parts(event: Event[Any], subject: str) -> dict[str, str]:
    """Read the parts of an event's subject.

    Errors: raises ContractError for a subject that is none of this event's.
    """
    tokens = subject.split(".")
    parts = {part: from_token(token) for part, token in zip(event.parts, tokens[-len(event.parts) :], strict=False)}
    if len(parts) != len(event.parts) or event.subject(**parts) != subject:
        raise ContractError(f"not a subject of {event.name}: {subject[:200]!r}")
    return parts


def written_by(delivery: Delivery) -> str:
    """Return the release of the writer of a stored message. Empty when the message does not carry
    it.
    """
    return delivery.headers.get(RELEASE, "")


def _stream(noun: State[Any] | Event[Any]) -> str:
    return bucket_stream(noun) if isinstance(noun, State) else noun.stream


def _refused(err: JetStreamError, noun: State[Any] | Event[Any]) -> PeerUnavailable:
    if err.is_temporary:
        return CutOff(f"the hub's store is not ready: {err}")
    return HubRefused(
        f"the hub refuses {noun.name}: {err}", next_step="see `topobus doctor` at the hub", err_code=err.err_code
    )
