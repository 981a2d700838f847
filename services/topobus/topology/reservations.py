"""Releases reservations that are not committed, so that a requester that dies between reserve and
commit leaks nothing.

A reservation's age counts from when this process first saw it, by its monotonic clock. So a restart
begins a new period, and a jump of the wall clock changes nothing. The release is an ordinary one
whose operation id comes from the reservation's decision, so it happens and is announced once.
"""

from __future__ import annotations

from topobus.engine.ledger import transitions
from topobus.engine.ledger.decision_events import decision_id
from topobus.engine.ledger.transitions import Step
from topobus.process.clock import Clock, until_tick
from topobus.process.logging import get_logger
from topobus.topology.announcer import Announcer
from topobus.topology.ledger_store import LedgerStore
from topobus.values.errors import ContractError, InvariantError, PeerUnavailable
from topobus.values.ledger import Allocation, AllocationPhase, Ledger, OperationRecord, PendingDecision
from topobus.values.outcome import Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["Reservations"]

# Seconds between two scans of the ledger. A reservation lives at most this much longer.
_LOOK_S = 1.0


class Reservations:
    """Expires reservations that are not committed."""

    def __init__(self, *, store: LedgerStore, announcer: Announcer, clock: Clock, expire_s: float) -> None:
        self._store = store
        self._announcer = announcer
        self._clock = clock
        self._expire_s = expire_s
        self._since: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            try:
                await self.expire()
            except (PeerUnavailable, ContractError) as err:
                get_logger().warning("reservation.kept-longer", error=str(err))
            await self._clock.sleep(until_tick(self._clock.monotonic(), min(_LOOK_S, self._expire_s / 4)))

    async def expire(self) -> None:
        """Release what has been reserved for too long."""
        now = self._clock.monotonic()
        reserved = {
            (key, allocation.decision_id): allocation
            for key, allocation in self._store.ledger.allocations.items()
            if allocation.phase is AllocationPhase.RESERVED
        }
        self._since = {key: self._since.get(key, now) for key in reserved}
        for key, allocation in reserved.items():
            if now - self._since[key] >= self._expire_s:
                await self._expire(allocation)

    async def _expire(self, reserved: Allocation) -> None:
        op_id = f"expire-{reserved.decision_id}"

        async def decide(ledger: Ledger) -> Step:
            held = ledger.allocations.get(reserved.owner.key)
            if held is None or held.phase is not AllocationPhase.RESERVED or held.decision_id != reserved.decision_id:
                # It was committed or released while this release waited for the lock.
                nothing = OperationRecord(verb="release", owner_key=reserved.owner.key)
                return Step(ledger=ledger, record=nothing, is_repeat=True)
            pending = PendingDecision(
                owner=reserved.owner, time=rfc3339(self._clock.now()), ledger_sequence=ledger.sequence + 1
            )
            step = transitions.release(
                ledger, op_id=op_id, owner=reserved.owner, decision_id=decision_id(ledger, op_id), pending=pending
            )
            if isinstance(step, Refusal):
                raise InvariantError(f"a reservation of {reserved.owner} is prepared: an adoption commits it first")
            return step

        step = await self._store.change(decide)
        if not step.is_repeat:
            self._announcer.wake()
            get_logger().warning("reservation.expired", owner=reserved.owner.key, op_id=op_id, after_s=self._expire_s)
