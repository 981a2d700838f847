"""Configures the streams behind the catalogue, and compares an existing stream with its
configuration.

Every field is compared, also unknown ones: a field that a newer server adds and that is not at its
default may copy the stream elsewhere (republish), fill it from elsewhere (mirror, sources) or
rename what is written (subject_transform).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from topobus.formats.messages.catalogue import BUCKETS, EVENTS
from topobus.formats.messages.nouns import PREFIX, Event, State

__all__ = [
    "ACCOUNT_INFO",
    "REPUBLISH",
    "STREAM_LISTS",
    "Difference",
    "DifferenceKind",
    "bucket_stream",
    "differences",
    "stream_names",
    "total_bytes",
    "wanted_streams",
]

ACCOUNT_INFO = "$JS.API.INFO"
"""Where a server reports its streams and their limits as a whole. It is the first request for a
sign of life."""

STREAM_LISTS = ("$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES")
"""Where a server lists its streams, with and without their configurations."""

REPUBLISH = "republish"
"""The field by which a server publishes each write of a bucket at a subject, where any client with
the right can listen."""

# Header bytes that the server counts into a message's size, on top of the value.
_HEADER_ALLOWANCE = 4096
_TWO_MINUTES_NS = 120 * 1_000_000_000
_MIB = 1024 * 1024

# A bound may differ from the catalogue's, because machines and fleets have other sizes. A bound
# below this part of it starves its writers.
_SMALLEST_PART = 16

# Fields that change neither what is stored nor its readers: the place of copies, compression, texts
# for people.
_HARMLESS = frozenset({"description", "placement", "metadata", "compression"})
# Texts of servers for an unset field, besides false, zero and empty.
_DEFAULTS: Mapping[str, object] = {"compression": "none", "persist_mode": "default"}
# The server's own notes in a stream's metadata.
_SERVERS_OWN = "_nats."


class DifferenceKind(StrEnum):
    """What a difference means."""

    DRIFT = "drift"
    """Not as this code makes it: refused."""
    HARMLESS = "harmless"
    """An operator's choice that is named and left alone."""


class Difference(Struct, frozen=True, kw_only=True):
    """One field that is not as the catalogue wants it."""

    field: str
    text: str
    kind: DifferenceKind


def bucket_stream(state: State[Any]) -> str:
    """Name the JetStream stream behind a bucket. Source: NATS ADR-8 (KV).

    >>> from topobus.formats.messages.catalogue import MACHINE
    >>> bucket_stream(MACHINE)
    'KV_topobus_machines'
    """
    return f"KV_{state.bucket}"


def stream_names() -> tuple[str, ...]:
    """Name all streams of the catalogue: those of buckets first, then those of events, in the
    catalogue's order.

    >>> stream_names()[0], stream_names()[-1]
    ('KV_topobus_machines', 'TOPOBUS_DISAGREEMENTS')
    """
    return (*(bucket_stream(state) for state in BUCKETS), *(event.stream for event in EVENTS))


def total_bytes() -> int:
    """Add up the size limits of all streams.

    Units: bytes. A server reserves as much of its disk, so a smaller
    `max_file_store` refuses the last streams.
    """
    return sum(state.max_bucket_bytes for state in BUCKETS) + sum(event.max_stream_bytes for event in EVENTS)


def wanted_streams(replicas: int, *, store_bytes: int = 0) -> tuple[dict[str, Any], ...]:
    """Return the configuration that each stream must have.

    Units: store_bytes — what all of them may take together; their bounds shrink or grow in
    proportion. 0: the catalogue's own.
    """
    part = store_bytes / total_bytes() if store_bytes else 1.0
    return (
        *(_bucket_config(state, replicas, part) for state in BUCKETS),
        *(_event_config(event, replicas, part) for event in EVENTS),
    )


