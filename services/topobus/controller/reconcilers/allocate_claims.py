"""Allocates claims: brings each stored claim one write further until it is allocated, told why not, or gone.

Flows in: the world as the watches see it. Flows out: asks to nodes, compare-and-set writes of claims, decision events. Every step may be repeated, by this
replica after a crash or by another one: operations at nodes have ids made of the claim's uid and the attempt's number, and a write that lost to somebody
else's is dropped, for the watch brings the newer object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.explanations import explain_nodes
from topobus.controller.allocation.miss_reasons import summarize
from topobus.controller.allocation.values import GaveUp
from topobus.controller.claims import lifecycle
from topobus.controller.claims.lifecycle import Attempt
from topobus.controller.claims.reservations import (
    AllocationMode,
)
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.allocator import Allocator, Member, member
from topobus.controller.reconcilers.claim_users import ClaimUsers
from topobus.controller.reconcilers.deallocate_claims import ClaimDeallocation
from topobus.controller.reconcilers.decision_publisher import DecisionPublisher
from topobus.controller.reconcilers.node_ledgers import NODE_FAILED, NodeLedgers, Overtaken
from topobus.controller.reconcilers.object_boundary import ObjectBoundary
from topobus.controller.state.costly_work import CostlyWork
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.controller.store.object_writer import ObjectWriter
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.timestamps import rfc3339
from topobus.kubernetes.api.objects import object_parts
from topobus.kubernetes.api.resource import AllocationResult
from topobus.runtime.logging import get_logger
from topobus.runtime.service import Runtime

__all__ = ["ClaimReconciler"]

# Claims advised in one round: advice costs a dozen searches, and where a thousand claims wait for one device nobody reads the advice of each.
_MOST_ADVICE = 16
# Steps of costly searches in one round, some hundred milliseconds: then whatever is new has its turn. One search more may be begun, and may take the whole step budget.
_ROUND_STEPS = 20_000


@dataclass(frozen=True)
class _Seen:
    """At which state of the world a claim was last found to be without a way forward."""

    revision: int
    supply: int


class ClaimReconciler:
    """Reconciles claims, one at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        world: StandaloneState,
        finder: Allocator,
        consumers: ClaimUsers,
        metrics: ControllerMetrics,
        ledgers: NodeLedgers,
        deallocation: ClaimDeallocation,
        boundary: ObjectBoundary | None = None,
    ) -> None:
        self._boundary = boundary or ObjectBoundary("claims")
        self._settings = settings
        self._runtime = runtime
        self._world = world
        self._finder = finder
        self._consumers = consumers
        self._metrics = metrics
        self._writer = ObjectWriter(NatsStore(runtime.bus, world))
        self._ledgers = ledgers
        self._deallocation = deallocation
        self._advice_left = _MOST_ADVICE
        self._settled: dict[ObjectKey, _Seen] = {}
        self._done: dict[ObjectKey, int] = {}
        """At which revision a claim was found to be allocated for good: nothing but a change of itself concerns it."""
        self._costly: CostlyWork[ObjectKey] = CostlyWork(settings.retry_s)
        self._slots = asyncio.Semaphore(settings.parallel_asks)
        self._is_due = False
        self._decisions = DecisionPublisher(runtime.bus, runtime.clock)
        self._log = get_logger()

    async def reconcile_all(self) -> bool:
        """Bring every claim as far as it goes now; True says that a peer was silent and another try is due after a while."""
        await self._finder.warm()
        self._forgive()
        self._advice_left = _MOST_ADVICE
        self._is_due = False
        waiting = 0
        # Claims are decided on one after the other, for each sees what those before it took; what follows for one concerns no other, so that goes side by side.
        async with asyncio.TaskGroup() as commits:
            for key, _ in self._world.claims():
                stored = self._world.objects.get(key)
                if stored is None or self._done.get(key) == stored.revision:
                    continue  # gone while the claims before it were worked on, or allocated for good as it stands
                await self._bounded(key, stored, partial(self._reconcile, key, stored, commits))
                waiting += not self._is_allocated(stored.value)
        self._boundary.keep(self._world.objects.keys())
        self._metrics.waiting.set(waiting)
        self._settled = {key: seen for key, seen in self._settled.items() if key in self._world.objects}
        self._deallocation.keep()
        if len(self._done) > 2 * len(self._world.of_kind("resourceclaim")):
            self._done = {key: revision for key, revision in self._done.items() if key in self._world.objects}
        return self._is_due or self._finder.refusals.is_waiting

    async def reconcile_costly(self) -> bool:
        """Search for claims that need more than a short search, as far as one round's budget goes; True says that more of them are due at once."""
        spent = self._finder.spent
        self._costly.keep(lambda key: key in self._world.objects)
        async with asyncio.TaskGroup() as commits:
            for key in self._costly.due(self._read, now_s=self._runtime.clock.monotonic()):
                if self._finder.spent - spent > _ROUND_STEPS:
                    return True
                stored, turn = self._world.objects[key], self._costly.turn_of(key)
                await self._bounded(key, stored, partial(self._reconcile, key, stored, commits, is_cheap=False))
                if self._costly.turn_of(key) == turn:
                    self._costly.drop(key)  # it has what it wanted, or waits for something else
        return False

    @property
    def is_pausing(self) -> bool:
        """Say whether a costly claim is to be tried again after a while."""
        return self._costly.is_pausing(self._read, now_s=self._runtime.clock.monotonic())

    def _read(self, key: ObjectKey) -> Hashable:
        """Name what a search for a claim reads and may be freed: while it is the same, the search finds the same."""
        stored = self._world.objects.get(key)
        nodes = self._world.nodes_for(stored.claim) if stored is not None else ()
        return self._world.shared_epoch, self._world.class_epoch, tuple(self._world.freedom_of(node) for node in nodes)

    async def _bounded(self, key: ObjectKey, stored: Stored, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do one piece of work for a claim, and set the claim aside when it fails in a way that nobody thought of."""

        async def guarded() -> bool:
            try:
                await work()
            except ContractError as err:
                # Telling is a write, too, and may fail as any other.
                await self.tell(key, stored, "Malformed", (Reason(code="malformed", message=str(err)),))
            return False

        async def report(reason: Reason) -> None:
            await self.tell(key, stored, "Malformed", (reason,))

        version = (stored.revision, self._world.supply, self._world.shared_epoch)
        self._is_due = await self._boundary.run(key, version, guarded, name=stored.shown, report=report) or self._is_due

    def _forgive(self) -> None:
        """Let refused devices be tried again when their time has come."""
        stored = self._world.objects

        def is_done(key: Hashable) -> bool:
            found = stored.get(key) if isinstance(key, ObjectKey) else None
            # What is being taken back is on its way to be tried again.
            return found is None or (self._is_allocated(found.value) and not found.claim.deallocation)

        for key in self._finder.refusals.forgive(now_s=self._runtime.clock.monotonic(), is_done=is_done):
            self._settled = {object_key: seen for object_key, seen in self._settled.items() if object_key != key}
            if isinstance(key, ObjectKey):
                self._costly.drop(key)

    async def _reconcile(self, key: ObjectKey, stored: Stored, commits: asyncio.TaskGroup, *, is_cheap: bool = True) -> None:
        if object_parts(stored.value) != key._asdict():
            raise ContractError(f"{stored.shown} is stored under {key.kind} {key.namespace}/{key.name}: wanted its own name there")
        if stored.claim.is_deleting:
            await self._deallocation.delete(key, stored)
            return
        if stored.claim.deallocation:
            self._is_due = await self._deallocation.finish(key, stored) or self._is_due
            return
        if stored.claim.allocation is not None:
            await self._deallocation.release_leftovers(key, stored)
            if (stored.claim.mode or self._settings.claim_allocation) is AllocationMode.IMMEDIATE:
                self._done[key] = stored.revision
            elif not stored.claim.consumers and not self._consumers.users(key):
                await self._deallocation.begin(key, stored, "no pod uses it any more")
            return
        attempt = stored.claim.attempt
        if attempt is None:
            if not await self._is_mine_to_begin(key, stored):
                if not self._consumers.waiting(key):
                    await self._deallocation.release_leftovers(key, self._world.objects.get(key, stored))
                return
            found = await self._begin(key, stored, is_cheap=is_cheap)
            if found is None:
                return
            stored, attempt = found
        await self._slots.acquire()
        commits.create_task(self._commit_in_slot(key, stored, attempt))

    async def _commit_in_slot(self, key: ObjectKey, stored: Stored, attempt: Attempt) -> None:
        try:
            await self._bounded(key, stored, partial(self._commit, key, stored, attempt))
        finally:
            self._slots.release()

    async def _is_mine_to_begin(self, key: ObjectKey, stored: Stored) -> bool:
        """Say whether a claim is to be allocated by itself: one that waits for a pod, or that a pod brings along, is not."""
        mode = stored.claim.mode
        if self._consumers.waiting(key):
            missing = self._world.missing_mates(stored.claim)
            if missing:
                message = f"waits for {', '.join(missing)}, which the same pod wants: its claims are served together"
                reason = Reason(code="waits-for-claims", message=message, facts={"claims": missing})
                await self.tell(key, stored, "WaitsForClaims", (reason,))
            return False
        if (mode or self._settings.claim_allocation) is AllocationMode.IMMEDIATE:
            return True
        message = "is allocated when a pod that uses it is scheduled, and no stored pod waits for it"
        await self.tell(key, stored, "WaitsForPod", (Reason(code="waits-for-pod", message=message),))
        return False

    async def _begin(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> tuple[Stored, Attempt] | None:
        """Search for devices and write the attempt down; None when there is no way forward now, or somebody else wrote first.

        Shapes: is_cheap — a claim that needs more than a short search is put behind all others.
        """
        seen = _Seen(stored.revision, self._world.supply)
        if self._settled.get(key) == seen or (is_cheap and self._costly.holds(key, stored.revision)):
            return None
        members = self._together(key, stored)
        nodes = self._world.nodes_for(stored.claim)
        read = self._read(key)
        found = await self._finder.first(nodes, members, is_cheap=is_cheap)
        if isinstance(found, tuple):
            node, outcome = found
            return await self.attempt(node, members, outcome.results)
        refused = found
        if is_cheap and any(isinstance(outcome, GaveUp) for outcome in refused):
            self._costly.put(key, stored.revision)
            return None
        await self._finder.refresh(nodes, refused, members)
        self._settled[key] = seen
        reason, reasons = explain_nodes(nodes, refused)
        await self.tell(key, stored, reason, reasons, lambda: self._finder.advise_members(nodes, refused, members))
        if not is_cheap:
            newest = self._world.objects.get(key, stored)
            self._costly.tried(key, newest.revision, read, now_s=self._runtime.clock.monotonic())
        return None

    def _together(self, key: ObjectKey, stored: Stored) -> list[Member]:
        """List the claims to be allocated at once: this one, and those of its pod that wait, too.

        Errors: raises ContractError when the first cannot be read; another that cannot is told so in its own turn.
        """
        members = [member(key, stored, self._world.classes)]
        if self._world.holds_devices(stored.claim):
            return members
        for mate_key, mate in self._world.mates(stored.claim):
            try:
                is_waiting = mate.claim.held is None and not mate.metadata.deletion_timestamp
                if self._consumers.waiting(mate_key):
                    continue  # the pod brings it along when it is scheduled
                if is_waiting and not self._world.holds_devices(mate.claim):
                    members.append(member(mate_key, mate, self._world.classes))
            except ContractError:
                continue
        return members

    async def attempt(self, node: str, members: Sequence[Member], results: Sequence[AllocationResult]) -> tuple[Stored, Attempt] | None:
        """Write an attempt into each claim; gives the first one's. They are committed in their own turns.

        Shapes: results — one a member.
        """
        made: list[tuple[Stored, Attempt] | None] = []
        for each_member, result in zip(members, results, strict=True):
            claim = each_member.stored.value
            allocation = lifecycle.with_uuids(result, each_member.stored.uid)
            attempt = Attempt(number=lifecycle.number_of(claim) + 1, node=node, allocation=allocation, wishes=each_member.wishes)
            written = await self._writer.write(each_member.key, each_member.stored.revision, lifecycle.with_attempt(claim, attempt))
            made.append((written, attempt) if written is not None else None)
        return made[0]

    async def _commit(self, key: ObjectKey, stored: Stored, attempt: Attempt) -> None:
        """Have the node's ledger take the attempt, and write the status; a refusal drops the attempt, and the next round searches anew."""
        claim = stored.value
        op_id = f"allocate-{stored.uid}-{attempt.number}"

        async def is_newest() -> bool:
            newest = await self._writer.read(key)
            return newest is not None and newest.revision == stored.revision

        try:
            held = await self._ledgers.hold(claim, attempt, is_newest)
        except PeerUnavailable as err:
            if err.facts.get("code") == NODE_FAILED:
                # It is asked again; whoever waits for the claim is told what for.
                await self.tell(key, stored, "NodeFailed", (Reason(code="node-failed", message=str(err), facts={"node": attempt.node}),))
            raise
        if isinstance(held, Overtaken):
            return
        if isinstance(held, Refusal):
            self._metrics.decisions.labels("refused-by-node").inc()
            why = summarize(held.reasons)
            self._log.info("claim.refused", claim=stored.shown, node=attempt.node, op_id=op_id, why=why)
            # Where the node forbids what the claim wishes, no other of its devices helps.
            is_forbidden = any(reason.code == "policy-forbidden" for reason in held.reasons)
            devices = self._world.devices_of(attempt.node) if is_forbidden else lifecycle.devices_of(attempt.allocation, attempt.node)
            self._finder.refusals.remember(key, devices, why, now_s=self._runtime.clock.monotonic())
            dropped = await self._writer.write(key, stored.revision, lifecycle.without_attempt(claim))
            if dropped is not None:
                await self.tell(key, dropped, "RefusedByNode", held.reasons)
            return
        now = rfc3339(self._runtime.clock.now())
        written = await self._writer.write(key, stored.revision, lifecycle.with_allocation(claim, attempt.allocation, now=now))
        if written is None:
            return
        self._metrics.decisions.labels("allocated").inc()
        names = [granted_device.device for granted_device in attempt.allocation.devices.results]
        self._log.info("claim.allocated", claim=stored.shown, node=attempt.node, devices=names, op_id=op_id)
        await self._decisions.publish(
            "allocate", stored.claim.owner, held.placement, op_id=op_id, node=attempt.node, ledger_sequence=held.ledger_sequence
        )

    async def tell(
        self,
        key: ObjectKey,
        stored: Stored,
        reason: str,
        reasons: tuple[Reason, ...],
        advise: Callable[[], Awaitable[tuple[Reason, ...]]] | None = None,
    ) -> None:
        """Put the reasons into the claim's condition, once.

        Shapes: advise — finds the nearest miss and what would fit; asked only when there is something new to tell.
        """
        claim = stored.value
        message = "; ".join(each_reason.message for each_reason in reasons)
        if lifecycle.has_condition(claim, reason=reason, message=message):
            return
        self._advice_left -= advise is not None
        advice = await advise() if advise is not None and self._advice_left >= 0 else ()
        self._metrics.decisions.labels("refused").inc()
        if reason == "Malformed":
            self._metrics.malformed.inc()
        self._log.info("claim.waiting", claim=stored.shown, reason=reason, why=message)
        now = rfc3339(self._runtime.clock.now())
        api_object = lifecycle.with_condition(claim, is_true=False, reason=reason, message=message, now=now)
        api_object = lifecycle.with_advice(api_object, message="; ".join(each_reason.message for each_reason in advice), now=now)
        written = await self._writer.write(key, stored.revision, api_object)
        if written is None:
            return
        if key in self._settled:
            self._settled[key] = _Seen(written.revision, self._settled[key].supply)
        to_free = tuple(each_reason for each_reason in advice if each_reason.facts.get("change") == "free")
        refusal = Refusal(reasons=(*reasons, *(each_reason for each_reason in advice if each_reason not in to_free)), to_free=to_free)
        op_id = f"refuse-{stored.uid}-{written.revision}"
        await self._decisions.publish("allocate", stored.claim.owner, refusal, op_id=op_id)

    def _is_allocated(self, claim: ApiObject) -> bool:
        return bool(claim.status.get("allocation"))
