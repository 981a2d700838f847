"""Allocates claims: advances each stored claim by one write until it is allocated, its condition
gives the reason why not, or it is deleted.

`claim_commits` writes the decisions on devices. Every step may be repeated, by this replica after a
crash or by another one: operation ids at nodes consist of the claim's uid and the attempt's number,
and a write that loses its compare-and-set is dropped, since the watch brings the newer object.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial

from topobus.controller.commit.allocator import Allocator, Member, member
from topobus.controller.commit.commit_allocations import next_attempts
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.standalone.claim_commits import ClaimCommits
from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.standalone.claim_queue import ClaimQueue
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.values import GaveUp
from topobus.engine.claims.reservations import AllocationMode
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages.messages import ApiObject
from topobus.process.work_queue import Again, Behind, Done, Result
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = ["ClaimReconciler"]

# Steps of costly searches in one round, some hundred milliseconds. After these, new events are
# handled first. One more search may begin within the limit, and take the whole step budget.
_ROUND_STEPS = 20_000


class ClaimReconciler:
    """Reconciles claims, one at a time.

    Args: mode — when to allocate a claim that does not set this itself.
    """

    def __init__(
        self,
        mode: AllocationMode,
        state: StandaloneState,
        allocator: Allocator,
        deallocation: ClaimDeallocation,
        conditions: ClaimConditions,
        commits: ClaimCommits,
        queue: ClaimQueue,
    ) -> None:
        self._mode = mode
        self._state = state
        self._allocator = allocator
        self._deallocation = deallocation
        self._conditions = conditions
        self._commits = commits
        self._queue = queue

    async def reconcile_all(self) -> int:
        """Advance every claim as far as possible now. Returns how many have no allocation."""
        await self._allocator.warm()
        self._allocator.refusals.drop(self._is_served)
        self._conditions.begin_round()
        waiting = 0
        # Decisions are made one after the other, because each depends on the devices that the
        # earlier ones took. The writes that follow are independent, and run concurrently.
        async with self._commits.tasks.during_round():
            for key in self._state.unsettled_claims():
                stored = self._state.objects.get(key)
                if stored is None:
                    continue  # deleted while the claims before it were worked on
                waiting += not self._is_allocated(stored.value)
                if not self._commits.tasks.is_busy(key):
                    await self._queue.run(key, stored, partial(self._reconcile, key, stored))
        self._queue.keep()
        self._deallocation.keep()
        return waiting

    async def reconcile_costly(self) -> bool:
        """Search for claims that need more than a short search, within one round's budget.

        Returns True when more of them are due now.
        """
        spent = self._allocator.spent
        async with self._commits.tasks.during_round():
            for key in self._queue.behind():
                if self._allocator.spent - spent > _ROUND_STEPS:
                    return True
                stored = self._state.objects.get(key)
                if stored is not None and not self._commits.tasks.is_busy(key):
                    work = partial(self._reconcile, key, stored, is_cheap=False)
                    await self._queue.run(key, stored, work, is_costly=True)
        return False

    def _is_served(self, key: Hashable) -> bool:
        """Return whether a claim is gone or has its devices.

        A claim under deallocation does not count, since it will be tried again.
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
            if (stored.claim.mode or self._mode) is AllocationMode.IMMEDIATE:
                self._state.settle(key)
            elif not stored.claim.consumers and not self._state.users.is_used(key):
                await self._deallocation.begin(key, stored, "no pod uses it any more")
            return None
        wait_s = self._commits.leave_s(stored)
        if wait_s > 0:
            return Again(wait_s)
        attempt = stored.claim.attempt
        if attempt is not None:
            # A pod's claims are committed before pods are scheduled again: the oldest pod goes
            # first, however long its claim's write takes.
            is_used = self._state.users.is_used(key)
            return await self._commits.go_on(key, stored, attempt, ends_with_round=is_used)
        if await self._is_independent(key, stored):
            return await self._decide(key, stored, is_cheap=is_cheap)
        if not self._state.users.is_awaited(key):
            await self._deallocation.release_leftovers(key, self._state.objects.get(key, stored))
        return None

    async def _is_independent(self, key: ObjectKey, stored: Stored) -> bool:
        """Say whether a claim is to be allocated by itself. One that waits for a pod, or that a
        pod's scheduling allocates, is not.
        """
        if self._state.users.is_awaited(key):
            missing = self._state.users.missing_mates(key)
            if missing:
                message = f"waits for {', '.join(missing)}, which the same pod wants: its claims are served together"
                reason = Reason(code="waits-for-claims", message=message, facts={"claims": missing})
                await self._conditions.write(key, stored, "WaitsForClaims", (reason,))
            return False
        if (stored.claim.mode or self._mode) is AllocationMode.IMMEDIATE:
            return True
        message = "is allocated when a pod that uses it is scheduled, and no stored pod waits for it"
        await self._conditions.write(key, stored, "WaitsForPod", (Reason(code="waits-for-pod", message=message),))
        return False

    async def _decide(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> Result:
        """Search for devices, and begin to write the decision.

        A claim that cannot be allocated gets the reason in its condition.

        Shapes: is_cheap — a claim that needs more than a short search is put behind all others.
        """
        if any(self._commits.tasks.is_busy(mate) for mate, _ in self._state.mates(stored.claim)):
            return None  # on which node it gets its devices decides on this one's, and is being written
        members = self._together(key, stored)
        world = self._queue.world()
        nodes = self._state.nodes_for(stored.claim)
        # A number for each node, and only a costly search's entry needs it.
        read = None if is_cheap else self._queue.read(key)
        choice = await self._allocator.first(nodes, members, is_cheap=is_cheap)
        if isinstance(choice, tuple):
            node, outcome = choice
            return await self._commits.begin(stored, next_attempts(node, members, outcome.results))
        refused = choice
        if is_cheap and any(isinstance(outcome, GaveUp) for outcome in refused):
            return Behind(self._queue.own(key, stored))
        await self._allocator.refresh(nodes, refused, members)
        reason, reasons = explain_nodes(nodes, refused)
        reported = await self._conditions.write(
            key, stored, reason, reasons, lambda: self._allocator.advise_members(nodes, refused, members)
        )
        own, excluded_s = (
            self._queue.own(key, reported),
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
                if self._state.users.is_awaited(mate_key):
                    continue  # allocated with the pod when it is scheduled
                if is_waiting and not self._state.holds_devices(mate.claim):
                    members.append(member(mate_key, mate, self._state.classes))
            except ContractError:
                continue
        return members

    def _is_allocated(self, claim: ApiObject) -> bool:
        return bool(claim.status.get("allocation"))
