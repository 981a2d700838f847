"""Binding conditions: gives back devices whose binding failed or took too long, and says of which claims a pod has to wait.

Flows in: allocated claims. Flows out: claims marked to be taken back, their devices refused for a while so that others are tried. A driver's word stands in the
claim's status; nothing here is remembered that a restart would lose, but for the refusals.
"""

from __future__ import annotations

from functools import partial

from topobus.controller.allocation.values import DeviceId
from topobus.controller.claims.binding import (
    BindingFailed,
    BindingState,
    BindingWaits,
    binding_state,
)
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.reconcilers.allocator import Allocator
from topobus.controller.reconcilers.deallocate_claims import ClaimDeallocation
from topobus.controller.reconcilers.object_boundary import ObjectBoundary
from topobus.controller.state.standalone_state import StandaloneState
from topobus.domain.errors import ContractError
from topobus.domain.outcome import Reason
from topobus.runtime.service import Runtime

__all__ = ["BindingConditions"]


class BindingConditions:
    """Looks at allocated claims whose devices have binding conditions."""

    def __init__(
        self,
        timeout_s: float,
        runtime: Runtime,
        world: StandaloneState,
        finder: Allocator,
        deallocation: ClaimDeallocation,
        boundary: ObjectBoundary | None = None,
    ) -> None:
        self._boundary = boundary or ObjectBoundary("binding")
        self._timeout_s = timeout_s
        self._clock = runtime.clock
        self._world = world
        self._finder = finder
        self._deallocation = deallocation

    async def reconcile_all(self) -> bool:
        """Give back what failed; True says that some claim waits, whose time may run out."""
        is_due = False
        seen: list[ObjectKey] = []
        for key, stored in self._world.claims() if self._world.taints.has_seen_binding else ():
            seen.append(key)
            is_due = await self._boundary.run(key, stored.revision, partial(self._reconcile, key, stored), name=stored.shown) or is_due
        self._boundary.keep(seen)
        return is_due

    async def _reconcile(self, key: ObjectKey, stored: Stored) -> bool:
        state = self._state(stored)
        if isinstance(state, BindingFailed) and not stored.metadata.deletion_timestamp:
            await self._give_back(key, stored, state)
        return isinstance(state, BindingWaits)

    def wait_for(self, keys: tuple[ObjectKey, ...]) -> Reason | None:
        """Say for which claim a pod has to wait; None when all are ready."""
        for key in keys:
            stored = self._world.objects.get(key)
            state = self._state(stored) if stored is not None else None
            if isinstance(state, BindingWaits | BindingFailed):
                what = ", ".join(state.missing) if isinstance(state, BindingWaits) else state.why
                message = f"claim {key.namespace}/{key.name} waits for its devices: {what}"
                return Reason(code="waits-for-binding", message=message, facts={"claim": key.name, "conditions": what})
        return None

    def _state(self, stored: Stored) -> BindingState | None:
        if not stored.value.status.get("allocation") or stored.claim.deallocation:
            return None
        try:
            return binding_state(stored.claim.status, now=self._clock.now(), timeout_s=self._timeout_s)
        except ContractError:
            return None  # told so by the reconciler of claims

    async def _give_back(self, key: ObjectKey, stored: Stored, state: BindingFailed) -> None:
        allocation = stored.claim.status.allocation
        results = allocation.devices.results if allocation is not None else ()
        devices = [
            DeviceId(granted_device.driver, granted_device.pool, granted_device.device)
            for granted_device in results
            if granted_device.binding_conditions
        ]
        self._finder.refusals.remember(key, devices, f"binding failed: {state.why}", now_s=self._clock.monotonic())
        await self._deallocation.begin(key, stored, f"binding failed: {state.why}")