def differences(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Compare a stream's configuration with the wanted one, field by field.

    Shapes: got — a configuration as the server gives it; wanted — as `wanted_streams` gives it.
    Fields that `wanted` does not name must be at their default.
    Order: by kind, in the order of `DifferenceKind`.
    Errors: raises nothing; no difference is an empty tuple.
    """
    found_differences = (*_of_wanted_fields(got, wanted), *_of_other_fields(got, wanted))
    order = list(DifferenceKind)
    return tuple(sorted(found_differences, key=lambda difference: order.index(difference.kind)))


def _bucket_config(state: State[Any], replicas: int, part: float) -> dict[str, Any]:
    """Return the configuration that a bucket's stream must have.

    No rollup and no purge: one header could otherwise empty the whole bucket. A delete is a marker,
    which needs neither. A bucket whose writers write again what is gone makes room when it is full.
    Refusing would shut out those who write little for the sake of one who writes much, and for
    good, because nothing can be purged. The other buckets refuse: their values have no other copy.
    """
    return {
        **_common(bucket_stream(state), f"$KV.{state.bucket}.>", state.description, replicas),
        "max_msgs_per_subject": state.history,
        "max_msg_size": state.max_value_bytes + _HEADER_ALLOWANCE,
        "max_bytes": _bound(state.max_bucket_bytes, part),
        # A reader for each node of a fleet. Server 2.15 refuses consumer 1001 of a stream without a
        # limit of its own.
        "max_consumers": 16_384,
        "discard": "old" if state.is_rewritten else "new",
        # Announces that a key was written, and not the value. A reader that gets it reads the key
        # from the leader, because others that may publish there could send any value.
        REPUBLISH: {"src": f"$KV.{state.bucket}.>", "dest": f"{PREFIX}.{state.name}.>", "headers_only": True},
    }


def _event_config(event: Event[Any], replicas: int, part: float) -> dict[str, Any]:
    """Return the configuration that an event's stream must have.

    No age limit, because the newest event of a subject is the present state.
    """
    return {
        **_common(event.stream, event.pattern().partition("*")[0] + ">", event.description, replicas),
        "max_msgs_per_subject": event.max_per_subject,
        "max_msg_size": event.max_event_bytes + _HEADER_ALLOWANCE,
        "max_bytes": _bound(event.max_stream_bytes, part),
        # Users may read these, and a consumer costs a server 38 KiB (measured on 2.9.10): all three
        # streams full of them are 120 MiB.
        "max_consumers": 1024,
        "discard": "old",
        # A server passes what came in from a device service's account to no subscriber's account,
        # but it does pass what a stream republishes.
        REPUBLISH: {"src": f"{PREFIX}.{event.name}.>", "dest": f"{PREFIX}.stored.{event.name}.>"},
    }


def _bound(size_bytes: int, part: float) -> int:
    """Give a share of a bound in whole MiB, so that two processes compute the same."""
    return max(1, round(size_bytes * part / _MIB)) * _MIB


def _common(name: str, subject: str, description: str, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "subjects": [subject],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "max_age": 0,
        "max_msgs": -1,
        "duplicate_window": _TWO_MINUTES_NS,
        "allow_rollup_hdrs": False,
        "deny_delete": True,
        "allow_direct": True,
        "deny_purge": True,
    }


def _of_wanted_fields(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Difference]:
    for field, want in wanted.items():
        value = got.get(field, _absent(want))
        # Another description does not make another stream: a corrected sentence must not stop every
        # service.
        if value == want or field == "description":
            continue
        text = f"{field} is {value!r}, wanted {want!r}"
        is_bound = field == "max_bytes" and isinstance(value, int) and value * _SMALLEST_PART >= want
        yield Difference(field=field, text=text, kind=DifferenceKind.HARMLESS if is_bound else DifferenceKind.DRIFT)


def _of_other_fields(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Difference]:
    for field in sorted(got.keys() - wanted.keys()):
        value = got[field]
        if field == "metadata" and isinstance(value, Mapping):
            value = {key: note for key, note in value.items() if not key.startswith(_SERVERS_OWN)}
        if _is_empty(value) or value == _DEFAULTS.get(field):
            continue
        kind = DifferenceKind.HARMLESS if field in _HARMLESS else DifferenceKind.DRIFT
        yield Difference(field=field, text=f"{field} is {value!r}, wanted none", kind=kind)


def _is_empty(value: object) -> bool:
    """Return whether a field's value means that it was never set: servers write false, zero, empty
    values and records of such.

    >>> _is_empty({"inactive_threshold": 0}), _is_empty({"src": ">", "dest": "x"})
    (True, False)
    """
    if isinstance(value, Mapping):
        return all(_is_empty(inner) for inner in value.values())
    return not value


def _absent(want: object) -> object:
    """Give what an absent field means: servers leave out false, zero and empty ones."""
    return {bool: False, int: 0, str: "", list: []}.get(type(want))
