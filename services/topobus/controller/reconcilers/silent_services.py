"""Which device services of which nodes are silent, as this controller finds: it reads inventories as they were told, and a service may have ended since.

Flows in: the nodes and classes whose inventories the world has, signs of life over the bus. Flows out: the silent ones, to the world, and a call when that changes.
Each node's topology judges for itself, too, and has the last word; this keeps the controller from choosing what will be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.contracts import catalogue
from topobus.controller.state.standalone_state import StandaloneState
from topobus.domain.silence import SilenceSettings
from topobus.runtime.clock import until_tick
from topobus.runtime.liveness import ServiceLiveness
from topobus.runtime.logging import get_logger
from topobus.runtime.service import Runtime

__all__ = ["SilentServices"]


class SilentServices:
    """One roll call a node, so many at a time."""

    def __init__(
        self, settings: SilenceSettings, parallel: int, runtime: Runtime, world: StandaloneState, on_change: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._world = world
        self._on_change = on_change
        self._gate = asyncio.Semaphore(parallel)
        self._calls: dict[str, ServiceLiveness] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._runtime.clock.sleep(until_tick(self._runtime.clock.monotonic(), self._settings.every_s))

    async def look(self) -> None:
        """Look at all services once, and tell the world what is different."""
        nodes = {node for node, _ in self._world.inventories}
        self._calls = {node: self._calls.get(node) or self._make(node) for node in sorted(nodes)}
        before = self._silent()
        await asyncio.gather(*(self._look_at(node, call) for node, call in self._calls.items() if call.is_due()))
        silent = self._silent()
        self._world.note_silence(silent)
        if silent != before:
            self._on_change()

    def _silent(self) -> dict[tuple[str, str], str]:
        return {(node, device_class): since for node, call in self._calls.items() for device_class, since in call.silent.items()}

    async def _look_at(self, node: str, call: ServiceLiveness) -> None:
        async with self._gate:
            try:
                await call.check_all()
            except Exception as err:  # noqa: BLE001 - boundary: one node's roll call; the others are looked at
                get_logger().warning("presence.unread", node=node, error=str(err), exc_info=err)

    def _make(self, node: str) -> ServiceLiveness:
        return ServiceLiveness(
            self._runtime.bus,
            catalogue.HINTS,
            node=node,
            clock=self._runtime.clock,
            settings=self._settings,
            classes=lambda: self._world.classes_on(node),
            on_change=lambda: None,
        )
