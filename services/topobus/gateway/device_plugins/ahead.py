"""Calls a device service to prepare devices while the ledger is still being asked for them, so that
of the two requests of an Allocate the shorter one costs no time.

This is done only where preparing changes nothing: the inventory names drivers that can detect this,
and the device service checks each request again and refuses as `not-ahead` what would change
anything. A refusal is not final, because the previous holder may have just released the device. So
the request is repeated when the ledger has the new owner. The answer counts only after the
ledger's. See docs/adr/0056.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.gateway.asks import NodeAsks
from topobus.gateway.device_plugins.rules.replicas import Chosen, may_ask_ahead
from topobus.process.ended_tasks import end_tasks
from topobus.values.device import Inventory
from topobus.values.outcome import Refusal
from topobus.values.request import Owner

__all__ = ["Ahead", "PreparationAhead"]

Ahead = asyncio.Task[Prepared | None] | None
"""The request made ahead. None, or a result of None: the request is made when the ledger has the
owner."""


class PreparationAhead:
    """The early preparations of one class's resource."""

    def __init__(self, asks: NodeAsks, device_class: str) -> None:
        self._asks = asks
        self._class = device_class
        self._in_vain = (0, frozenset[str]())
        """A generation of the inventory, and those of its devices for which the service answered
        that something would change."""

    @asynccontextmanager
    async def begun(
        self, op_id: str, owner: Owner, chosen: Chosen, inventory: Inventory | None
    ) -> AsyncIterator[Ahead]:
        """Prepare the devices ahead for the length of the block.

        Leaving the block cancels an unanswered request, which then counts as not made.
        """
        generation, in_vain = self._in_vain
        if inventory is None or not may_ask_ahead(
            inventory, chosen, in_vain if generation == inventory.generation else ()
        ):
            yield None
            return
        task = asyncio.create_task(self._ask(op_id, owner, chosen, inventory.generation), name="prepare-ahead")
        try:
            yield task
        finally:
            await end_tasks(task)
            # Retrieve the error even when the result is not used, because asyncio logs an error
            # that is never retrieved.
            _ = task.cancelled() or task.exception()

    async def _ask(self, op_id: str, owner: Owner, chosen: Chosen, generation: int) -> Prepared | None:
        prepared = await self._asks.prepare(
            self._class, PrepareRequest(op_id=op_id, owner=owner, devices=tuple(sorted(chosen.devices)), is_ahead=True)
        )
        if not isinstance(prepared, Refusal):
            return prepared
        if any(reason.code == "not-ahead" for reason in prepared.reasons):
            former, names = self._in_vain
            self._in_vain = (generation, (names if former == generation else frozenset()).union(chosen.devices))
        return None
