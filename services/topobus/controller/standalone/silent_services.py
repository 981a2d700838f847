"""Detects device services that do not answer, because an inventory stays stored after its service
has ended.

Each node's topology service checks this as well and decides. This module keeps the controller from
choosing devices that would be refused.

So it asks by need: while something waits for devices, and until each service has been heard once.
With nothing to choose, a fleet of 1,000 nodes cost the hub 857 messages a second for each replica
(docs/explanation/large-fleets.md). A service that ends meanwhile is noticed a few seconds after the
next claim or pod arrives, and until then its node refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.bus.liveness import ServiceLiveness
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.health.silence import SilenceSettings
from topobus.formats.messages import catalogue
from topobus.process.clock import until_tick
from topobus.process.logging import get_logger
from topobus.process.service import Runtime

__all__ = ["SilentServices"]

# Device services of a node, as a rule: gpu, nic, fpga and cpu.
_CLASSES_A_NODE = 4


class SilentServices:
    """Checks the services of each node, a bounded number of nodes at a time.

    Args: is_needed — whether anything waits for devices.
    """

    def __init__(
        self,
        settings: SilenceSettings,
        parallel: int,
        runtime: Runtime,
        state: StandaloneState,
        on_change: Callable[[], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._state = state
        self._on_change = on_change
        self._is_needed = is_needed
        # A node's services are asked at the same time. The number of nodes keeps about `parallel`
        # requests in flight, as requests for claims wait behind them.
        self._gate = asyncio.Semaphore(max(1, parallel // _CLASSES_A_NODE))
        self._calls: dict[str, ServiceLiveness] = {}

    async def run(self) -> None:
        """Check the services at each tick until cancelled."""
        while True:
            await self.check()
            await self._runtime.clock.sleep(until_tick(self._runtime.clock.monotonic(), self._settings.every_s))

    async def check(self) -> None:
        """Check the services that are due, and store the silent ones in the state."""
        nodes = {node for node, _ in self._state.inventories}
        self._calls = {node: self._calls.get(node) or self._make(node) for node in sorted(nodes)}
        before = self._silent()
        is_needed = self._is_needed()
        due = [
            (node, call) for node, call in self._calls.items() if (is_needed or not call.is_settled) and call.is_due()
        ]
        await asyncio.gather(*(self._check_node(node, call) for node, call in due))
        silent = self._silent()
        self._state.note_silence(silent)
        if silent != before:
            self._on_change()

    def _silent(self) -> dict[tuple[str, str], str]:
        return {
            (node, device_class): since
            for node, call in self._calls.items()
            for device_class, since in call.silent.items()
        }

    async def _check_node(self, node: str, call: ServiceLiveness) -> None:
        async with self._gate:
            try:
                await call.check_all()
            except Exception as err:  # noqa: BLE001 - boundary: one node's check; the others are checked
                get_logger().warning("presence.unread", node=node, error=str(err), exc_info=err)

    def _make(self, node: str) -> ServiceLiveness:
        return ServiceLiveness(
            self._runtime.bus,
            catalogue.HINT,
            node=node,
            clock=self._runtime.clock,
            settings=self._settings,
            classes=lambda: self._state.classes_on(node),
            on_change=lambda: None,
        )
