"""The kinds of nouns that cross NATS (state, event, notice, ask) and the one grammar of their
subjects and keys.

The grammar is `topobus.v1.<noun>.<node>[.<class>[.<device>]]`. The node is always the same token,
so one wildcard can express the rights of one node. A name that could change the shape of a subject
(a dot, a wildcard, a separator) never gets into one. The nouns themselves are declared in
`topobus.formats.messages.catalogue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from topobus.values.errors import ContractError

__all__ = ["CLUSTER", "PREFIX", "Ask", "Event", "Notice", "Noun", "State", "from_token", "stored_subject", "to_token"]

PREFIX = "topobus.v1"
# Stands where a node's name would, for what belongs to no node; `_` is illegal in
# node names, so it cannot collide.
CLUSTER = "_"

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
# The longest DNS name. nats-server ends the connection of a client whose subject and
# reply do not fit into 4096 bytes.
_LONGEST_NAME = 253


def to_token(name: str) -> str:
    """Turn a name into one subject token or key part: `.` becomes `_` (reversible, since `_` is
    illegal in DNS names).

    Errors: raises ContractError for a name that no token can hold.

    >>> to_token("node1.example.com")
    'node1_example_com'
    """
    token = name.replace(".", "_")
    if (_TOKEN.fullmatch(token) is None or "_" in name or len(name) > _LONGEST_NAME) and name != CLUSTER:
        shown = f"{name[:60]!r} and {len(name) - 60} more" if len(name) > _LONGEST_NAME else repr(name)
        raise ContractError(
            f"cannot put {shown} into a subject: wanted a DNS name (lower-case letters, digits, '-' and '.')"
        )
    return token


def from_token(token: str) -> str:
    """Turn a subject's token back into the name, the inverse of `to_token`.

    The token of the whole cluster is returned unchanged.

    >>> from_token("node-1_example_com")
    'node-1.example.com'
    """
    return token if token == CLUSTER else token.replace("_", ".")


def stored_subject(subject: str) -> str:
    """Return the subject on which an event's stream republishes the messages it has stored.

    >>> stored_subject("topobus.v1.health.>")
    'topobus.v1.stored.health.>'
    """
    return f"{PREFIX}.stored.{subject.removeprefix(f'{PREFIX}.')}"


@dataclass(frozen=True, kw_only=True)
class Noun:
    """The base of the four kinds. `parts` names the tokens after the noun."""

    name: str
    parts: tuple[str, ...]
    writer: tuple[str, ...]
    """Processes that write (state, event) or answer (ask)."""
    readers: tuple[str, ...]
    description: str

    def is_whole(self, values: Iterable[str]) -> bool:
        """Say whether these are all of the parts, so that they name one key or one subject and not
        a pattern.
        """
        return set(values) == set(self.parts)

    def subject(self, **values: str) -> str:
        """Build the subject of one entry.

        For a state it is the subject on which the server announces that a key was written (the
        bucket's republish), without the value.
        """
        return ".".join((PREFIX, self.name, *self._tokens(values, is_pattern=False)))

    def pattern(self, **values: str) -> str:
        """Build a subscription. A part left out matches anything."""
        return ".".join((PREFIX, self.name, *self._tokens(values, is_pattern=True)))

    def _tokens(self, values: dict[str, str], *, is_pattern: bool) -> Iterator[str]:
        unknown = values.keys() - set(self.parts)
        if unknown:
            raise ContractError(f"{self.name} has no part {sorted(unknown)}; its parts are {list(self.parts)}")
        for part in self.parts:
            value = values.get(part, "")
            if not value and not is_pattern:
                raise ContractError(f"{self.name} needs {part}")
            yield to_token(value) if value else "*"


@dataclass(frozen=True, kw_only=True)
class State(Noun, Generic[M]):
    """A KV bucket: the newest value of a key is the present state."""

    bucket: str
    message: type[M]
    history: int = 8
    max_value_bytes: int = 512 * 1024
    max_bucket_bytes: int
    """What all keys with their history may take on the disk together, so that one bucket's writers
    cannot starve another's."""
    may_be_compressed: bool = False
    """True when a value larger than the bucket takes is stored as gzip (ADR 16); one that fits is
    always plain JSON."""
    is_rewritten: bool = False
    """True when each writer compares its keys with what it knows and writes again what is gone:
    then a full bucket may drop its oldest values."""
    classes_apart: tuple[str, ...] = ()
    """Device classes whose keys have a bucket each, so that who fills one starves no other class
    (ADR 16); keys of all other classes share `bucket`."""
    max_class_bytes: int = 0
    """As `max_bucket_bytes`, of each bucket of one class."""
    entries: str = ""
    """The field of a map of which a write changes few entries: a follower of one key decodes only
    those (`topobus.formats.messages.entry_codec`). Empty: the value is one."""

    def buckets(self) -> tuple[State[M], ...]:
        """Return the state once for each of its buckets: the common one first, then those of single
        classes.
        """
        return (self, *(self.home(device_class=device_class) for device_class in self.classes_apart))

    def home(self, **values: str) -> State[M]:
        """Return the state with the one bucket that an entry is written to: its class's own, or the
        common one.

        Parts other than the class may be left out. At a hub all entries are in the common bucket,
        because relays write all classes there (`topobus.bus.feeds.bucket_feed`).
        """
        device_class = values.get("device_class", "")
        if device_class not in self.classes_apart:
            return self
        own = {
            "bucket": f"{self.bucket}_{device_class}",
            "description": f"{self.description} Of class {device_class}.",
            "max_bucket_bytes": self.max_class_bytes,
            "classes_apart": (),
            "max_class_bytes": 0,
        }
        return State(**{**vars(self), **own})

    def home_of_key(self, key: str) -> State[M]:
        """Return the result of `home` for a key, well-formed or not."""
        return self.home(**dict(zip(self.parts, key.split("."), strict=False)))

    def key(self, **values: str) -> str:
        """Build the key of one entry: `key(node="n1", device_class="gpu")`."""
        return ".".join(self._tokens(values, is_pattern=False))

    def key_pattern(self, **values: str) -> str:
        """Build a filter over keys. A part left out matches anything."""
        return ".".join(self._tokens(values, is_pattern=True))

    def parse_key(self, key: str) -> dict[str, str]:
        """Split a key into its parts.

        Errors: raises ContractError for a key of another shape, or that `key` cannot make.
        """
        tokens = key.split(".")
        if len(tokens) != len(self.parts):
            raise ContractError(f"bucket {self.bucket}: key {key!r} has {len(tokens)} parts, wanted {list(self.parts)}")
        parts = {part: from_token(token) for part, token in zip(self.parts, tokens, strict=True)}
        # The names in a key are used in subjects later, so they must fit into one.
        self.key(**parts)
        return parts

    def read_as(self, message: type[Q]) -> State[Q]:
        """Return the same bucket for a reader that needs only some of the fields: fields that
        `message` does not name are skipped, not decoded.
        """
        return State(**{**vars(self), "message": message})

    def check_place(self, value: object, parts: dict[str, str]) -> None:
        """Refuse a value whose own fields name another place than its key: readers keep values by
        the names inside, and would mix up two nodes.

        Errors: raises ContractError.
        """
        for part, wanted in parts.items():
            content = getattr(value, part, None)
            # The key has a kind in lower case.
            if isinstance(content, str) and content != wanted and content.lower() != wanted:
                raise ContractError(
                    f"{self.bucket}/{self.key(**parts)}: the value has {part} {content[:60]!r}, its key has {wanted!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Event(Noun, Generic[M]):
    """A stream of CloudEvents (binary mode: `ce-*` headers, JSON data)."""

    stream: str
    message: type[M]
    event_type: str
    max_per_subject: int
    """How many events of one subject are kept. There is no age limit: the newest of each subject is
    the present state and must stay."""
    max_stream_bytes: int
    max_event_bytes: int = 64 * 1024
    """The largest event that the stream takes."""


@dataclass(frozen=True, kw_only=True)
class Notice(Noun, Generic[M]):
    """A CloudEvent that is delivered to present subscribers and not stored."""

    message: type[M]
    event_type: str


@dataclass(frozen=True, kw_only=True)
class Ask(Noun, Generic[Q, R]):
    """A request with one answer."""

    request: type[Q]
    reply: type[R]
    timeout_s: float
    """How long an asker waits unless it sets another time."""
    queue_group: str = ""
    """Given: any one of the replicas answers."""
