"""Publishes the node's alignment options and which device services are silent.

So other services decide as this node would, and a program that only reads the bus learns about
silence. The state is written again at intervals, so a state that gets old means that this service
has ended. During a rolling update two instances may have different settings. The one that started
last wins, and the other does not write again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from msgspec import structs

from topobus.bus.bus import AmbiguousWrite, Bus, Written
from topobus.bus.streams.state import ChangeKind
from topobus.engine.health.silence import SAID_EVERY_S
from topobus.formats.messages.catalogue import ALIGNMENT
from topobus.process.clock import Clock, SystemClock, until_tick
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable
from topobus.values.view import NodeAlignment

__all__ = ["AlignmentPublisher"]

# Seconds between two tries to write. No request waits for it, and the controller's defaults are
# kubelet's.
_RETRY_S = 1.0


class AlignmentPublisher:
    """Keeps one node's alignment published."""

    def __init__(self, bus: Bus, node_alignment: NodeAlignment, clock: Clock | None = None) -> None:
        self._bus = bus
        self._clock = clock or SystemClock()
        self._wanted = node_alignment
        self._stored: NodeAlignment | None = None
        """What is stored, if this release wrote it."""
        self._revision = 0
        """Revision of what is stored."""
        self._is_settled = False
        """Whether everything that was stored at the start has been read."""
        self._news = asyncio.Event()

    def note_silence(self, unheard_classes: Mapping[str, str]) -> None:
        """Note which device services are silent, and since when."""
        self._wanted = structs.replace(self._wanted, unheard_classes=dict(sorted(unheard_classes.items())))
        self._news.set()

    async def run(self) -> None:
        """Write at the start when something else is stored, when silence begins or ends, when the
        entry was lost, and every `SAID_EVERY_S`.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._say_news())
            group.create_task(self._say_anew())

    async def _follow(self) -> None:
        async with aclosing(self._bus.watch_to_write(ALIGNMENT, node=self._wanted.node)) as changes:
            async for change in changes:
                match change.kind:
                    case ChangeKind.PUT | ChangeKind.UNREADABLE if change.revision < self._revision:
                        # The echo of a value that this instance has replaced since.
                        pass
                    case ChangeKind.PUT:
                        self._revision = change.revision
                        # What another release wrote is written again, so that the entry names the
                        # release that runs.
                        self._stored = change.value if change.origin.release == self._bus.release else None
                    case ChangeKind.UNREADABLE:
                        # Another writer replaced the value by one that cannot be read. The instance
                        # that wrote the last readable value writes it again. If that value is
                        # unknown, every instance writes.
                        self._revision = change.revision
                        self._stored = change.value or self._wanted
                        if self._is_ours:
                            await self._write_again()
                    case ChangeKind.RESET:
                        self._stored, self._revision, self._is_settled = None, 0, False
                    case ChangeKind.DELETE | ChangeKind.SNAPSHOT_END:
                        self._stored = None if change.kind is ChangeKind.DELETE else self._stored
                        self._is_settled = True
                        if self._stored != self._wanted:
                            await self._write()

    async def _say_news(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._is_ours and self._stored != self._wanted:
                await self._write_again()

    async def _say_anew(self) -> None:
        while True:
            await self._clock.sleep(until_tick(self._clock.monotonic(), SAID_EVERY_S))
            if self._is_ours:
                await self._write_again()

    @property
    def _is_ours(self) -> bool:
        """Whether this instance's settings are stored. The settings of another instance that
        started later are not overwritten.
        """
        return (
            self._is_settled
            and self._stored is not None
            and structs.replace(self._stored, unheard_classes=self._wanted.unheard_classes) == self._wanted
        )

    async def _write(self) -> None:
        while True:
            written = self._wanted
            try:
                revision = await self._bus.put(ALIGNMENT, written, node=written.node)
            except (PeerUnavailable, AmbiguousWrite) as err:
                get_logger().warning("alignment.unpublished", error=str(err))
                await self._clock.sleep(_RETRY_S)
            else:
                self._note_written(written, revision)
                return

    async def _write_again(self) -> None:
        """Write only over the revision that is known, because an instance that has just started
        wins.

        A failed write is repeated at the next occasion.
        """
        written = self._wanted
        try:
            answer = await self._bus.compare_and_set(ALIGNMENT, written, self._revision, node=written.node)
        except (PeerUnavailable, AmbiguousWrite) as err:
            get_logger().warning("alignment.unpublished", error=str(err))
        else:
            if isinstance(answer, Written):
                self._note_written(written, answer.revision)
            else:
                # The watch delivers what is stored now, at the latest at its next periodic read.
                get_logger().info("alignment.overtaken", revision=self._revision)

    def _note_written(self, written: NodeAlignment, revision: int) -> None:
        if written != self._stored:
            get_logger().info(
                "alignment.published",
                policy=written.options.policy.value,
                scope=written.options.scope.value,
                silent_classes=sorted(written.unheard_classes),
            )
        self._stored, self._revision = written, max(revision, self._revision)
