"""One JetStream stream in memory: stored messages, limits, and the next message of each consumer.

`lab.memory_nats.memory_server` passes messages and requests to it. Refusals have the server's
own codes. It depends on no connection and no clock. It implements the features of a server that the
runtime uses. The contract suite of the bus compares it with a real one.
Source: nats-server 2.10, server/stream.go, server/memstore.go, server/consumer.go.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__all__ = ["MemoryConsumer", "MemoryStream", "Refused", "Stored", "matches", "overlap"]

# The bytes that the file store adds to each message: record header, length of headers, checksum.
_RECORD_BYTES = 22 + 4 + 8


class Refused(Exception):
    """Raised inside when JetStream refuses: its status, its own code and its text
    (server/errors.json).
    """

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.answer = {"code": code, "err_code": err_code, "description": description}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One message of a stream."""

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str]
    time_ns: int

    @property
    def size_bytes(self) -> int:
        """The message's part of the stream's bound."""
        lines = sum(len(key) + len(value.encode()) + 4 for key, value in self.headers.items())
        return _RECORD_BYTES + len(self.subject) + len(self.data) + (lines + 12 if self.headers else 0)


class MemoryStream:
    """One stream: its messages by sequence, and the sequences of each subject."""

    def __init__(self, config: dict[str, Any], *, created_ns: int) -> None:
        self.config = config
        self.created_ns = created_ns
        self.messages: dict[int, Stored] = {}
        self.last_sequence = 0
        self.size_bytes = 0
        self.consumers: dict[str, MemoryConsumer] = {}
        self._subjects: dict[str, deque[int]] = {}
        self._message_ids: dict[str, tuple[int, int]] = {}

    @property
    def name(self) -> str:
        """The stream's name."""
        return str(self.config["name"])

    @property
    def first_sequence(self) -> int:
        """The sequence of the oldest message that is still there. One past the last when
        none is.
        """
        return next(iter(self.messages), self.last_sequence + 1)

    def takes(self, subject: str) -> bool:
        """Return whether messages at a subject are stored here."""
        subjects = self.config.get("subjects", ())
        return bool(subjects) and _expression(*subjects).fullmatch(subject) is not None

    def store(
        self, subject: str, data: bytes, headers: Mapping[str, str], *, now_ns: int
    ) -> tuple[Stored | None, dict[str, Any]]:
        """Store a message and return the acknowledgement.

        None in place of the message when it was a duplicate.

        Errors: raises Refused for another stream than expected, a lost compare-and-set, a message
        or a stream that would be too large.
        """
        expected_stream = headers.get("Nats-Expected-Stream")
        if expected_stream is not None and expected_stream != self.name:
            raise Refused(400, 10060, "expected stream does not match")
        if "Nats-Rollup" in headers and not self.config.get("allow_rollup_hdrs"):
            raise Refused(500, 10111, "rollup not permitted")
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None and (earlier := self._known(message_id, now_ns)) is not None:
            return None, {"stream": self.name, "seq": earlier, "duplicate": True}
        sequences = self._subjects.get(subject, deque())
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        last = sequences[-1] if sequences else 0
        if expected is not None and int(expected) != last:
            raise Refused(400, 10071, f"wrong last sequence: {last}")
        message = Stored(
            subject=subject, sequence=self.last_sequence + 1, data=data, headers=dict(headers), time_ns=now_ns
        )
        self._make_room(message, sequences)
        self.last_sequence = message.sequence
        self.messages[message.sequence] = message
        self.size_bytes += message.size_bytes
        self._subjects.setdefault(subject, deque()).append(message.sequence)
        if message_id is not None:
            self._message_ids[message_id] = (message.sequence, now_ns)
        for consumer in self.consumers.values():
            consumer.note(message)
        return message, {"stream": self.name, "seq": message.sequence}

    def last_of(self, pattern: str) -> Stored | None:
        """Give the newest message of the subjects that match."""
        if "*" not in pattern and ">" not in pattern:
            sequences = self._subjects.get(pattern)
            return self.messages[sequences[-1]] if sequences else None
        newest = max(
            (sequences[-1] for subject, sequences in self._subjects.items() if matches(pattern, subject)), default=0
        )
        return self.messages.get(newest)

    def next_of(self, pattern: str, sequence: int) -> Stored | None:
        """Give the oldest message of the subjects that match from a sequence on."""
        if "*" not in pattern and ">" not in pattern:
            return next((self.messages[each] for each in self._subjects.get(pattern, ()) if each >= sequence), None)
        return next(
            (
                message
                for each, message in self.messages.items()
                if each >= sequence and matches(pattern, message.subject)
            ),
            None,
        )

    def subject_counts(self, pattern: str) -> dict[str, int]:
        """Count the messages of each subject that matches."""
        return {subject: len(sequences) for subject, sequences in self._subjects.items() if matches(pattern, subject)}

    def newest_of_each(self, pattern: str) -> list[int]:
        """Give the sequence of the newest message of each subject that matches, in order."""
        return sorted(sequences[-1] for subject, sequences in self._subjects.items() if matches(pattern, subject))

    def _known(self, message_id: str, now_ns: int) -> int | None:
        sequence, stored_ns = self._message_ids.get(message_id, (0, 0))
        window_ns = int(self.config.get("duplicate_window", 0))
        return sequence if sequence and now_ns - stored_ns < window_ns else None

    def _make_room(self, message: Stored, sequences: deque[int]) -> None:
        """Drop what the bounds require, or refuse."""
        largest = int(self.config.get("max_msg_size", -1))
        if 0 <= largest < len(message.data) + sum(len(key) + len(value) + 4 for key, value in message.headers.items()):
            raise Refused(400, 10054, "message size exceeds maximum allowed")
        per_subject, bound = int(self.config.get("max_msgs_per_subject", -1)), int(self.config.get("max_bytes", -1))
        pushed_out = self.messages[sequences[0]].size_bytes if 0 < per_subject <= len(sequences) else 0
        if (
            bound > 0
            and self.config.get("discard") == "new"
            and self.size_bytes + message.size_bytes - pushed_out > bound
        ):
            raise Refused(503, 10077, "maximum bytes exceeded")
        while 0 < per_subject <= len(sequences):
            self._drop(sequences[0])
        while bound > 0 and self.messages and self.size_bytes + message.size_bytes > bound:
            self._drop(self.first_sequence)

    def _drop(self, sequence: int) -> None:
        gone = self.messages.pop(sequence)
        self.size_bytes -= gone.size_bytes
        sequences = self._subjects[gone.subject]
        sequences.remove(sequence)
        if not sequences:
            del self._subjects[gone.subject]


