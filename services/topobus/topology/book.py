"""The ledger in memory and in its bucket: loaded at start, changed by compare-and-set alone, one change at a time.

Memory holds exactly what the bucket is known to hold. When a write's fate is unknown, the bucket is read again, and the operation id in it says whether
the write happened; when somebody else wrote first, the decision is made again on what they wrote.

The store may fail us: be emptied, put back from an old copy, or hold bytes that are no ledger. What memory knows was answered to somebody, so it is
written back under a new epoch, at the next decision or by the next look, whichever comes first. An epoch and a sequence never go back on their own.
At the start memory knows nothing: then the newest older revision that is a ledger is put back, and without one the service does not start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from msgspec import structs

from topobus.contracts.catalogue import LEDGER
from topobus.domain.errors import ContractError, InvariantError, PeerUnavailable
from topobus.domain.ledger import Ledger
from topobus.domain.transitions import Step, announce, check, shed
from topobus.runtime.bus import Bus
from topobus.runtime.failures import AmbiguousWrite
from topobus.runtime.heartbeat import Heartbeat
from topobus.runtime.logging import get_logger
from topobus.runtime.readiness import Readiness
from topobus.runtime.state import Conflict
from topobus.topology.metrics import TopologyMetrics

__all__ = ["Book", "Decide"]

Decide = Callable[[Ledger], Awaitable[Step]]
"""Makes a decision on a ledger; called again when the ledger turned out to be another one."""

# Compare-and-sets lost in a row before the asker is told to come again; two instances that run side by side lose one now and then.
_ROUNDS = 16
_RETRY_S = 1.0
# Between two looks at the bucket: a store lost while nothing is decided must be written back before this process, too, ends.
_LOOK_S = 5.0


class Book:
    """The only door to the ledger."""

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
        """Load the ledger, or begin one; waits until the bucket can be read.

        Errors: raises ContractError when what stands there is no ledger, and none of the older revisions is.
        """
        while not self._is_known:
            try:
                async with self._lock:
                    await self._reload()
            except PeerUnavailable as err:
                get_logger().warning("ledger.waiting", error=str(err))
                await asyncio.sleep(_RETRY_S)
        self._readiness.set("ledger", is_ready=True)
        get_logger().info("ledger.opened", epoch=self.ledger.epoch, sequence=self.ledger.sequence, owners=len(self.ledger.allocations))

    async def change(self, decide: Decide) -> Step:
        """Decide and write; the answer is in the bucket when this returns. A repeated operation writes nothing.

        Errors: raises PeerUnavailable when the fate of the write is unknown still, or others keep writing; asking again is safe.
        """
        async with self._lock:
            for _ in range(_ROUNDS):
                if not self._is_known:
                    await self._reload()
                step = await decide(self.ledger)
                if step.is_repeat or await self._write(step.ledger):
                    return step
            raise PeerUnavailable(
                f"ledger of {self._node}: others wrote {_ROUNDS} times in a row", next_step="run one topology service a node"
            )

    @property
    def has_marks(self) -> bool:
        """Say whether decisions are announced and not marked so in the bucket."""
        return bool(self._announced)

    def mark_announced(self, op_ids: Iterable[str]) -> None:
        """Remember that these decisions' events are out; written with the next change."""
        self._announced |= set(op_ids)

    async def write_marks(self) -> None:
        """Write the marks now, for no change may come for long."""
        async with self._lock:
            for _ in range(_ROUNDS):
                if not self._announced or (self._is_known and await self._write(self.ledger)):
                    return
                await self._reload()

    async def look_after(self, beat: Heartbeat) -> None:
        """Look at the bucket now and then, for ever: what was lost there is written back, what another instance wrote is taken in."""
        while True:
            beat.rest()
            await asyncio.sleep(_LOOK_S)
            # The lock is every decision's: as long as this loop gets it, decisions are made.
            beat.turn()
            try:
                async with self._lock:
                    await self._reload()
            except (PeerUnavailable, ContractError) as err:
                get_logger().debug("ledger.unseen", error=str(err))

    async def _write(self, ledger: Ledger) -> bool:
        """Write by compare-and-set, the announcements with it; False when the decision must be made again.

        Errors: raises ContractError for a ledger that is too large even without what only explains.
        """
        announced = frozenset(self._announced)
        new = announce(ledger, announced) if announced else ledger
        try:
            try:
                outcome = await self._bus.compare_and_set(LEDGER, new, self._revision, node=self._node)
            except ContractError as err:
                get_logger().warning("ledger.shed", sequence=new.sequence, operations=len(new.operations), why=err.message)
                new = shed(new)
                outcome = await self._bus.compare_and_set(LEDGER, new, self._revision, node=self._node)
        except AmbiguousWrite:
            # Neither done nor undone. The reload tells; until it has, nothing is decided.
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

    async def _reload(self) -> None:
        """Read the bucket; write memory back when what stands there cannot have come from a topology service after us."""
        try:
            entry = await self._bus.get(LEDGER, node=self._node)
        except ContractError as err:
            revision = err.facts.get("revision")
            if not isinstance(revision, int):
                raise
            if not self._revision:
                await self._recall(revision, err)
            await self._write_back(revision, self.ledger.epoch, why="unreadable")
            return
        if entry is None:
            await (self._write_back(0, self.ledger.epoch, why="lost") if self._revision else self._begin())
            return
        stored = entry.value
        if self._revision and (stored.node != self._node or (stored.epoch, stored.sequence) < (self.ledger.epoch, self.ledger.sequence)):
            await self._write_back(entry.revision, max(stored.epoch, self.ledger.epoch), why="rolled-back")
            return
        if (entry.revision, stored.epoch, stored.sequence) == (self._revision, self.ledger.epoch, self.ledger.sequence):
            self._is_known = True
            return
        try:
            check(stored)
        except InvariantError as err:
            if not self._revision:
                await self._recall(entry.revision, err)
            await self._write_back(entry.revision, max(stored.epoch, self.ledger.epoch), why="contradictory")
            return
        self._take(stored, entry.revision)

    async def _recall(self, revision: int, why: ContractError | InvariantError) -> None:
        """At the start, take into memory the newest older revision that is a ledger: that is what the bucket keeps them for.

        Errors: raises ContractError when there is none. A node whose devices are in use must never begin with an empty ledger.
        """
        for entry in reversed(await self._bus.history(LEDGER, node=self._node)):
            if entry.revision < revision and _is_sound(entry.value):
                get_logger().warning(
                    "ledger.recalled",
                    revision=entry.revision,
                    unreadable_revision=revision,
                    epoch=entry.value.epoch,
                    sequence=entry.value.sequence,
                    owners=len(entry.value.allocations),
                    error=why.message,
                    next_step="see who writes this bucket besides topology; what was decided after the recalled revision is not known",
                )
                self.ledger = entry.value
                return
        key = f"{LEDGER.bucket} {self._node}"
        raise ContractError(
            f"{why.message}; none of the bucket's older revisions is a ledger either",
            next_step=f"put a backup back (nats kv put {key} < FILE); only when nothing runs on the node's devices begin anew (nats kv del {key})",
            **{**why.facts, "bucket": LEDGER.bucket, "key": self._node, "revision": revision},
        ) from why

    async def _begin(self) -> None:
        """Write the first ledger of this node."""
        outcome = await self._bus.compare_and_set(LEDGER, self.ledger, 0, node=self._node)
        if not isinstance(outcome, Conflict):
            self._take(self.ledger, outcome.revision)

    async def _write_back(self, expected_revision: int, epoch: int, *, why: str) -> None:
        """Write what memory holds over what the store has made of it, as a new epoch."""
        self._is_known = False
        self._metrics.rewrites.labels(why).inc()
        restored = structs.replace(self.ledger, epoch=epoch + 1)
        outcome = await self._bus.compare_and_set(LEDGER, restored, expected_revision, node=self._node)
        if isinstance(outcome, Conflict):
            # Another instance was faster; the next look reads what it wrote.
            return
        get_logger().warning(
            "ledger.written-back", why=why, epoch=restored.epoch, sequence=restored.sequence, owners=len(restored.allocations)
        )
        self._take(restored, outcome.revision)

    def _take(self, ledger: Ledger, revision: int) -> None:
        self.ledger, self._revision, self._is_known = ledger, revision, True
        self._announced &= ledger.operations.keys()
        self._metrics.sequence.set(ledger.sequence)
        held: dict[str, int] = {}
        for allocation in ledger.allocations.values():
            for holding in allocation.holdings:
                for device_class, names in holding.devices.items():
                    held[device_class] = held.get(device_class, 0) + len(names)
                if holding.cpus:
                    held["cpu"] = held.get("cpu", 0) + len(holding.cpus)
        # Seldom another count: most writes are marks, and devices that go from one pod to the next.
        if held != self._held:
            self._held = held
            self._metrics.held.clear()
            for device_class, count in held.items():
                self._metrics.held.labels(device_class).set(count)


def _is_sound(ledger: Ledger) -> bool:
    """Say whether a ledger contradicts itself nowhere."""
    try:
        check(ledger)
    except InvariantError:
        return False
    return True
