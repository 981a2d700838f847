"""A feed of many keys or subjects of a stream without a consumer: reads the stored messages, key by
key, and then each later message in its turn.

It keeps the promises of `topobus.bus.feeds.feed` for principals that may make no consumer, because
a consumer's messages may be delivered to any subject (docs/adr/0029). The stored messages are read
by the stream's list of subjects, so many at a time. Afterwards each message after the last one is
requested (`next_by_subj`), whenever a hint of the server announces a stored message (the stream's
`republish`) and at the checks of `topobus.bus.feeds.key_feed`. A hint only decides how far to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from nats.aio.msg import Msg

from topobus.bus.connection.connection import Connection
from topobus.bus.feeds.feed import Delivery, From, Mark
from topobus.bus.feeds.key_feed import KeyFeed
from topobus.bus.feeds.numbers import read_count
from topobus.values.errors import ContractError

__all__ = ["PatternFeed"]

# So many values of the beginning are read at once: each may have 900 KiB, and a fleet has
# thousands.
_AT_ONCE = 16
_HINTED_STREAM, _HINTED_SEQUENCE = "Nats-Stream", "Nats-Sequence"


class PatternFeed(KeyFeed):
    """Reads one stream. Use `messages()` once.

    The messages stored at the start come in the order of their subjects, all later ones in the
    stream's.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        pattern: str,
        hints: str,
        start: From,
        *,
        behind: int = 0,
        on_waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Make a feed.

        As `Feed`. `hints` is the subject of the server's hints that something was stored.
        """
        super().__init__(connection, stream, pattern, hints, on_waiting=on_waiting)
        self._start = start
        self._position = behind
        self._hinted_sequence = 0
        self._newest: dict[str, int] = {}
        """What was delivered of each subject at the beginning, until that is over."""

    async def _on_hint(self, message: Msg) -> None:
        headers = message.headers or {}
        if headers.get(_HINTED_STREAM, self._stream) != self._stream:
            # Classes have buckets of their own, and the hints of all come at the subjects of one
            # noun.
            return
        try:
            self._hinted_sequence = max(self._hinted_sequence, read_count(headers.get(_HINTED_SEQUENCE, "")))
        except ContractError:
            self._hinted_sequence = 0
        await super()._on_hint(message)

    async def _read(self, *, is_anchored: bool = True) -> AsyncGenerator[Delivery | Mark, None]:
        """Deliver the stored messages, and then all newer ones.

        Yields RESET when what was delivered is not the stream's any more.
        """
        if not is_anchored and self._position_ns and await self._is_other_history(None, is_anchored=False):
            yield await self._restart()
        if self._start is From.NEW:
            # Fixed now, so that what comes while we are away later is not skipped.
            self._start, self._position, self._is_caught_up = From.ALL, self._began_at, True
        if not self._is_caught_up:
            async with aclosing(self._read_beginning()) as items:
                async for item in items:
                    yield item
        # After a hint read no further than its sequence. A check reads to the end.
        upto = self._hinted_sequence if is_anchored else 0
        async with aclosing(self._walk(upto)) as items:
            async for item in items:
                yield item

    async def _read_beginning(self) -> AsyncGenerator[Delivery | Mark, None]:
        if self._start is From.NEWEST_OF_EACH and not self._position:
            async with aclosing(self._read_newest()) as items:
                async for item in items:
                    yield item
        newest = await self._jetstream.last_message(self._stream, self._subject)
        if newest is not None:
            async with aclosing(self._walk(newest.sequence)) as items:
                async for item in items:
                    yield item
        self._newest.clear()
        self._is_caught_up = True
        yield Mark.CAUGHT_UP

    async def _read_newest(self) -> AsyncGenerator[Delivery, None]:
        """Deliver the newest message of each subject.

        What is written meanwhile comes after it, or has come with it.
        """
        subjects = sorted(await self._jetstream.subject_counts(self._stream, self._subject))
        position = position_ns = 0
        for first in range(0, len(subjects), _AT_ONCE):
            some = subjects[first : first + _AT_ONCE]
            for stored in await asyncio.gather(
                *(self._jetstream.last_message(self._stream, subject) for subject in some)
            ):
                # A subject whose messages the bucket has all dropped is gone. One that was read
                # before a failure has been delivered.
                if stored is None or stored.sequence <= self._newest.get(stored.subject, 0):
                    continue
                self._newest[stored.subject] = stored.sequence
                if position < stored.sequence <= self._began_at:
                    position, position_ns = stored.sequence, stored.time_ns
                yield self._delivered(stored)
        # Nothing that was there when the feed began is newer: it would be the newest of its
        # subject.
        self._position, self._position_ns = position, position_ns

    async def _walk(self, upto: int) -> AsyncGenerator[Delivery, None]:
        """Deliver message after message from our position up to a sequence, or to the end if it is
        0.
        """
        while not upto or self._position < upto:
            stored = await self._jetstream.next_message(
                self._stream, self._subject, max(self._position, self._checked) + 1
            )
            if stored is None:
                return
            if stored.sequence > self._newest.get(stored.subject, 0):
                yield self._delivered(stored)
            self._position, self._position_ns = stored.sequence, stored.time_ns
            self._checked = max(self._checked, self._position)

    def _reset(self) -> None:
        super()._reset()
        self._hinted_sequence = 0
        self._newest.clear()
