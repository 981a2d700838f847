"""Publishes the node's alignment options and which device services are silent, so that others
decide as this node would, and who only reads the bus sees silence.

Flows in: settings, and the silent classes as they change. Flows out: one state of the catalogue,
written anew now and then: when that ends, this service has. During a rolling update two instances
may have different settings; the one that started last wins and the other does not write again.
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

# Between two tries to write: nobody waits for it, and the controller's defaults are kubelet's.
_RETRY_S = 1.0


class AlignmentPublisher:
    """Keeps one node's alignment published, for ever."""

    def __init__(self, bus: Bus, node_alignment: NodeAlignment, clock: Clock | None = None) -> None:
        self._bus = bus
        self._clock = clock or SystemClock()
        self._wanted = node_alignment
        self._stored: NodeAlignment | None = None
        """What stands there, as far as it is of this release."""
        self._revision = 0
        """At which revision it stands there."""
        self._is_settled = False
        """Whether all that stood there at the start has been read."""
        self._news = asyncio.Event()

    def note_silence(self, unheard_classes: Mapping[str, str]) -> None:
        """Say which device services are silent, with the time since when."""
        self._wanted = structs.replace(self._wanted, unheard_classes=dict(sorted(unheard_classes.items())))
        self._news.set()

    async def run(self) -> None:
        """Write at the start when something else stands there, when silence begins or ends, when it
        was lost, and each `SAID_EVERY_S`.
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
                        # The echo of what this instance has replaced since.
                        pass
                    case ChangeKind.PUT:
                        self._revision = change.revision
                        # What another release wrote is written again, so that nobody
                        # takes it for the one that runs.
                        self._stored = change.value if change.origin.release == self._bus.release else None
                    case ChangeKind.UNREADABLE:
                        # Somebody wrote over it. Whose words stood there last says them again;
                        # where that cannot be told any more, everybody does.
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
        """Whether this instance's settings stand there: another instance that started later is not
        spoken over.
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
        """Write over what stands there and nothing else: an instance that has just started wins.

        What cannot be written now is written at the next time.
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
                # What stands there now comes by the watch, at the latest by its next look.
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
