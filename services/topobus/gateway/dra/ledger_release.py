"""Releases claims in the ledger when the cluster has deallocated them. In a cluster the scheduler deallocates, and no other component tells the ledger.

Flows in: the ledger, the checkpoint, claims from the API server. Flows out: releases. A claim that is prepared here is never released. One that was unprepared here
is released as soon as the API server says that it is not allocated to this node any more. Any other must be found unallocated twice in a row, because its
allocation may be about to be written. No answer means no release.
"""

from __future__ import annotations

import asyncio
import uuid

from topobus.domain.errors import TopobusError
from topobus.domain.names import ClaimUid
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.core.claim_allocation import is_allocated_here
from topobus.gateway.dra.checkpoint import Checkpoint
from topobus.gateway.dra.claim_reading import ClaimReader
from topobus.gateway.node_state import NodeState
from topobus.runtime.logging import get_logger

__all__ = ["LedgerRelease"]


class LedgerRelease:
    """Looks at the ledger's claims, period after period and when asked."""

    def __init__(self, state: NodeState, asks: NodeAsks, reader: ClaimReader, checkpoint: Checkpoint, deadlines: DeadlineSettings) -> None:
        self._state = state
        self._asks = asks
        self._reader = reader
        self._checkpoint = checkpoint
        self._deadlines = deadlines
        self._left: set[str] = set()
        self._over_before: frozenset[str] = frozenset()

    def leave(self, owner: Owner) -> None:
        """Take over a claim that is no longer prepared here."""
        self._left.add(owner.key)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._deadlines.reconcile_s)
            self._over_before, _ = await self._release_unprepared(self._over_before)

    async def settle(self) -> bool:
        """Release claims that were unprepared here and are over by now; True when there was one."""
        _, released = await self._release_unprepared(frozenset())
        return released > 0

    async def _release_unprepared(self, over_before: frozenset[str]) -> tuple[frozenset[str], int]:
        """Look at each claim once: the keys of those that look over, and how many were released."""
        ledger = self._state.ledger
        prepared = {entry.uid for entry in self._checkpoint.entries()}
        owners = [allocation.owner for _, allocation in sorted(ledger.allocations.items())] if ledger else []
        self._left &= {owner.key for owner in owners}
        over: set[str] = set()
        released = 0
        for owner in owners:
            if owner.kind is not OwnerKind.CLAIM or owner.uid in prepared:
                continue
            try:
                claim = await self._reader.read(owner.namespace, owner.name)
                if is_allocated_here(claim, ClaimUid(owner.uid), self._state.node):
                    continue
                over.add(owner.key)
                if owner.key in self._left or owner.key in over_before:
                    released += await self._release(owner)
            except TopobusError as err:
                get_logger().warning("claim.settle-failed", claim_uid=owner.uid, error=str(err))
                break
        return frozenset(over), released

    async def _release(self, owner: Owner) -> bool:
        if any(entry.uid == owner.uid for entry in self._checkpoint.entries()):
            # It was prepared while we looked.
            return False
        refusal = await self._asks.release(f"settle-{uuid.uuid4().hex}", owner)
        if refusal is not None:
            get_logger().warning("claim.settle-refused", claim_uid=owner.uid, error=refusal.reasons[0].message)
            return False
        self._left.discard(owner.key)
        get_logger().info(
            "claim.released", claim_uid=owner.uid, claim=f"{owner.namespace}/{owner.name}", why="it is not allocated here any more"
        )
        return True
