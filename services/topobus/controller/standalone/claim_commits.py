"""Commits decisions on claims, concurrently with the rounds that make them: writes their attempts,
has the nodes hold the devices, and writes the allocations.

The devices of a decision count as taken as soon as its commit begins. Every step may be repeated,
by this replica after a crash or by another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from topobus.controller.commit.commit_allocations import AllocationCommitter, Attempted, Draft, refused_devices
from topobus.controller.commit.node_ledgers import NODE_FAILED
from topobus.controller.commit.refusal_backoff import RefusalBackoff
from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.standalone.claim_queue import ClaimQueue
from topobus.controller.standalone.commit_tasks import CommitTasks
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.closer_devices import spanned_nodes
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.process.work_queue import Again, Busy
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["ClaimCommits"]


class ClaimCommits:
    """Commits decisions on claims, by the rules of the standalone home (`CommitRules`)."""

    def __init__(
        self,
        state: StandaloneState,
        store: ObjectStore,
        refusals: RefusalBackoff[DeviceId],
        conditions: ClaimConditions,
        committer: AllocationCommitter,
        turns: ReplicaTurns,
        tasks: CommitTasks,
        queue: ClaimQueue,
    ) -> None:
        self._state = state
        self._store = store
        self._refusals = refusals
        self._conditions = conditions
        self._committer = committer
        self._turns = turns
        self.tasks = tasks
        """The writes that are under way."""
        self._queue = queue

    def leave_s(self, stored: Stored) -> float:
        """Return the seconds for which a claim is left to another replica, 0 for none."""
        return self._turns.wait_s(stored.uid, Stage.PLAN if stored.claim.attempt is None else Stage.FINISH)

    async def begin(self, stored: Stored, drafts: Sequence[Draft]) -> Busy:
        """Begin to write a decision, without waiting for the end.

        Its devices count as taken from now on, so the next decision does not choose them.
        """
        for draft in drafts:
            self._state.assume(draft.key, draft.value)
        await self.tasks.begin([draft.key for draft in drafts], partial(self._write, stored, drafts))
        return Busy()

    async def go_on(self, key: ObjectKey, stored: Stored, attempt: Attempt, *, ends_with_round: bool) -> Busy:
        """Commit a written attempt, concurrently with the round or as a part of it."""
        attempted = Attempted(key, stored, attempt)
        await self.tasks.begin((key,), partial(self._commit_bounded, attempted), ends_with_round=ends_with_round)
        return Busy()

    async def _write(self, stored: Stored, drafts: Sequence[Draft]) -> None:
        """Write the attempts of a decision's claims, and commit them."""
        group: list[Attempted] = []

        async def write_attempts() -> Busy:
            group.extend(await self._committer.write_attempts(drafts))
            return Busy()

        try:
            result = await self._queue.run(drafts[0].key, stored, write_attempts)
        finally:
            # After a conflict or a time-out the stored object counts. A write that takes effect
            # later arrives by the watch.
            for draft in drafts[len(group) :]:
                self._state.restore(draft.key)
        if len(group) < len(drafts) and not isinstance(result, Again):
            self._turns.see_another()
        for attempted in group:
            await self._commit_bounded(attempted)

    async def _commit_bounded(self, attempted: Attempted) -> None:
        await self._queue.run(attempted.key, attempted.stored, partial(self._commit, attempted.key, attempted))

    async def _commit(self, _: ObjectKey, attempted: Attempted) -> None:
        await self._committer.commit([attempted], self)

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields of a decision's log line besides the claim and the node: none."""
        return {}

    async def revalidate(self, group: Sequence[Attempted]) -> Sequence[AllocationResult]:
        """Accept the attempts as they are. No other program allocates, so the node's ledger
        decides, and the claim's revision guards the write.
        """
        return [attempted.attempt.allocation for attempted in group]

    async def refusal_of(self, attempted: Attempted, error: PeerUnavailable) -> Refusal:
        """Have the node asked again, and write into the claim's condition why it waits.

        Errors: raises the error.
        """
        if error.facts.get("code") == NODE_FAILED:
            reason = Reason(code="node-failed", message=str(error), facts={"node": attempted.attempt.node})
            await self._conditions.write(attempted.key, attempted.stored, "NodeFailed", (reason,))
        raise error

    def allocated(self, claim: ApiObject, allocation: AllocationResult, now: datetime) -> ApiObject:
        """Return the claim's next version, which has the allocation and no reservation. The pod's
        reservation follows when all of its claims are allocated.
        """
        spanned = spanned_nodes(allocation, self._state.numa_nodes_of)
        return lifecycle.with_allocation(claim, allocation, now=rfc3339(now), spanned=spanned)

    async def on_refused(self, attempted: Attempted, refusal: Refusal) -> None:
        """Drop an attempt that its node refuses; the next round searches again."""
        key, stored, attempt = attempted.key, attempted.stored, attempted.attempt
        devices = refused_devices(attempt, refusal, self._state.devices_of(attempt.node))
        self._refusals.add(key, devices, summarize(refusal.reasons))
        dropped = await self._store.write(key, stored.revision, attempts.without_attempt(stored.value))
        if dropped is not None:
            await self._conditions.write(key, dropped, "RefusedByNode", refusal.reasons)
