"""The machine of this node as discovery publishes it: the newest version, and a wait for the next.

It also calls back when the store lost its history. A machine that was deleted from the bucket stays
known here, because that proves nothing about the hardware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.bus.bus import ChangeKind
from topobus.formats.messages.catalogue import MACHINE
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.machine import Machine

__all__ = ["NodeMachine"]


class NodeMachine:
    """The copy of one node's machine in a device service."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.newest: Machine | None = None
        """None until discovery has published one."""
        self._changes = asyncio.Condition()

    async def follow(self, *, on_change: Callable[[], None], on_reset: Callable[[], None]) -> None:
        """Follow the bucket until cancelled.

        `on_change` is called after each machine, `on_reset` when the store lost its history.
        """
        log = get_logger()
        log.info("machine.awaited", node=self._runtime.node)
        async for change in self._runtime.bus.watch(MACHINE, node=self._runtime.node):
            if change.kind is ChangeKind.PUT and change.value is not None:
                if self.newest is None:
                    log.info("machine.received", generation=change.value.generation)
                    self._runtime.readiness.set("machine", is_ready=True)
                async with self._changes:
                    self.newest = change.value
                    self._changes.notify_all()
                on_change()
            elif change.kind is ChangeKind.RESET:
                on_reset()
            elif change.kind is ChangeKind.SNAPSHOT_END and self.newest is None:
                log.info("machine.missing", node=self._runtime.node, next_step="start topobus-discovery on this node")

    async def wait_known(self) -> None:
        """Wait until there is a machine."""
        async with self._changes:
            await self._changes.wait_for(lambda: self.newest is not None)

    async def wait_changed(self, generation: int, limit_s: float | None) -> None:
        """Wait until the machine has another generation, but no longer than the limit.

        None waits without limit.
        """
        async with self._changes:
            try:
                async with self._runtime.clock.timeout(limit_s):
                    await self._changes.wait_for(
                        lambda: self.newest is not None and self.newest.generation != generation
                    )
            except TimeoutError:
                return
