"""Allocates claims: advances each stored claim by one write until it is allocated, its condition
gives the reason why not, or it is deleted.

Every step may be repeated, by this replica after a crash or by another one: operation ids at nodes
consist of the claim's uid and the attempt's number, and a write that loses its compare-and-set is
dropped, since the watch brings the newer object.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from datetime import datetime
from functools import partial

from topobus.controller.commit.allocator import Allocator, Member, member
from topobus.controller.commit.claim_users import ClaimUsers
from topobus.controller.commit.commit_allocations import (
    AllocationCommitter,
    Attempted,
    Draft,
    next_attempts,
    refused_devices,
)
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.node_ledgers import NODE_FAILED, NodeLedgers
from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.standalone.commit_tasks import CommitTasks
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.controller.store.object_writer import ObjectWriter
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import GaveUp
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.reservations import AllocationMode
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.closer_devices import spanned_nodes
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Behind, Busy, Done, Result, WorkQueue
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["ClaimReconciler"]

_Work = Callable[[], Coroutine[None, None, Result]]
# Claims advised in one round: advice costs a dozen searches, and where a thousand claims wait for
# one device, the advice of each is not read.
_MOST_ADVICE = 16
# Steps of costly searches in one round, some hundred milliseconds. Then new work comes first. One
# search more may be begun, and may take the whole step budget.
_ROUND_STEPS = 20_000


class ClaimReconciler:
    """Reconciles claims, one at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        allocator: Allocator,
        consumers: ClaimUsers,
        metrics: ControllerMetrics,
        ledgers: NodeLedgers,
        deallocation: ClaimDeallocation,
        queue: WorkQueue,
        wake: Callable[[], None] = lambda: None,
        turns: ReplicaTurns | None = None,
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._runtime = runtime
        self._state = state
        self._allocator = allocator
        self._consumers = consumers
        self._metrics = metrics
        self._writer = ObjectWriter(NatsStore(runtime.bus, state))
        self._deallocation = deallocation
        self._advice_left = _MOST_ADVICE
        self.commits = CommitTasks(settings.parallel_asks, wake)
        """The writes of decided claims, which run beside the rounds."""
        self._turns = turns or ReplicaTurns(runtime.clock, settings.retry_s)
        self._decisions = DecisionPublisher(runtime.bus, runtime.clock)
        self.committer = AllocationCommitter(runtime.clock, self._writer, ledgers, self._decisions, metrics)
        """Writes attempts and allocations."""
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Advance every claim as far as possible now."""
        await self._allocator.warm()
        self._allocator.refusals.drop(self._is_served)
        self._advice_left = _MOST_ADVICE
        waiting = 0
        # Claims are decided one after the other, for each decision sees the devices taken by those
        # before it. The writes of a decision affect no other claim, so they run concurrently.
        async with self.commits.during_round():
            for key in self._state.unsettled_claims():
                stored = self._state.objects.get(key)
                if stored is None:
                    continue  # deleted while the claims before it were worked on
                waiting += not self._is_allocated(stored.value)
                if not self.commits.is_busy(key):
                    await self._bounded(key, stored, partial(self._reconcile, key, stored))
        self._queue.keep(self._state.objects.keys())
        self._metrics.waiting.set(waiting)
        self._deallocation.keep()

    async def reconcile_costly(self) -> bool:
        """Search for claims that need more than a short search, within one round's budget.

        True when more of them are due at once.
        """
        spent = self._allocator.spent
        async with self.commits.during_round():
            for key in self._queue.behind(self._state.unsettled_claims(), self._read):
                if self._allocator.spent - spent > _ROUND_STEPS:
                    return True
                stored = self._state.objects.get(key)
                if stored is not None and not self.commits.is_busy(key):
                    await self._bounded(
                        key, stored, partial(self._reconcile, key, stored, is_cheap=False), is_costly=True
                    )
        return False

    def _read(self, key: ObjectKey) -> Hashable:
        """Return the version of what a search for a claim reads and of what may become free. While
        it is the same, the search has the same result.
        """
        stored = self._state.objects.get(key)
        nodes = self._state.nodes_for(stored.claim) if stored is not None else ()
        return self._state.shared_epoch, self._state.class_epoch, tuple(self._state.freedom_of(node) for node in nodes)

    async def _bounded(self, key: ObjectKey, stored: Stored, work: _Work, *, is_costly: bool = False) -> Result:
        """Do one piece of work for a claim, and set the claim aside when it fails in an unforeseen
        way.
        """

        async def guarded() -> Result:
            try:
                return await work()
            except ContractError as err:
                # Reporting the fault is a write, which may fail as any other.
                await self.set_condition(key, stored, "Malformed", (Reason(code="malformed", message=str(err)),))
                return None

        async def report(reason: Reason) -> None:
            await self.set_condition(key, stored, "Malformed", (reason,))

        own = self._own(key, stored)
        return await self._queue.run(
            key,
            (own, self._world()),
            guarded,
            name=stored.shown,
            report=report,
            narrow=(self._peer(stored), own),
            is_costly=is_costly,
        )

    def _world(self) -> Hashable:
        """Return the version of what a claim's next step depends on besides the claim: the free
        devices, and the objects that it refers to.
        """
        return self._state.supply, self._state.shared_epoch

    def _own(self, key: ObjectKey, stored: Stored) -> Hashable:
        """Return the version of the claim itself, and whether a waiting pod uses it."""
        return stored.revision, bool(self._consumers.waiting(key))

    def _peer(self, stored: Stored) -> Hashable:
        """Return the version of what gives a reason to ask a claim's silent node again: one such
        node must not occupy all tasks.
        """
        attempt = stored.known_attempt
        ledger = self._state.ledgers.get(attempt.node) if attempt is not None else None
        return stored.revision, (ledger.epoch, ledger.sequence) if ledger is not None else None

    def _is_served(self, key: Hashable) -> bool:
        """Say whether a claim is gone or has its devices.

        A claim under deallocation is not served, for it will be tried again.
        """
        claim = self._state.objects.get(key) if isinstance(key, ObjectKey) else None
        return claim is None or (self._is_allocated(claim.value) and not claim.claim.deallocation)

    async def _reconcile(self, key: ObjectKey, stored: Stored, *, is_cheap: bool = True) -> Result:
        if object_parts(stored.value) != key._asdict():
            raise ContractError(
                f"{stored.shown} is stored under {key.kind} {key.namespace}/{key.name}: wanted its own name there"
            )
        if stored.claim.is_deleting:
            await self._deallocation.delete(key, stored)
            return None
        if stored.claim.deallocation:
            return await self._deallocation.finish(key, stored)
        if stored.claim.allocation is not None:
            await self._deallocation.release_leftovers(key, stored)
            if (stored.claim.mode or self._settings.claim_allocation) is AllocationMode.IMMEDIATE:
                self._state.settle(key)
            elif not stored.claim.consumers and not self._consumers.users(key):
                await self._deallocation.begin(key, stored, "no pod uses it any more")
            return None
        attempt = stored.claim.attempt
        wait_s = self._turns.wait_s(stored.uid, Stage.PLAN if attempt is None else Stage.FINISH)
        if wait_s > 0:
            return Again(wait_s)  # left to another replica for a moment
        if attempt is not None:
            # A pod's claims are committed before pods are scheduled again: the oldest pod goes
            # first, however long its claim's write takes.
            has_users = bool(self._consumers.users(key))
            await self.commits.begin(
                (key,), partial(self._commit_bounded, Attempted(key, stored, attempt)), ends_with_round=has_users
            )
            return Busy()
        if await self._is_independent(key, stored):
            return await self._decide(key, stored, is_cheap=is_cheap)
        if not self._consumers.waiting(key):
            await self._deallocation.release_leftovers(key, self._state.objects.get(key, stored))
        return None

    async def _begin(self, stored: Stored, drafts: Sequence[Draft]) -> Busy:
        """Write a decision beside the round.

        Its devices count as taken from now on, so that the next decision sees it.
        """
        for draft in drafts:
            self._state.assume(draft.key, draft.value)
        await self.commits.begin([draft.key for draft in drafts], partial(self._write, stored, drafts))
        return Busy()

    async def _write(self, stored: Stored, drafts: Sequence[Draft]) -> None:
        """Write the attempts of a decision's claims, and commit them."""
        group: list[Attempted] = []

        async def write_attempts() -> Busy:
            group.extend(await self.committer.write_attempts(drafts))
            return Busy()

        try:
            result = await self._bounded(drafts[0].key, stored, write_attempts)
        finally:
            # Conflict or silence: the stored claim counts, and a write that takes effect later
            # arrives by the watch.
            for draft in drafts[len(group) :]:
                self._state.restore(draft.key)
        if len(group) < len(drafts) and not isinstance(result, Again):
            self._turns.see_another()
        for attempted in group:
            await self._commit_bounded(attempted)

    async def _commit_bounded(self, attempted: Attempted) -> None:
        await self._bounded(attempted.key, attempted.stored, partial(self._commit, attempted.key, attempted))

    async def _commit(self, _: ObjectKey, attempted: Attempted) -> None:
        await self.committer.commit([attempted], self)

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields of the log line of each decision besides the claim and the node: none."""
        return {}

    async def revalidate(self, group: Sequence[Attempted]) -> Sequence[AllocationResult]:
        """Accept the attempts as they are: no other component allocates, so the node's ledger
        decides, and the revision of the claim is the check.
        """
        return [attempted.attempt.allocation for attempted in group]

    async def refusal_of(self, attempted: Attempted, error: PeerUnavailable) -> Refusal:
        """Have the node asked again. The claim's condition names a node that failed.

        Errors: raises the error.
        """
        if error.facts.get("code") == NODE_FAILED:
            reason = Reason(code="node-failed", message=str(error), facts={"node": attempted.attempt.node})
            await self.set_condition(attempted.key, attempted.stored, "NodeFailed", (reason,))
        raise error

    def allocated(self, claim: ApiObject, allocation: AllocationResult, now: datetime) -> ApiObject:
        """Make the claim's next version, which has the allocation and no reservation: the pod's
        follows when all of its claims are allocated.
        """
        spanned = spanned_nodes(allocation, self._state.numa_nodes_of)
        return lifecycle.with_allocation(claim, allocation, now=rfc3339(now), spanned=spanned)

    async def on_refused(self, attempted: Attempted, refusal: Refusal) -> None:
        """Drop an attempt that its node refuses. The next round searches again."""
        key, stored, attempt = attempted.key, attempted.stored, attempted.attempt
        devices = refused_devices(attempt, refusal, self._state.devices_of(attempt.node))
        self._allocator.refusals.add(key, devices, summarize(refusal.reasons))
        dropped = await self._writer.write(key, stored.revision, attempts.without_attempt(stored.value))
        if dropped is not None:
            await self.set_condition(key, dropped, "RefusedByNode", refusal.reasons)

    async def _is_independent(self, key: ObjectKey, stored: Stored) -> bool:
        """Say whether a claim is to be allocated by itself. One that waits for a pod, or that a
        pod's scheduling allocates, is not.
        """
        mode = stored.claim.mode
        if self._consumers.waiting(key):
            missing = self._state.missing_mates(stored.claim)
            if missing:
                message = f"waits for {', '.join(missing)}, which the same pod wants: its claims are served together"
                reason = Reason(code="waits-for-claims", message=message, facts={"claims": missing})
                await self.set_condition(key, stored, "WaitsForClaims", (reason,))
            return False
        if (mode or self._settings.claim_allocation) is AllocationMode.IMMEDIATE:
            return True
        message = "is allocated when a pod that uses it is scheduled, and no stored pod waits for it"
        await self.set_condition(key, stored, "WaitsForPod", (Reason(code="waits-for-pod", message=message),))
        return False

    async def _decide(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> Result:
        """Search for devices, and begin to write the decision.

        A claim that cannot be allocated gets the reason in its condition.

        Shapes: is_cheap — a claim that needs more than a short search is put behind all others.
        """
        if any(self.commits.is_busy(mate) for mate, _ in self._state.mates(stored.claim)):
            return None  # another claim of its pod decides on the node, and is being written
        members = self._together(key, stored)
        world = self._world()
        nodes = self._state.nodes_for(stored.claim)
        # A number for each node, which only a costly search's entry needs.
        read = None if is_cheap else self._read(key)
        choice = await self._allocator.first(nodes, members, is_cheap=is_cheap)
        if isinstance(choice, tuple):
            node, outcome = choice
            return await self._begin(stored, next_attempts(node, members, outcome.results))
        refused = choice
        if is_cheap and any(isinstance(outcome, GaveUp) for outcome in refused):
            return Behind(self._own(key, stored))
        await self._allocator.refresh(nodes, refused, members)
        reason, reasons = explain_nodes(nodes, refused)
        reported = await self.set_condition(
            key, stored, reason, reasons, lambda: self._allocator.advise_members(nodes, refused, members)
        )
        own, excluded_s = (
            self._own(key, reported),
            self._allocator.refusals.wait_s([each_member.key for each_member in members]),
        )
        if excluded_s < math.inf:
            return Again(excluded_s, (own, world))
        return Done((own, world)) if is_cheap else Behind(own, read)

    def _together(self, key: ObjectKey, stored: Stored) -> list[Member]:
        """List the claims to be allocated together: this one, and those of its pod that wait as
        well.

        Errors: raises ContractError when this claim cannot be read. Another unreadable claim is
        reported in its own turn.
        """
        members = [member(key, stored, self._state.classes)]
        if self._state.holds_devices(stored.claim):
            return members
        for mate_key, mate in self._state.mates(stored.claim):
            try:
                is_waiting = mate.claim.held is None and not mate.metadata.deletion_timestamp
                if self._consumers.waiting(mate_key):
                    continue  # allocated with the pod when it is scheduled
                if is_waiting and not self._state.holds_devices(mate.claim):
                    members.append(member(mate_key, mate, self._state.classes))
            except ContractError:
                continue
        return members

    async def set_condition(
        self,
        key: ObjectKey,
        stored: Stored,
        reason: str,
        reasons: tuple[Reason, ...],
        advise: Callable[[], Awaitable[tuple[Reason, ...]]] | None = None,
    ) -> Stored:
        """Write the reasons into the claim's condition, once.

        Returns the claim with them, or as it was when another writer was first.

        Shapes: advise — finds the nearest miss and what would fit; called only when the reasons are
        new.
        """
        claim = stored.value
        message = "; ".join(each_reason.message for each_reason in reasons)
        if lifecycle.has_condition(claim, reason=reason, message=message):
            return stored
        self._advice_left -= advise is not None
        advice = await advise() if advise is not None and self._advice_left >= 0 else ()
        self._metrics.decisions.labels("refused").inc()
        if reason == "Malformed":
            self._metrics.malformed.inc()
        self._log.info("claim.waiting", claim=stored.shown, reason=reason, why=message)
        now = rfc3339(self._runtime.clock.now())
        api_object = lifecycle.with_condition(claim, is_true=False, reason=reason, message=message, now=now)
        api_object = lifecycle.with_advice(
            api_object, message="; ".join(each_reason.message for each_reason in advice), now=now
        )
        written = await self._writer.write(key, stored.revision, api_object)
        if written is None:
            return stored
        to_free = tuple(each_reason for each_reason in advice if each_reason.facts.get("change") == "free")
        refusal = Refusal(
            reasons=(*reasons, *(each_reason for each_reason in advice if each_reason not in to_free)), to_free=to_free
        )
        op_id = f"refuse-{stored.uid}-{written.revision}"
        await self._decisions.publish("allocate", stored.claim.owner, refusal, op_id=op_id)
        return written

    def _is_allocated(self, claim: ApiObject) -> bool:
        return bool(claim.status.get("allocation"))
