"""Holds the ledger in memory and in its bucket: loads it at start, and applies one change at a time
by compare-and-set.

Memory equals what the bucket is known to hold. When the outcome of a write is unknown, the bucket
is read again, and the operation id in it shows whether the write happened. When another writer was
first, the decision is made again on what it wrote.

The store may lose data: it may be emptied, restored from an old copy, or hold bytes that are no
ledger or a ledger that no instance of this service wrote (`engine.ledger.ledger_check`). Answers
were given on what memory holds, so it is written back under a new epoch, at the next decision or by
`repair_loop`. Epoch and sequence never decrease. At start memory is empty: the revisions that the
bucket has kept are checked from old to new, and the last plausible one is restored. Without one the
service does not start, nor when the server holds revisions that it does not find by their key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from msgspec import structs

from topobus.bus.bus import Bus, Entry
from topobus.bus.failures import AmbiguousWrite
from topobus.bus.streams.state import Conflict, Written
from topobus.engine.ledger.holdings import next_counts
from topobus.engine.ledger.ledger_check import CheckedLedger, Discrepancy, check_stored_ledger, is_plausible
from topobus.engine.ledger.transitions import Step, announce, shed
from topobus.formats.messages.catalogue import LEDGER
from topobus.formats.messages.releases import START_THAT_RELEASE, is_of_other_release
from topobus.process.clock import until_tick
from topobus.process.heartbeat import Heartbeat
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.process.tracing import annotate, span
from topobus.topology.metrics import TopologyMetrics
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Ledger

__all__ = ["Decide", "LedgerStore"]

Decide = Callable[[Ledger], Awaitable[Step]]
"""Makes a decision on a ledger. Called again when the ledger has changed meanwhile."""

# After this many lost compare-and-sets in a row the request fails and may be repeated. Two
# instances that run side by side lose one now and then.
_ROUNDS = 16
_RETRY_S = 1.0
# Seconds between two reads of the bucket: a store that is lost while nothing is decided must be
# written back before this process ends as well.
_LOOK_S = 5.0


class LedgerStore:
    """Reads and changes the ledger. Nothing else in this service writes it."""

    def __init__(self, bus: Bus, *, node: str, readiness: Readiness, metrics: TopologyMetrics) -> None:
        self.ledger = Ledger(node=node)
        self._bus = bus
        self._node = node
        self._revision = 0
        self._is_known = False
        self._lock = asyncio.Lock()
        self._readiness = readiness
        self._metrics = metrics
        self._announced: set[str] = set()
        self._held: dict[str, int] = {}
        readiness.set("ledger", is_ready=False, why="reading the ledger")

    async def open(self) -> None:
        """Load the ledger, or begin one. Waits until the bucket can be read.

        Errors: raises ContractError when neither the present revision nor any older one is a
        ledger, and when another release wrote the present one and it cannot be read.
        """
        while not self._is_known:
            try:
                async with self._lock:
                    await self._reload()
            except PeerUnavailable as err:
                get_logger().warning("ledger.waiting", error=str(err))
                await asyncio.sleep(_RETRY_S)
        self._readiness.set("ledger", is_ready=True)
        get_logger().info(
            "ledger.opened", epoch=self.ledger.epoch, sequence=self.ledger.sequence, owners=len(self.ledger.allocations)
        )

    async def change(self, decide: Decide) -> Step:
        """Decide and write. The answer is in the bucket when this returns.

        A repeated operation writes nothing.

        Errors: raises PeerUnavailable when the outcome of the write is still unknown, or when
        others keep writing. Repeating the request is safe.
        """
        async with self._lock:
            for _ in range(_ROUNDS):
                if not self._is_known:
                    await self._reload()
                step = await decide(self.ledger)
                if step.is_repeat or await self._write(step.ledger):
                    annotate(decision_id=step.record.decision_id)
                    return step
            raise PeerUnavailable(
                f"ledger of {self._node}: others wrote {_ROUNDS} times in a row",
                next_step="run one topology service a node",
            )

    @property
    def has_marks(self) -> bool:
        """Return whether there are announced decisions that are not marked so in the bucket."""
        return bool(self._announced)

    def mark_announced(self, op_ids: Iterable[str]) -> None:
        """Remember that these events are published. Marks are written with the next change."""
        self._announced |= set(op_ids)

    async def write_marks(self) -> None:
        """Write the marks now, because the next change may be far away."""
        async with self._lock:
            for _ in range(_ROUNDS):
                if not self._announced or (self._is_known and await self._write(self.ledger)):
                    return
                await self._reload()

    async def repair_loop(self, beat: Heartbeat) -> None:
        """Check the bucket now and then until cancelled: write back what was lost there, and load
        what another instance wrote.
        """
        while True:
            beat.rest()
            await asyncio.sleep(until_tick(asyncio.get_running_loop().time(), _LOOK_S))
            # Every decision takes this lock: as long as this loop gets it, decisions are made.
            beat.turn()
            try:
                async with self._lock:
                    await self._reload()
            except PeerUnavailable as err:
                get_logger().debug("ledger.unseen", error=str(err))
            except ContractError as err:
                self._readiness.set("ledger", is_ready=False, why=err.message)
            else:
                self._readiness.set("ledger", is_ready=True)

    async def _write(self, ledger: Ledger) -> bool:
        """Write by compare-and-set, together with the announcements.

        False when the decision must be made again.

        Errors: raises ContractError for a ledger that is too large even without the parts that only
        explain.
        """
        announced = frozenset(self._announced)
        new = announce(ledger, announced) if announced else ledger
        try:
            try:
                with span("write ledger", sequence=new.sequence):
                    outcome = await self._compare_and_set(new, self._revision)
            except ContractError as err:
                get_logger().warning(
                    "ledger.shed", sequence=new.sequence, operations=len(new.operations), why=err.message
                )
                new = shed(new)
                outcome = await self._compare_and_set(new, self._revision)
        except AmbiguousWrite:
            # The outcome is unknown. Until the bucket has been read again, nothing is decided.
            self._is_known = False
            self._metrics.rewrites.labels("ambiguous").inc()
            get_logger().warning("ledger.write-unconfirmed", sequence=new.sequence)
            return False
        if isinstance(outcome, Conflict):
            self._is_known = False
            self._metrics.rewrites.labels("conflict").inc()
            return False
        self._take(new, outcome.revision)
        self._announced -= announced
        return True

    async def _compare_and_set(self, ledger: Ledger, revision: int) -> Written | Conflict:
        outcome, began_s = "failed", time.monotonic()
        try:
            answer = await self._bus.compare_and_set(LEDGER, ledger, revision, node=self._node)
            outcome = "conflict" if isinstance(answer, Conflict) else "written"
            return answer
        except AmbiguousWrite:
            outcome = "ambiguous"
            raise
        finally:
            self._metrics.ledger_writes.labels(outcome).inc()
            self._metrics.ledger_write_s.observe(time.monotonic() - began_s)

    async def _reload(self) -> None:
        """Read the bucket.

        When its content cannot come from a topology service that ran after this one, what memory
        holds is written back.

        Errors: raises ContractError when memory is empty and none of the revisions that the bucket
        has kept is a ledger, when another release wrote what cannot be read, or when the server has
        lost the index of its messages.
        """
        ledger: Ledger | None = None
        trouble: ContractError | None = None
        try:
            entry = await self._bus.get(LEDGER, node=self._node)
            if entry is None:
                await self._check_absence()
                await (self._write_back(0, _next_epoch(self.ledger), why="lost") if self._revision else self._begin())
                return
            revision, ledger = entry.revision, entry.value
        except ContractError as err:
            stands_at = err.facts.get("revision")
            if not isinstance(stands_at, int):
                raise
            if is_of_other_release(str(err.facts.get("release", "")), self._bus.release):
                # It may hold what is in use, so an older revision is no substitute for it.
                raise ContractError(err.message, next_step=START_THAT_RELEASE, **err.facts) from err
            revision, trouble = stands_at, err
        if ledger is not None and revision == self._revision:
            self._is_known = True
            return
        checked = await self._check_revision(revision, ledger, trouble)
        if checked.discrepancy is None:
            self._take(checked.ledger, revision)
            return
        await self._write_back(revision, checked.ledger, why=str(checked.discrepancy))

    async def _check_revision(
        self, revision: int, ledger: Ledger | None, trouble: ContractError | None
    ) -> CheckedLedger:
        """Check all revisions from the one in memory to the present one, in order.

        At start it begins at the oldest revision that the bucket has kept.

        Shapes: ledger — None when the present revision is no ledger. `trouble` is then the reason.
        Errors: raises ContractError when memory is empty and no revision is a ledger.
        """
        kept: tuple[Entry[Ledger], ...] = ()
        if revision != self._revision + 1:
            # A restored store counts its revisions from the beginning, so all that it has may be
            # new here.
            after = self._revision if self._revision < revision else 0
            kept = await self._bus.history(LEDGER, node=self._node)
            is_next = any(older.revision == self._revision for older in kept)
            kept = tuple(older for older in kept if after < older.revision < revision)
        else:
            is_next = True
        held, held_at = (self.ledger, self._revision) if self._revision else (None, 0)
        refused = {number for older in kept for number in older.value.disbelieved if number < older.revision}
        for older in kept:
            is_beginning = held is None and older.revision not in refused and is_plausible(older.value)
            if is_beginning or (
                held is not None and check_stored_ledger(held, older.value, is_next=is_next).discrepancy is None
            ):
                held, held_at, is_next = older.value, older.revision, True
        if held is None and ledger is not None and is_plausible(ledger):
            return CheckedLedger(ledger=ledger)
        if held is None:
            raise self._unrecallable(revision, trouble)
        checked = (
            CheckedLedger(ledger=_next_epoch(held), discrepancy=Discrepancy.UNREADABLE)
            if ledger is None
            else check_stored_ledger(held, ledger, is_next=is_next)
        )
        if checked.discrepancy is not None:
            get_logger().warning(
                "ledger.disbelieved" if self._revision else "ledger.recalled",
                why=str(checked.discrepancy),
                revision=held_at,
                unreadable_revision=revision,
                epoch=checked.ledger.epoch,
                sequence=checked.ledger.sequence,
                owners=len(checked.ledger.allocations),
                error=trouble.message if trouble is not None else "",
                next_step="see who writes this bucket besides topology; what was decided after the recalled revision "
                "is not known",
            )
        return checked

    def _unrecallable(self, revision: int, trouble: ContractError | None) -> ContractError:
        """Return the error that prevents the start.

        A node whose devices are in use must never begin with an empty ledger.
        """
        key = f"{LEDGER.bucket} {self._node}"
        what = (
            trouble.message
            if trouble is not None
            else f"{key}: two owners hold the same, or its epoch or sequence is out of range"
        )
        return ContractError(
            f"{what}; none of the bucket's older revisions is a ledger either",
            next_step=f"put a backup back (nats kv put {key} < FILE); only when nothing runs on the node's devices "
            f"start with an empty ledger (nats kv del {key})",
            **{
                **(trouble.facts if trouble is not None else {}),
                "bucket": LEDGER.bucket,
                "key": self._node,
                "revision": revision,
            },
        )

    async def _check_absence(self) -> None:
        """Check that no ledger is there where none was found.

        A node whose devices are in use must never begin with an empty ledger.
        Errors: raises ContractError.
        """
        hidden = await self._bus.hidden_messages(LEDGER, node=self._node)
        if hidden:
            key = f"{LEDGER.bucket} {self._node}"
            raise ContractError(
                f"{key}: nats-server holds {hidden} of its revisions and finds none by the key",
                next_step="stop nats-server and start it again; if it still finds none, start a newer one on the same "
                f"store, or put a backup back (nats kv put {key} < FILE)",
                bucket=LEDGER.bucket,
                key=self._node,
            )

    async def _begin(self) -> None:
        """Write the first ledger of this node."""
        outcome = await self._compare_and_set(self.ledger, 0)
        if not isinstance(outcome, Conflict):
            self._take(self.ledger, outcome.revision)

    async def _write_back(self, expected_revision: int, restored: Ledger, *, why: str) -> None:
        """Write what memory holds over what the store lost or another writer changed.

        It gets a new epoch.
        """
        self._is_known = False
        self._metrics.rewrites.labels(why).inc()
        if expected_revision:
            restored = structs.replace(
                restored, disbelieved=(*restored.disbelieved, expected_revision)[-LEDGER.history :]
            )
        outcome = await self._compare_and_set(restored, expected_revision)
        if isinstance(outcome, Conflict):
            # Another instance was first. The next check reads what it wrote.
            return
        get_logger().warning(
            "ledger.written-back",
            why=why,
            epoch=restored.epoch,
            sequence=restored.sequence,
            owners=len(restored.allocations),
        )
        self._take(restored, outcome.revision)

    def _take(self, ledger: Ledger, revision: int) -> None:
        held = next_counts(self._held, self.ledger, ledger)
        self.ledger, self._revision, self._is_known = ledger, revision, True
        self._announced &= ledger.operations.keys()
        self._metrics.sequence.set(ledger.sequence)
        # The count seldom changes: most writes are marks, or pass devices from one pod to the next.
        if held != self._held:
            self._held = held
            self._metrics.held.clear()
            for device_class, count in held.items():
                self._metrics.held.labels(device_class).set(count)


def _next_epoch(ledger: Ledger) -> Ledger:
    return structs.replace(ledger, epoch=ledger.epoch + 1)
