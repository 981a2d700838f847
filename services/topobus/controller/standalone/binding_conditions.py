"""Handles binding conditions: deallocates devices whose binding failed or timed out, and names the
claims that a pod has to wait for.

The devices of a failed binding are excluded for a while, so that others are tried. A driver reports
conditions in the claim's status, so a restart loses only the exclusions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.binding import (
    BindingFailed,
    BindingState,
    BindingWaits,
    binding_state,
)
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = ["BindingConditions"]


class BindingConditions:
    """Checks allocated claims whose devices have binding conditions."""

    def __init__(
        self,
        timeout_s: float,
        runtime: Runtime,
        state: StandaloneState,
        allocator: Allocator,
        deallocation: ClaimDeallocation,
        queue: WorkQueue,
    ) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._clock = runtime.clock
        self._state = state
        self._allocator = allocator
        self._deallocation = deallocation

    async def reconcile_all(self) -> None:
        """Deallocate claims whose binding failed."""
        seen: set[ObjectKey] = set()
        for key, stored in self._state.claims() if self._state.taints.has_seen_binding else ():
            seen.add(key)
            await self._queue.run(key, stored.revision, partial(self._reconcile, key, stored), name=stored.shown)
        self._queue.keep(seen)

    async def _reconcile(self, key: ObjectKey, stored: Stored) -> Result:
        verdict = self._verdict_of(stored)
        if isinstance(verdict, BindingFailed) and not stored.metadata.deletion_timestamp:
            await self._give_back(key, stored, verdict)
        # It may time out.
        return Again() if isinstance(verdict, BindingWaits) else None

    def wait_for(self, keys: Iterable[ObjectKey]) -> Reason | None:
        """Name the claim that a pod has to wait for; None when all are ready."""
        for key in keys:
            stored = self._state.objects.get(key)
            verdict = self._verdict_of(stored) if stored is not None else None
            if isinstance(verdict, BindingWaits | BindingFailed):
                what = ", ".join(verdict.missing) if isinstance(verdict, BindingWaits) else verdict.why
                message = f"claim {key.namespace}/{key.name} waits for its devices: {what}"
                return Reason(code="waits-for-binding", message=message, facts={"claim": key.name, "conditions": what})
        return None

    def _verdict_of(self, stored: Stored) -> BindingState | None:
        if not stored.value.status.get("allocation") or stored.claim.deallocation:
            return None
        try:
            return binding_state(stored.claim.status, now=self._clock.now(), timeout_s=self._timeout_s)
        except ContractError:
            return None  # reported by the reconciler of claims

    async def _give_back(self, key: ObjectKey, stored: Stored, verdict: BindingFailed) -> None:
        allocation = stored.claim.status.allocation
        results = allocation.devices.results if allocation is not None else ()
        devices = [DeviceId.of(granted) for granted in results if granted.binding_conditions]
        self._allocator.refusals.add(key, devices, f"binding failed: {verdict.why}")
        await self._deallocation.begin(key, stored, f"binding failed: {verdict.why}")
