"""Releases claims in the ledger when the cluster has deallocated them.

In a cluster the scheduler deallocates, and no other component updates the ledger.

A claim that is prepared here is never released. A claim that was unprepared here (according to the
checkpoint) is released as soon as the API server shows it as not allocated to this node. It is
checked frequently while another claim waits for its devices. Any other claim must be found
unallocated twice in a row, because its allocation may be about to be written. Without an answer
nothing is released.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from topobus.gateway.asks import NodeAsks
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.gateway.claims.rules.claim_allocation import is_allocated_here
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.node_state import NodeState
from topobus.process.broadcast import first_of
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.names import ClaimUid
from topobus.values.request import Owner, OwnerKind

__all__ = ["LedgerRelease"]


# Seconds between two checks of a claim for whose devices another one waits.
_AWAITED_S = 0.5


class LedgerRelease:
    """Checks the ledger's claims periodically and on request."""

    def __init__(
        self,
        state: NodeState,
        asks: NodeAsks,
        read_claim: ReadClaim,
        checkpoint: Checkpoint,
        deadlines: DeadlineSettings,
    ) -> None:
        self._state = state
        self._asks = asks
        self._read_claim = read_claim
        self._checkpoint = checkpoint
        self._deadlines = deadlines
        self._over_before: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self._pause()
            self._over_before, _ = await self._release_unprepared(self._over_before, self._owners())

    async def settle(self) -> bool:
        """Release claims that were unprepared here and are now over. True when there was one."""
        _, released = await self._release_unprepared(frozenset(), self._owners())
        return released > 0

    async def _pause(self) -> None:
        """Wait for the next check of all claims.

        Meanwhile release what another claim waits for as soon as it is over.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._deadlines.reconcile_s
        while (left_s := until - loop.time()) > 0:
            tickets = (
                self._state.awaited_changed.ticket(),
                self._state.ledger_changed.ticket(),
                self._checkpoint.undone_changed.ticket(),
            )
            keys, undone = self._state.awaited, self._checkpoint.undone
            awaited = (
                [owner for owner in self._owners() if owner.key in keys and owner.uid in undone]
                if keys and undone
                else []
            )
            if awaited:
                await self._release_unprepared(frozenset(), awaited)
                await asyncio.sleep(min(left_s, _AWAITED_S))
            else:
                await first_of(tickets, left_s)

    def _owners(self) -> list[Owner]:
        """List the claims that hold something."""
        ledger = self._state.ledger
        owners = [allocation.owner for _, allocation in sorted(ledger.allocations.items())] if ledger else []
        return [owner for owner in owners if owner.kind is OwnerKind.CLAIM]

    async def _release_unprepared(
        self, over_before: frozenset[str], owners: Sequence[Owner]
    ) -> tuple[frozenset[str], int]:
        """Check each of these claims once.

        Returns the keys of those that look deallocated, and how many were released.
        """
        prepared = {entry.uid for entry in self._checkpoint.entries()}
        if self._state.ledger is not None:
            self._checkpoint.keep_undone({ClaimUid(owner.uid) for owner in self._owners()})
        over: set[str] = set()
        released = 0
        for owner in owners:
            if owner.uid in prepared:
                continue
            try:
                claim = await self._read_claim(owner.namespace, owner.name)
                if is_allocated_here(claim, ClaimUid(owner.uid), self._state.node):
                    continue
                over.add(owner.key)
                if owner.uid in self._checkpoint.undone or owner.key in over_before:
                    released += await self._release(owner)
            except TopobusError as err:
                get_logger().warning("claim.settle-failed", claim_uid=owner.uid, error=str(err))
                break
        return frozenset(over), released

    async def _release(self, owner: Owner) -> bool:
        if any(entry.uid == owner.uid for entry in self._checkpoint.entries()):
            # It was prepared during the check.
            return False
        refusal = await self._asks.release(f"settle-{uuid.uuid4().hex}", owner)
        if refusal is not None:
            get_logger().warning("claim.settle-refused", claim_uid=owner.uid, error=refusal.reasons[0].message)
            return False
        get_logger().info(
            "claim.released",
            claim_uid=owner.uid,
            claim=f"{owner.namespace}/{owner.name}",
            why="it is not allocated here any more",
        )
        return True
