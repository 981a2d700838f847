"""The write protocol of an allocation for both homes: attempts into a group's claims, the node's
ledger, allocations into the claims, decision events.

A replica may crash after any of these writes, and any replica continues with the next: an attempt
records the operation and its node, and its id consists of the claim's uid and the attempt's number,
so the node gets the same request again. A claim is written only at the version that has the
attempt, so a concurrent change is read first.

The homes differ in `CommitRules`. In the stand-alone home no other component allocates, so the
ledger decides and the revision is the check. A pod's reservation follows when all of its claims are
allocated. In a cluster others allocate as well, so an attempt counts only when the copy shows
everything before it, and the allocation includes the reservation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Protocol

from topobus.controller.commit.allocator import Member
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.node_ledgers import NODE_FAILED, Held, NodeLedgers, Overtaken
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.reservations import PodRef, with_reservation, without_reservations
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.tracing import entered
from topobus.values.dra_names import DRIVER
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal

__all__ = ["AllocationCommitter", "Attempted", "CommitRules", "Draft", "Progress", "next_attempts", "refused_devices"]


class Progress(Enum):
    """How a commit went."""

    ON = "on"
    """Something was written or has changed: reconcile again."""
    LATER = "later"
    """The copy is not recent enough yet."""
    COSTLY = "costly"
    """More than a short search is needed to find out whether the devices are still free."""


@dataclass(frozen=True)
class Attempted:
    """A claim at the version that has an attempt."""

    key: ObjectKey
    stored: Stored
    attempt: Attempt

    @property
    def op_id(self) -> str:
        """The id of the operation at the node. A replica that continues the attempt repeats the
        same operation.
        """
        return self.attempt.op_id(self.stored.uid)


@dataclass(frozen=True)
class Draft:
    """A claim's next version, which has an attempt and is not written yet."""

    key: ObjectKey
    revision: int
    """The revision at which it is to be written."""
    value: ApiObject
    attempt: Attempt


