"""The claims on their work queue. It determines on which versions the result of a claim's work
depends, and reports on a claim when it is set aside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.process.work_queue import Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = ["ClaimQueue"]


class ClaimQueue:
    """The work queue of the claims."""

    def __init__(self, state: StandaloneState, conditions: ClaimConditions, queue: WorkQueue) -> None:
        self._state = state
        self._conditions = conditions
        self._queue = queue

    def keep(self) -> None:
        """Forget claims that are gone."""
        self._queue.keep(self._state.objects.keys())

    def behind(self) -> list[ObjectKey]:
        """List the claims that are due for a costly search, the longest waiting first."""
        return self._queue.behind(self._state.unsettled_claims(), self.read)

    async def run(
        self, key: ObjectKey, stored: Stored, work: Callable[[], Awaitable[Result]], *, is_costly: bool = False
    ) -> Result:
        """Do one piece of work for a claim, and set the claim aside when it fails with an
        unexpected error.
        """

        async def guarded() -> Result:
            try:
                return await work()
            except ContractError as err:
                # This report is itself a write, and may fail like any other.
                await self._conditions.write(key, stored, "Malformed", (Reason(code="malformed", message=str(err)),))
                return None

        async def report(reason: Reason) -> None:
            await self._conditions.write(key, stored, "Malformed", (reason,))

        own = self.own(key, stored)
        return await self._queue.run(
            key,
            (own, self.world()),
            guarded,
            name=stored.shown,
            report=report,
            narrow=(self._peer(stored), own),
            is_costly=is_costly,
        )

    def world(self) -> Hashable:
        """Return the version of what a claim's next step depends on besides the claim: what is
        free, and the objects that it refers to.
        """
        return self._state.supply, self._state.shared_epoch

    def own(self, key: ObjectKey, stored: Stored) -> Hashable:
        """Return a claim's own version: its revision, and whether a pod waits for it."""
        return stored.revision, self._state.users.is_awaited(key)

    def _peer(self, stored: Stored) -> Hashable:
        """Return what changes when there is a reason to ask a claim's silent node again: one such
        node must not occupy all tasks.
        """
        attempt = stored.known_attempt
        ledger = self._state.ledgers.get(attempt.node) if attempt is not None else None
        return stored.revision, (ledger.epoch, ledger.sequence) if ledger is not None else None

    def read(self, key: ObjectKey) -> Hashable:
        """Name what a search for a claim reads and may be freed: while it is the same, the search
        finds the same.
        """
        stored = self._state.objects.get(key)
        nodes = self._state.nodes_for(stored.claim) if stored is not None else ()
        return self._state.shared_epoch, self._state.class_epoch, tuple(map(self._state.stock.freedom_of, nodes))
