"""A feed of a state whose classes have buckets of their own: delivers what all its buckets have, as
if there were one.

Messages have the common bucket's subjects. CAUGHT_UP is delivered when all buckets have been read,
RESET when one of them was lost. An entry may be in its class's bucket and in the common one: at a
hub relays write to the common one, and a node that was moved to a server of its own, or back, has
written to both. The newest by the server's time counts. The classes' buckets are read first, so
that an older value of the common one is never delivered after a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from topobus.bus.connection.connection import Connection
from topobus.bus.feeds.feed import Delivery, Feed, From, Mark
from topobus.bus.feeds.key_feed import KeyFeed
from topobus.bus.feeds.pattern_feed import PatternFeed
from topobus.bus.server_config.streams import bucket_stream
from topobus.bus.streams.provision import bucket_subject
from topobus.formats.messages.nouns import State
from topobus.process.ended_tasks import end_tasks

__all__ = ["BucketFeed", "state_feed"]

# So many messages wait for the reader. A slow reader stops the feeds.
_WAITING = 64


def state_feed(
    connection: Connection, state: State[Any], parts: Mapping[str, str]
) -> BucketFeed | Feed | KeyFeed | PatternFeed:
    """Make the feed of a state's entries that match. A part left out matches anything."""
    return BucketFeed(connection, state, parts) if len(_buckets(state, parts)) > 1 else _feed(connection, state, parts)


class BucketFeed:
    """Reads several buckets of one state. Use `messages()` once."""

    def __init__(self, connection: Connection, state: State[Any], parts: Mapping[str, str]) -> None:
        self._connection = connection
        self._state = state
        self._parts = dict(parts)
        self._prefix = bucket_subject(state, "")

    async def messages(self) -> AsyncGenerator[Delivery | Mark, None]:
        """Yield messages and marks until closed. After a RESET all buckets are read again."""
        while True:
            async with aclosing(self._read_all()) as items:
                async for item in items:
                    yield item

    async def _read_all(self) -> AsyncGenerator[Delivery | Mark, None]:
        """Read all buckets until one was lost. That RESET is the last item."""
        arrived: asyncio.Queue[tuple[State[Any], Delivery | Mark]] = asyncio.Queue(_WAITING)
        failures: list[BaseException] = []
        common, *apart = _buckets(self._state, self._parts)
        unread = {bucket.bucket for bucket in apart}
        newest_ns: dict[str, int] = {}
        tasks: list[asyncio.Task[None]] = []

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (failure := task.exception()) is not None:
                failures.append(failure)
                if arrived.empty():
                    # Wakes the reader, so that a defect of ours ends it, as it would with one feed.
                    arrived.put_nowait((common, Mark.RESET))

        def begin(bucket: State[Any]) -> None:
            tasks.append(asyncio.create_task(self._pump(bucket, arrived), name=f"feed-{bucket.bucket}"))
            tasks[-1].add_done_callback(note_end)

        for bucket in apart:
            begin(bucket)
        try:
            while True:
                bucket, item = await arrived.get()
                if failures:
                    raise failures[0]
                if item is Mark.RESET:
                    yield item
                    return
                if isinstance(item, Mark):
                    unread.discard(bucket.bucket)
                    if bucket.bucket == common.bucket:
                        yield item
                    elif not unread:
                        begin(common)
                    continue
                key = item.subject.removeprefix(bucket_subject(bucket, ""))
                if self._state.home_of_key(key).bucket != common.bucket:
                    if item.time_ns < newest_ns.get(key, 0):
                        continue
                    newest_ns[key] = item.time_ns
                elif bucket.bucket != common.bucket:
                    # Only a process without the right writes another class's key there.
                    continue
                yield msgspec.structs.replace(item, subject=f"{self._prefix}{key}")
        finally:
            await end_tasks(*tasks)

    async def _pump(self, bucket: State[Any], arrived: asyncio.Queue[tuple[State[Any], Delivery | Mark]]) -> None:
        async with aclosing(_feed(self._connection, bucket, self._own_parts(bucket)).messages()) as items:
            async for item in items:
                await arrived.put((bucket, item))

    def _own_parts(self, bucket: State[Any]) -> dict[str, str]:
        """Add the class to the parts. With the node they are a whole key, which is read without a
        consumer.
        """
        device_class = (
            bucket.bucket.removeprefix(f"{self._state.bucket}_") if bucket.bucket != self._state.bucket else ""
        )
        return {**self._parts, **({"device_class": device_class} if device_class else {})}


def _buckets(state: State[Any], parts: Mapping[str, str]) -> tuple[State[Any], ...]:
    """Return the buckets that may have matching entries, the common one first."""
    if "device_class" in parts:
        home = state.home(**parts)
        return (state,) if home.bucket == state.bucket else (state, home)
    return state.buckets()


def _feed(connection: Connection, state: State[Any], parts: Mapping[str, str]) -> Feed | KeyFeed | PatternFeed:
    stream, subject = bucket_stream(state), bucket_subject(state, state.key_pattern(**parts))
    if state.is_whole(parts):
        return KeyFeed(connection, stream, subject, state.subject(**parts))
    if not connection.makes_consumers:
        return PatternFeed(connection, stream, subject, state.pattern(**parts), From.NEWEST_OF_EACH)
    return Feed(connection, stream, subject, From.NEWEST_OF_EACH)