class CommitRules(Protocol):
    """What differs between the homes when attempts are committed."""

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields that the log line of a decision has besides the claim and the node."""
        ...

    async def revalidate(self, group: Sequence[Attempted]) -> Sequence[AllocationResult] | Progress:
        """Check whether the attempts may be committed. Returns a result per claim from a search
        among the attempts' devices, or the progress.

        Errors: raises PeerUnavailable.
        """
        ...

    async def refusal_of(self, attempted: Attempted, error: PeerUnavailable) -> Refusal:
        """Return the refusal that follows from a node that does not answer.

        Errors: raises the error where the same request is to be sent again.
        """
        ...

    def allocated(self, claim: ApiObject, allocation: AllocationResult, now: datetime) -> ApiObject | Reason:
        """Make the claim's next version, which has the allocation.

        Returns a Reason when the claim cannot have it.
        """
        ...

    async def on_refused(self, attempted: Attempted, refusal: Refusal) -> None:
        """Undo the attempt, and exclude the devices for a while.

        Errors: raises PeerUnavailable.
        """
        ...


class AllocationCommitter:
    """Writes attempts and commits them. Reserves claims and removes reservations."""

    def __init__(
        self,
        clock: Clock,
        store: ObjectStore,
        ledgers: NodeLedgers,
        decisions: DecisionPublisher,
        metrics: ControllerMetrics,
    ) -> None:
        self._clock = clock
        self._store = store
        self._ledgers = ledgers
        self._decisions = decisions
        self._metrics = metrics
        self._log = get_logger()

    async def write_attempts(self, drafts: Sequence[Draft]) -> list[Attempted]:
        """Write the attempts of a group's claims. Stops at a claim that changed meanwhile.

        Shapes: result — the claims that have their attempt, in order.
        """
        group: list[Attempted] = []
        for draft in drafts:
            written = await self._store.write(draft.key, draft.revision, draft.value)
            if written is None:
                break
            group.append(Attempted(draft.key, written, draft.attempt))
        return group

    async def commit(self, group: Sequence[Attempted], rules: CommitRules) -> Progress | Refusal:
        """Commit the attempts of a group.

        A Refusal is the node's, or that of a claim that cannot have its allocation.

        Errors: raises PeerUnavailable, which leaves open whether the node did it.
        """
        with entered("commit allocations", claims=len(group), node=group[0].attempt.node if group else ""):
            return await self._commit(group, rules)

    async def _commit(self, group: Sequence[Attempted], rules: CommitRules) -> Progress | Refusal:
        results = await rules.revalidate(group)
        if isinstance(results, Progress):
            return results
        holdings: list[Held] = []
        for attempted in group:
            held = await self._hold(attempted, rules)
            if isinstance(held, Refusal):
                return await self._refuse(attempted, held, rules)
            if isinstance(held, Overtaken):
                return Progress.ON
            holdings.append(held)
        committed: list[tuple[Attempted, Held]] = []
        for attempted, held, result in zip(group, holdings, results, strict=True):
            lengthened = attempted.attempt.lengthened(result)
            value = rules.allocated(attempted.stored.value, lengthened, self._clock.now())
            if isinstance(value, Reason):
                return await self._refuse(attempted, Refusal(reasons=(value,)), rules)
            if await self._store.write(attempted.key, attempted.stored.revision, value) is None:
                break
            self._metrics.decisions.labels("allocated").inc()
            devices = [granted_device.device for granted_device in attempted.attempt.allocation.devices.results]
            self._log.info("claim.allocated", **self._fields(attempted, rules), devices=devices)
            committed.append((attempted, held))
        # After the writes: a slow bus must not delay the other claims of the pod.
        for attempted, held in committed:
            if held.placement is None:
                # Otherwise the node has published the decision already, as its `place`.
                await self._decisions.publish(
                    "allocate", attempted.stored.claim.owner, None, op_id=attempted.op_id, node=attempted.attempt.node
                )
        return Progress.ON

    async def reserve(self, pod: PodRef, claims: Iterable[tuple[ObjectKey, Stored]]) -> Reason | bool:
        """Write a pod into the reservedFor of claims that are allocated.

        Returns a Reason when a claim is full, False when a claim changed meanwhile.

        Errors: raises PeerUnavailable.
        """
        for key, stored in claims:
            reserved = with_reservation(stored.value, pod)
            if isinstance(reserved, Reason):
                return reserved
            if reserved is not stored.value and await self._store.write(key, stored.revision, reserved) is None:
                return False
        return True

    async def unreserve(self, uids: Collection[str], claims: Iterable[tuple[ObjectKey, Stored]]) -> None:
        """Remove users from claims. A claim that changed meanwhile is left to the next round.

        Errors: raises PeerUnavailable.
        """
        for key, stored in claims:
            freed = without_reservations(stored.value, uids)
            if freed is not stored.value:
                await self._store.write(key, stored.revision, freed)

    async def _hold(self, attempted: Attempted, rules: CommitRules) -> Held | Refusal | Overtaken:
        try:
            return await self._ledgers.hold(
                attempted.stored.claim, attempted.attempt, partial(self._is_newest, attempted)
            )
        except PeerUnavailable as err:
            return await rules.refusal_of(attempted, err)

    async def _is_newest(self, attempted: Attempted) -> bool:
        newest = await self._store.read(attempted.key)
        return newest is not None and attempts.is_current(newest.value, attempted.stored.uid, attempted.attempt)

    async def _refuse(self, attempted: Attempted, refusal: Refusal, rules: CommitRules) -> Refusal:
        self._metrics.decisions.labels("refused-by-node").inc()
        self._log.info("claim.refused", **self._fields(attempted, rules), why=summarize(refusal.reasons))
        await rules.on_refused(attempted, refusal)
        return refusal

    def _fields(self, attempted: Attempted, rules: CommitRules) -> dict[str, str]:
        return {
            "claim": attempted.stored.shown,
            "node": attempted.attempt.node,
            "op_id": attempted.op_id,
            **rules.log_fields,
        }


def next_attempts(
    node: str,
    claims: Sequence[Member],
    results: Sequence[AllocationResult],
    *,
    pod: str = "",
    refused: Sequence[str] = (),
    rounds: int = 0,
) -> list[Draft]:
    """Make the next attempt of each claim of a group.

    Shapes: results — one per claim; pod, refused, rounds — as in `Attempt`.
    """
    drafts: list[Draft] = []
    for claim, result in zip(claims, results, strict=True):
        attempt = Attempt(
            number=claim.stored.claim.number + 1,
            node=node,
            allocation=lifecycle.with_uuids(result, claim.stored.uid),
            wishes=claim.wishes,
            pod=pod,
            refused=tuple(refused),
            rounds=rounds,
        )
        drafts.append(
            Draft(claim.key, claim.stored.revision, attempts.with_attempt(claim.stored.value, attempt), attempt)
        )
    return drafts


def refused_devices(attempt: Attempt, refusal: Refusal, all_of_node: Iterable[DeviceId]) -> Collection[DeviceId]:
    """Name the devices to exclude after a refusal: all of the node's own where the node forbids the
    request itself or does not answer, as no other device there helps.
    """
    if any(reason.code in ("policy-forbidden", "node-silent", NODE_FAILED) for reason in refusal.reasons):
        return [device for device in all_of_node if device.driver == DRIVER]
    return lifecycle.devices_of(attempt.allocation, attempt.node)