@dataclass(kw_only=True)
class MemoryConsumer:
    """A pull consumer that acknowledges nothing: the messages that it has still to deliver, in
    order.
    """

    stream: MemoryStream
    name: str
    filter_subject: str
    has_data: bool = True
    """False: it delivers headers alone, and the size of what it leaves out."""
    delivered: int = 0
    """How many it has delivered: the last one's number."""
    last_sequence: int = 0
    _waiting: deque[int] = field(default_factory=deque)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Find the first messages to deliver.

        Errors: raises Refused for a policy that this server does not know.
        """
        policy = config.get("deliver_policy", "all")
        if policy == "last_per_subject":
            self._waiting.extend(self.stream.newest_of_each(self.filter_subject))
        elif policy in ("all", "by_start_sequence"):
            begin = int(config.get("opt_start_seq", 1)) if policy == "by_start_sequence" else 1
            self._waiting.extend(
                sequence
                for sequence, message in self.stream.messages.items()
                if sequence >= begin and matches(self.filter_subject, message.subject)
            )
        elif policy != "new":
            raise Refused(400, 10003, f"bad request: {policy}")

    def note(self, message: Stored) -> None:
        """Note a message that was stored just now."""
        if matches(self.filter_subject, message.subject):
            self._waiting.append(message.sequence)

    def next(self) -> tuple[Stored, int] | None:
        """Give the next message that is still there and how many are left behind it.

        None when there is none.
        """
        for message in self._left():
            self.delivered += 1
            self.last_sequence = message.sequence
            return message, len(self._waiting)
        return None

    def _left(self) -> Iterator[Stored]:
        while self._waiting:
            message = self.stream.messages.get(self._waiting.popleft())
            if message is not None:
                yield message


def matches(pattern: str, subject: str) -> bool:
    """Say whether a subject is one of a pattern's.

    >>> matches("a.*.c", "a.b.c"), matches("a.>", "a.b.c"), matches("a.>", "a"), matches("a.*", "a.b.c")
    (True, True, False, False)
    """
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    return _expression(pattern).fullmatch(subject) is not None


@lru_cache(1024)
def _expression(*patterns: str) -> re.Pattern[str]:
    """Compile patterns: every message that a test sends is held against all of its streams and
    subscriptions.
    """
    written = (re.escape(pattern).replace(r"\*", r"[^.]+").replace(">", ".+") for pattern in patterns)
    return re.compile("|".join(written))


def overlap(pattern: str, other: str) -> bool:
    """Say whether a subject can fit both patterns."""
    tokens, other_tokens = pattern.split("."), other.split(".")
    for token, other_token in zip(tokens, other_tokens, strict=False):
        if ">" in (token, other_token):
            return True
        if token != other_token and "*" not in (token, other_token):
            return False
    return len(tokens) == len(other_tokens)
