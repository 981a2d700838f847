"""State on the bus: KV buckets read, written by compare-and-set, listed and watched."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

from topobus.bus.asks.ask_headers import SENT, read_number
from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.failures import JetStreamError
from topobus.bus.feeds.bucket_feed import state_feed
from topobus.bus.feeds.feed import Delivery, Feed, From, Mark
from topobus.bus.feeds.read_timeout import ReadTimeout
from topobus.bus.streams.jetstream import JetStream
from topobus.bus.streams.provision import bucket_stream, bucket_subject
from topobus.formats.messages.nouns import State
from topobus.formats.messages.origin import NO_ORIGIN, Origin
from topobus.formats.messages.releases import RELEASE, is_of_other_release, shown_release
from topobus.formats.messages.stored import StoredReader, StoredWriter, from_stored, is_packed, to_stored
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.timestamps import rfc3339

__all__ = ["Change", "ChangeKind", "Conflict", "Entry", "States", "Unreadable", "Written"]

M = TypeVar("M")

Rejected = Callable[[str, str], None]
"""Hears of a value that no contract accepts: its key, and why."""

_OPERATION = "KV-Operation"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
# So much JSON takes some milliseconds to read; to hand it to a thread takes a tenth of one.
_LARGE_BYTES = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[M]):
    """One key's present value."""

    parts: dict[str, str]
    revision: int
    value: M
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True, kw_only=True)
class Written:
    """The compare-and-set won."""

    revision: int


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A compare-and-set's answer when another writer was first. Nothing was written, so read again
    and decide again.

    It is a value and no error, because every writer of a shared key meets it.
    """


class ChangeKind(StrEnum):
    """The kinds of changes of a watch."""

    PUT = "put"
    DELETE = "delete"
    SNAPSHOT_END = "snapshot-end"
    """All that was there has been delivered."""
    RESET = "reset"
    """History was lost: everything known from this watch is void, a new snapshot follows."""
    UNREADABLE = "unreadable"
    """No contract accepts the stored value: `value` is the newest one before it that can be read,
    None where there is none. Only delivered on request."""


@dataclass(frozen=True, kw_only=True)
class Change(Generic[M]):
    """One step of a watch. `parts` is empty and `value` None where they make no sense."""

    kind: ChangeKind
    parts: dict[str, str]
    revision: int
    value: M | None
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True, kw_only=True)
class Unreadable(Generic[M]):
    """A key's stored bytes that no contract accepts.

    A writer of the key can overwrite them, at their revision.
    """

    revision: int
    why: str
    last: Entry[M] | None
    """The newest value before it that can be read, as far as the bucket has kept one."""


class States:
    """Reads and writes buckets.

    Shapes: parts — of the key by name; all of them where one key is meant, else any, which select.
    Errors: each method raises ContractError for a part that no subject can hold or a value that no
    contract accepts, and PeerUnavailable when NATS is away.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._writers: dict[str, StoredWriter[Any]] = {}
        """By bucket and key: of states with entries, what this process has written last."""

    async def get(self, state: State[M], **parts: str) -> Entry[M] | None:
        """Read one key from the leader. None when it does not exist.

        Errors: ContractError for bytes that are no such value, PeerUnavailable.
        """
        key = state.key(**parts)
        home, stored = await self._newest_of_all(state, key)
        if stored is None or _OPERATION in stored[1]:
            return None
        revision, headers, data, time_ns = stored
        try:
            value = await _read_value(state, data, where=f"{home.bucket}/{key}")
            state.check_place(value, parts)
        except ContractError as err:
            # The writer of this key needs the revision to write over it.
            origin = _read_origin(headers, time_ns)
            facts = {**err.facts, "revision": revision, "release": origin.release}
            raise ContractError(f"{err.message}{self._written_by(origin)}", next_step=err.next_step, **facts) from err
        return Entry(parts=state.parse_key(key), revision=revision, value=value, origin=_read_origin(headers, time_ns))

    async def hidden_messages(self, state: State[Any], **parts: str) -> int:
        """Count what the server holds of a key that `get` does not find, and what it holds in the bucket
        and lists under no key.

        0: the key does not exist. More: it may exist, and the server has lost its index, as nats-server
        2.9.10 once had when it was started after a SIGKILL.
        Errors: PeerUnavailable.
        """
        state = state.home(**parts)
        stream, key = bucket_stream(state), state.key(**parts)
        try:
            # In this order: what is written meanwhile is listed and not held.
            info = await self._jetstream.stream_info(stream)
            listed = await self._jetstream.subject_counts(stream)
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {state.bucket}: {err}") from err
        if info is None or await self._newest(state, key) is not None:
            return 0
        return listed.get(bucket_subject(state, key), 0) or max(info.message_count - sum(listed.values()), 0)

    async def get_or_last(self, state: State[M], **parts: str) -> Entry[M] | Unreadable[M] | None:
        """Read one key as `get` does, but return bytes that are no such value as an answer.

        Errors: PeerUnavailable.
        Cost: where the value cannot be read, one request for each that the bucket has kept.
        """
        try:
            return await self.get(state, **parts)
        except ContractError as err:
            revision = err.facts.get("revision")
            if not isinstance(revision, int):
                raise
            return Unreadable(revision=revision, why=err.message, last=await self._last_readable(state, parts))

    async def _last_readable(self, state: State[M], parts: dict[str, str]) -> Entry[M] | None:
        return next(reversed(await self.history(state, has_deleted=False, **parts)), None)

    async def fingerprint(self, state: State[Any], **parts: str) -> str:
        """Give the revision of a key and a digest of its bytes, unread: it differs for every stored
        value. Empty when the key does not exist.

        Errors: PeerUnavailable.
        Cost: one request.
        """
        _, stored = await self._newest_of_all(state, state.key(**parts))
        if stored is None or _OPERATION in stored[1]:
            return ""
        return f"{stored[0]}-{hashlib.sha256(stored[2]).hexdigest()}"

    async def put(self, state: State[M], value: M, **parts: str) -> int:
        """Write a key whatever it holds, and return the revision.

        Errors: AmbiguousWrite when the write was not confirmed, PeerUnavailable when it surely was
        not done (StoreFull when there is no room), ContractError for a value that is larger than
        the bucket takes.
        """
        state = state.home(**parts)
        key = state.key(**parts)
        where = f"{state.bucket}/{key}"
        # A value that may need compression may be large. It is encoded in a thread, so that this
        # process answers others meanwhile.
        data = (
            await asyncio.to_thread(to_stored, state, value, where=where)
            if state.may_be_compressed
            else to_stored(state, value, where=where)
        )
        return await self._store(state, key, data, {})

    async def compare_and_set(
        self, state: State[M], value: M, expected_revision: int, **parts: str
    ) -> Written | Conflict:
        """Write a key that is still at the expected revision. Revision 0: a key that does not
        exist.

        Errors: AmbiguousWrite when the write was not confirmed. It may still happen, so read again
        and write at the new revision.
        """
        state = state.home(**parts)
        key = state.key(**parts)
        where = f"{state.bucket}/{key}"
        if state.entries:
            # One key has one writer, so this remembers one value.
            data = self._writers.setdefault(where, StoredWriter(state)).write(value, where=where)
        else:
            data = to_stored(state, value, where=where)
        expected = expected_revision
        while True:
            try:
                return Written(revision=await self._store(state, key, data, {_EXPECTED: str(expected)}))
            except _Lost:
                if expected_revision != 0 or expected != 0:
                    return Conflict()
            # A deleted key does not exist, but its marker has a revision: expect that one instead.
            stored = await self._newest(state, key)
            if stored is None or _OPERATION not in stored[1]:
                return Conflict()
            expected = stored[0]

    async def delete(self, state: State[Any], **parts: str) -> None:
        """Delete a key, whatever it holds now. A key that does not exist is no error.

        Errors: AmbiguousWrite when the deletion was not confirmed, PeerUnavailable when it surely
        was not done.
        """
        await self._store(state.home(**parts), state.key(**parts), b"", {_OPERATION: "DEL"})

    async def compare_and_delete(self, state: State[Any], expected_revision: int, **parts: str) -> Conflict | None:
        """Delete a key that is still at the expected revision.

        Errors: AmbiguousWrite when the deletion was not confirmed. It may still happen, so read
        again.
        """
        try:
            await self._store(
                state.home(**parts), state.key(**parts), b"", {_OPERATION: "DEL", _EXPECTED: str(expected_revision)}
            )
        except _Lost:
            return Conflict()
        return None

    async def list(self, state: State[M], *, on_rejected: Rejected | None = None, **parts: str) -> tuple[Entry[M], ...]:
        """Read all entries that match, sorted by key.

        An entry that no contract accepts is logged, passed to `on_rejected` by key and reason, and
        left out.

        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        Cost: all matching values cross the wire. Use `watch` for repeated reads.
        """
        entries: dict[str, Entry[M]] = {}
        patience = ReadTimeout(f"list {state.bucket}", limit_s=self._connection.settings.timeout_s)
        async with aclosing(self._watch(state, parts, on_rejected)) as changes:
            while True:
                change = await patience.next(changes)
                if change.kind is ChangeKind.SNAPSHOT_END:
                    break
                if change.kind is ChangeKind.RESET:
                    entries.clear()
                    continue
                key = state.key(**change.parts)
                if change.kind is ChangeKind.PUT and change.value is not None:
                    entries[key] = Entry(
                        parts=change.parts, revision=change.revision, value=change.value, origin=change.origin
                    )
                else:
                    entries.pop(key, None)
        return tuple(entries[key] for key in sorted(entries))

    async def keys(self, state: State[Any], **parts: str) -> tuple[dict[str, str], ...]:
        """Name all keys that match, by their parts, sorted.

        A stored key that the state cannot have made is left out.

        Errors: PeerUnavailable when nothing comes within the time of `nats.timeout_s`.
        Cost: a consumer of each of the state's buckets, for headers alone. No value is read.
        """
        newest: dict[str, tuple[int, bool]] = {}
        for bucket in state.buckets():
            for key, stored in (await self._stored_keys(bucket, parts)).items():
                # In its class's bucket and in the common one: the
                # newest by the server's time counts.
                newest[key] = max(newest.get(key, stored), stored)
        named: dict[str, dict[str, str]] = {}
        for key in sorted(key for key, (_, is_there) in newest.items() if is_there):
            with suppress(ContractError):
                named[key] = state.parse_key(key)
        return tuple(named.values())

    async def _stored_keys(self, bucket: State[Any], parts: dict[str, str]) -> dict[str, tuple[int, bool]]:
        """Return, for each key of one bucket, when it was last written or deleted, and whether it
        exists.
        """
        stored: dict[str, tuple[int, bool]] = {}
        feed = Feed(
            self._connection,
            bucket_stream(bucket),
            bucket_subject(bucket, bucket.key_pattern(**parts)),
            From.NEWEST_OF_EACH,
            has_data=False,
        )
        patience = ReadTimeout(f"list {bucket.bucket}", limit_s=self._connection.settings.timeout_s)
        async with aclosing(feed.messages()) as items:
            while (item := await patience.next(items)) is not Mark.CAUGHT_UP:
                if item is Mark.RESET:
                    stored.clear()
                elif isinstance(item, Delivery):
                    stored[item.subject.removeprefix(bucket_subject(bucket, ""))] = (
                        item.time_ns,
                        _OPERATION not in item.headers,
                    )
        return stored

    async def history(self, state: State[M], *, has_deleted: bool = False, **parts: str) -> tuple[Entry[M], ...]:
        """Read the kept values of one key since it was last deleted, oldest first.

        Values that cannot be read are left out. The values are read one by one. Those that the
        bucket dropped meanwhile are left out as well: after one of them another may have been
        dropped before it was read, and a caller that compares neighbours would take two changes for
        one.
        Shapes: has_deleted — also those from before a deletion: evidence of what was there.
        Errors: raises PeerUnavailable when the bucket cannot be read.
        """
        state = state.home(**parts)
        key = state.key(**parts)
        entries: list[Entry[M]] = []
        try:
            async with aclosing(
                self._jetstream.messages_of(bucket_stream(state), bucket_subject(state, key))
            ) as messages:
                async for message in messages:
                    if _OPERATION in message.headers:
                        if not has_deleted:
                            entries.clear()
                        continue
                    try:
                        value = await _read_value(state, message.data, where=f"{state.bucket}/{key}")
                        state.check_place(value, parts)
                    except ContractError:
                        continue
                    entries.append(Entry(parts=parts, revision=message.sequence, value=value))
            oldest = await self._jetstream.oldest_sequence(bucket_stream(state), bucket_subject(state, key))
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {state.bucket}/{key}: {err}") from err
        return tuple(entry for entry in entries if 0 < oldest <= entry.revision)

    def watch(
        self, state: State[M], on_rejected: Rejected | None = None, /, **parts: str
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
        return self._watch(state, parts, on_rejected)

    def watch_to_write(self, state: State[M], /, **parts: str) -> AsyncGenerator[Change[M], None]:
        """Watch as `watch` does, for a writer of these keys at their revisions: a value that no
        contract accepts is yielded as well, so that it can be overwritten.

        Shapes: such a change is UNREADABLE, with the key's revision, and the newest value before it
        that can be read, None where the bucket has kept none.
        """
        return self._watch(state, parts, yields_unreadable=True)

    async def _watch(
        self,
        state: State[M],
        parts: dict[str, str],
        on_rejected: Rejected | None = None,
        *,
        yields_unreadable: bool = False,
    ) -> AsyncGenerator[Change[M], None]:
        """Watch. After the snapshot also the deletion of a key that was not yielded is one: its
        value may have come and gone while the feed was made again, and its writer knows it.
        """
        prefix = bucket_subject(state, "")
        # For one key: remembering many would take their size in memory.
        reader = StoredReader(state) if state.entries and state.is_whole(parts) else None
        keys: set[str] = set()
        is_whole = False
        async with aclosing(state_feed(self._connection, state, parts).messages()) as items:
            async for item in items:
                if item is Mark.RESET:
                    keys.clear()
                    is_whole = False
                    yield Change(kind=ChangeKind.RESET, parts={}, revision=0, value=None)
                elif item is Mark.CAUGHT_UP:
                    is_whole = True
                    yield Change(kind=ChangeKind.SNAPSHOT_END, parts={}, revision=0, value=None)
                elif isinstance(item, Delivery):
                    key = item.subject.removeprefix(prefix)
                    try:
                        change = await self._read(state, item, key, keys, reader, is_whole=is_whole)
                    except ContractError as err:
                        origin = _read_origin(item.headers, item.time_ns)
                        self._note_rejected(state, item, key, err, origin)
                        if on_rejected is not None:
                            on_rejected(key, f"{err.message}{self._written_by(origin)}")
                        if (
                            yields_unreadable
                            and (unreadable := await self._unreadable(state, key, item, origin)) is not None
                        ):
                            keys.add(key)
                            yield unreadable
                        continue
                    if change is not None:
                        yield change

    async def _read(
        self,
        state: State[M],
        item: Delivery,
        key: str,
        keys: set[str],
        reader: StoredReader[M] | None,
        *,
        is_whole: bool,
    ) -> Change[M] | None:
        """Make a change of what was delivered. None when it is none.

        Errors: raises ContractError for a key or a value that no contract accepts.
        """
        parts = state.parse_key(key)
        if _OPERATION in item.headers or "Nats-Marker-Reason" in item.headers:
            if key not in keys and not is_whole:
                return None
            keys.discard(key)
            return Change(kind=ChangeKind.DELETE, parts=parts, revision=item.sequence, value=None)
        value = await _read_value(state, item.data, where=f"{state.home(**parts).bucket}/{key}", reader=reader)
        state.check_place(value, parts)
        keys.add(key)
        return Change(
            kind=ChangeKind.PUT,
            parts=parts,
            revision=item.sequence,
            value=value,
            origin=_read_origin(item.headers, item.time_ns),
        )

    async def _unreadable(self, state: State[M], key: str, item: Delivery, origin: Origin) -> Change[M] | None:
        """Make the change for a value that no contract accepts.

        None for a key that is none of the state's: no process of ours writes it.
        """
        try:
            parts = state.parse_key(key)
        except ContractError:
            return None
        try:
            last = await self._last_readable(state, parts)
        except PeerUnavailable:
            # It is yielded all the same. With the next change, or after the next connect, there is
            # another try.
            last = None
        value = last.value if last is not None and last.revision < item.sequence else None
        return Change(kind=ChangeKind.UNREADABLE, parts=parts, revision=item.sequence, value=value, origin=origin)

    def _written_by(self, origin: Origin) -> str:
        """Name the release that wrote a value that cannot be read here. Empty where that explains
        nothing.
        """
        is_other = is_of_other_release(origin.release, self._connection.release)
        return f"; release {origin.release} wrote it, this is {self._connection.release}" if is_other else ""

    def _note_rejected(self, state: State[Any], item: Delivery, key: str, err: ContractError, origin: Origin) -> None:
        self._connection.metrics.rejects.labels(state.name).inc()
        bucket = state.home_of_key(key).bucket
        fields = {
            **err.facts,
            "bucket": bucket,
            "key": key,
            "revision": item.sequence,
            "error": str(err),
            "release": origin.release,
        }
        self._connection.quiet.warning("state.rejected", f"{bucket}/{key}", **fields)

    async def _newest_of_all(
        self, state: State[M], key: str
    ) -> tuple[State[M], tuple[int, Headers, bytes, int] | None]:
        """Read the newest of a key, and return its bucket: what a relay wrote at a hub is in the
        common one.
        """
        home = state.home_of_key(key)
        stored = await self._newest(home, key)
        if home.bucket != state.bucket:
            common = await self._newest(state, key)
            if common is not None and (stored is None or stored[3] < common[3]):
                return state, common
        return home, stored

    async def _newest(self, state: State[Any], key: str) -> tuple[int, Headers, bytes, int] | None:
        try:
            stored = await self._jetstream.last_message(bucket_stream(state), bucket_subject(state, key))
        except JetStreamError as err:
            raise PeerUnavailable(f"cannot read {state.bucket}/{key}: {err}") from err
        return None if stored is None else (stored.sequence, stored.headers, stored.data, stored.time_ns)

    async def _store(self, state: State[Any], key: str, data: bytes, headers: Headers) -> int:
        outcome = "failed"
        try:
            stored = await self._jetstream.store(
                bucket_subject(state, key), data, stream=bucket_stream(state), headers=headers
            )
            outcome = "written"
            return stored.sequence
        except JetStreamError as err:
            if err.err_code in JetStreamError.CONFLICTS:
                outcome = "conflict"
                raise _Lost from err
            raise err.refusal(f"cannot write {state.bucket}/{key}", bucket_stream(state)) from err
        finally:
            self._connection.metrics.writes.labels(state.name, outcome).inc()


async def _read_value(state: State[M], data: bytes, *, where: str, reader: StoredReader[M] | None = None) -> M:
    """Read stored bytes.

    Large ones are read in a thread, so that this process answers others meanwhile.
    """
    read = partial(from_stored, state) if reader is None else reader.read
    if len(data) < _LARGE_BYTES and not is_packed(state, data):
        return read(data, where=where)
    return await asyncio.to_thread(read, data, where=where)


class _Lost(Exception):
    """Raised inside when a compare-and-set lost."""


def _read_origin(headers: Headers, time_ns: int) -> Origin:
    """Read what a stored message's headers have of its writer.

    A header with another text than ours, or no number where one is due, is ignored.
    """
    sent_ms = read_number(headers.get(SENT))
    return Origin(
        release=shown_release(headers.get(RELEASE, "")),
        ahead_s=None if sent_ms is None else (sent_ms - time_ns / 1_000_000) / 1000,
        stored_at=rfc3339(datetime.fromtimestamp(time_ns / 1_000_000_000, UTC)),
        time_ns=time_ns,
    )
