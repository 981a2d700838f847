"""Periodically unprepares claims that kubelet has forgotten.

A claim is undone only when both the API server and kubelet's PodResources report twice in a row
that no pod uses it: it is not allocated here, or is deleted and reserved for none, and kubelet
lists no container with it. The first check waits until kubelet has run for a while, since a kubelet
that has just started lists no pods. When either does not answer, nothing is undone.
"""

from __future__ import annotations

import asyncio

from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.gateway.claims.claims import ClaimPreparer
from topobus.gateway.claims.rules.claim_allocation import is_wanted_here
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.device_plugins.sockets import identity
from topobus.gateway.reconcile.pod_usage import PodLook
from topobus.gateway.reconcile.rules.pods import is_listed
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError

__all__ = ["ForgottenClaims"]


class ForgottenClaims:
    """Checks all prepared claims of one node."""

    def __init__(
        self,
        preparer: ClaimPreparer,
        checkpoint: Checkpoint,
        read_claim: ReadClaim,
        usage: PodLook,
        deadlines: DeadlineSettings,
        node: str,
    ) -> None:
        self._preparer = preparer
        self._checkpoint = checkpoint
        self._read_claim = read_claim
        self._usage = usage
        self._deadlines = deadlines
        self._node = node

    async def run(self) -> None:
        """Check until cancelled."""
        loop = asyncio.get_running_loop()
        kubelet, appeared_at = identity(self._usage.socket), loop.time()
        forgotten_before: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(self._deadlines.forgotten_s)
            if identity(self._usage.socket) != kubelet:
                kubelet, appeared_at = identity(self._usage.socket), loop.time()
            if kubelet is None or loop.time() - appeared_at < self._deadlines.kubelet_grace_s:
                forgotten_before = frozenset()
                continue
            forgotten_before = await self._undo(forgotten_before)

    async def _undo(self, forgotten_before: frozenset[str]) -> frozenset[str]:
        """Check once, and undo the claims that the previous check also found forgotten.

        Returns the keys of those that this check found.
        """
        listing = await self._usage.listing()
        if isinstance(listing, str):
            return frozenset()
        forgotten: set[str] = set()
        # The entries of a claim's classes begin and end together, so one of them is enough.
        for entry in {entry.uid: entry for entry in self._checkpoint.entries()}.values():
            # Only claims that kubelet does not list are read from the API server. On an ordinary
            # node there are none.
            if entry.is_left or is_listed(listing.uses, entry.namespace, entry.name):
                continue
            try:
                claim = await self._read_claim(entry.namespace, entry.name)
            except TopobusError as err:
                get_logger().warning("claim.forgotten-unknown", claim_uid=entry.uid, error=str(err))
                return frozenset()
            if is_wanted_here(claim, entry.uid, self._node):
                continue
            key = f"{entry.key}/{entry.attempt}"
            forgotten.add(key)
            if key in forgotten_before:
                get_logger().warning(
                    "claim.forgotten",
                    claim_uid=entry.uid,
                    claim=str(entry.claim),
                    why="deleted or not allocated here, and no container has it",
                )
                await self._preparer.unprepare(entry.claim)
        return frozenset(forgotten)
