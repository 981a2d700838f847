"""A feed of one key: delivers the newest message of one subject of a stream, and each newer one
that it sees, without a consumer.

The server publishes a hint at a separate subject when the key was written (the stream's
`republish`). Every process with the right could publish there, and a hint may be lost. So the
message itself is read from the stream's leader. Hints that come while a read is under way cost one
more read, and a flood of them some reads a second. At the start, after each reconnect, and from
time to time the feed checks that the stream is still the same and that nothing was missed. When the
stream was lost or rolled back, the feed delivers RESET and the key's message again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from nats.aio.msg import Msg

from topobus.bus.connection.connection import Connection
from topobus.bus.failures import JetStreamError
from topobus.bus.feeds.feed import Delivery, FeedReports, Mark
from topobus.bus.streams.jetstream import JetStream, StoredMessage
from topobus.process.backoff import full_jitter
from topobus.process.clock import until_tick
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["KeyFeed"]

# How often to check whether a hint was lost. The first check is soon: until the other servers of a
# cluster know of our subscription, their hints do not reach us.
CHECK_S = 30.0
_FIRST_CHECK_S = 2.0
# Checks are made at whole seconds, when the process's other loops wake up as well.
_TICK_S = 1.0
# A key may be read so many times at once, and so many times a second in the long run: a ledger is
# written for each pod, and a busy node has tens of them in a second.
_BURST = 64
_READS_PER_S = 32.0


class KeyFeed:
    """Reads one key. Use `messages()` once."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subject: str,
        hints: str,
        *,
        on_waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Make a feed of a stream's subject.

        `hints` is the subject of the hints that it was written. `on_waiting` is called with the
        reason, each time that a read failed.
        """
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._stream = stream
        self._subject = subject
        self._hints = hints
        self._reports = FeedReports(connection, stream, on_waiting)
        self._budget = _Budget()
        self._hinted = asyncio.Event()
        self._created = ""
        self._position = 0
        self._position_ns = 0
        self._began_at = 0
        self._checked = 0
        """Up to where in the stream nothing of the key is newer than what was delivered."""
        self._is_caught_up = False

    async def messages(self) -> AsyncGenerator[Delivery | Mark, None]:
        """Yield the key's messages, each newer than the last one, and marks, until closed."""
        forget = self._connection.on_change(self._hinted.set)
        lasting = None
        generation = attempt = 0
        look_s = _FIRST_CHECK_S
        is_due = True
        try:
            while True:
                await self._connection.wait_up()
                self._hinted.clear()
                try:
                    if lasting is None:
                        lasting = await self._connection.subscribe(self._hints, self._on_hint)
                    if generation != self._connection.generation:
                        # Hints of all later writes reach us.
                        await self._connection.barrier()
                        generation, look_s, is_due = self._connection.generation, _FIRST_CHECK_S, True
                        # The present message is read, whatever the stream's numbers are.
                        self._checked = 0
                    async with aclosing(self._look() if is_due else self._read()) as items:
                        async for item in items:
                            yield item
                    attempt = 0
                    is_due = False
                    self._reports.read()
                except (PeerUnavailable, JetStreamError, ContractError, TimeoutError) as err:
                    self._reports.failed(err)
                    # As after a reconnect: hints may have been missed meanwhile.
                    generation = 0
                    await asyncio.sleep(full_jitter(attempt))
                    attempt += 1
                    continue
                is_due = not await self._wait(look_s)
                if is_due:
                    look_s = CHECK_S
        finally:
            forget()
            if lasting is not None:
                await self._connection.unsubscribe(lasting)

    async def _on_hint(self, message: Msg) -> None:
        self._hinted.set()

    def _delivered(self, stored: StoredMessage) -> Delivery:
        return Delivery.of(stored, is_replay=stored.sequence <= self._began_at)

    async def _wait(self, look_s: float) -> bool:
        """Wait for a hint, and until the key may be read again.

        False when the time has come to look without one.
        """
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(look_s + until_tick(now_s + look_s, _TICK_S)):
                await self._hinted.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(self._budget.take(asyncio.get_running_loop().time()))
        return True

    async def _look(self) -> AsyncGenerator[Delivery | Mark, None]:
        """Check the stream, and read the key if anything came since. Yields RESET when the stream
        is another one.
        """
        info = await self._jetstream.stream_info(self._stream)
        if info is None:
            raise PeerUnavailable(
                f"stream {self._stream} does not exist", next_step="start topobus-controller: it makes them"
            )
        if self._created and (info.created != self._created or info.last_sequence < self._position):
            self._reset()
            yield Mark.RESET
        if not self._created:
            self._created, self._began_at = info.created, info.last_sequence
        if self._is_caught_up and self._checked:
            if info.last_sequence == self._checked:
                return
            if await self._jetstream.next_message(self._stream, self._subject, self._checked + 1) is None:
                self._checked = info.last_sequence
                return
            if not self._hinted.is_set():
                self._reports.reopened("missed-hint", self._position)
        async with aclosing(self._read(is_anchored=False)) as items:
            async for item in items:
                yield item
        # A message that came while we read has a hint, or is found by the next check.
        self._checked = max(self._position, info.last_sequence)

    async def _read(self, *, is_anchored: bool = True) -> AsyncGenerator[Delivery | Mark, None]:
        """Read the key, and deliver a newer message.

        Yields RESET when what was delivered is not the stream's any more.

        Shapes: is_anchored — false when the store may have been restored meanwhile, so that a newer
        message may have another past than the one that was delivered.
        """
        stored = await self._jetstream.last_message(self._stream, self._subject)
        if self._position and await self._is_other_history(stored, is_anchored=is_anchored):
            yield await self._restart()
        if stored is not None and stored.sequence > self._position:
            self._position, self._position_ns = stored.sequence, stored.time_ns
            self._checked = max(self._checked, self._position)
            yield self._delivered(stored)
        if not self._is_caught_up:
            self._is_caught_up = True
            yield Mark.CAUGHT_UP

    async def _is_other_history(self, stored: StoredMessage | None, *, is_anchored: bool) -> bool:
        """Return whether the message that we delivered was never stored in this stream, because a
        store was restored.
        """
        if stored is not None and stored.sequence <= self._position:
            return stored.sequence < self._position or stored.time_ns != self._position_ns
        if stored is not None and is_anchored:
            return False
        at_position = await self._jetstream.message_at(self._stream, self._position)
        # A missing message is no proof: newer ones of its subject, or others of a full bucket, may
        # have replaced it. Another message in its place is.
        return at_position is not None and at_position.time_ns != self._position_ns

    async def _restart(self) -> Mark:
        info = await self._jetstream.stream_info(self._stream)
        self._reset()
        if info is not None:
            self._created, self._began_at = info.created, info.last_sequence
        return Mark.RESET

    def _reset(self) -> None:
        self._reports.reopened("replaced", self._position)
        self._created = ""
        self._position = self._position_ns = self._checked = 0
        self._is_caught_up = False


class _Budget:
    """How often a key may be read: a bucket of tokens."""

    def __init__(self) -> None:
        self._tokens = float(_BURST)
        self._at_s = 0.0

    def take(self, now_s: float) -> float:
        """Take the right to one read, and return the seconds until it may begin."""
        self._tokens = min(float(_BURST), self._tokens + (now_s - self._at_s) * _READS_PER_S)
        self._at_s = now_s
        self._tokens -= 1.0
        return max(0.0, -self._tokens / _READS_PER_S)
