"""Reports to pods whether their claims are allocated: in the condition topobus.dev/Allocated, and
in events on the pod and on its claims that wait. Opens the gate of a pod whose claims are all
allocated.

The status is written only when it changes. An event has at most 300 characters, and names the
condition that has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims.gate import (
    ALLOCATED_CONDITION,
    has_allocated_condition,
    with_allocated_condition,
    without_gate,
)
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.outcome import Reason
from topobus.values.timestamps import in_whole_seconds

__all__ = ["ALLOCATED", "AllocatedCondition"]

_REST = f"condition {ALLOCATED_CONDITION} of the pod"
"""Where the rest of a cut event is found, in the event's own text."""
ALLOCATED = "its claims are allocated and reserved"
"""Message for a pod whose condition had a reason for waiting before."""


class AllocatedCondition:
    """Writes the condition and the events that go with it."""

    def __init__(self, clock: Clock, state: ApiServerState, store: ObjectStore, events: EventRecorder) -> None:
        self._clock = clock
        self._state = state
        self._store = store
        self._events = events
        self._log = get_logger()

    async def write(self, key: Key, pod: Stored, *, is_true: bool, reason: str, message: str) -> Stored | None:
        """Write the condition. None when it is there already, or another writer was first."""
        now = in_whole_seconds(self._clock.now())
        value = with_allocated_condition(pod.value, is_true=is_true, reason=reason, message=message, now=now)
        return await self._store.write(ObjectKey("pod", *key), pod.revision, value) if value is not pod.value else None

    async def open_gate(self, key: Key, pod: Stored) -> None:
        """Open a pod's gate. A condition with the reason why it waited is set to true first."""
        if (
            has_allocated_condition(pod.value)
            and await self.write(key, pod, is_true=True, reason="Allocated", message=ALLOCATED) is not None
        ):
            return
        if await self._store.write(ObjectKey("pod", *key), pod.revision, without_gate(pod.value)) is not None:
            self._log.info("gate.opened", pod=f"{key[0]}/{key[1]}")

    async def tell_refused(self, pod: Stored, why: str) -> None:
        """Report on a pod that the API server refuses a write for it. A person must repair that."""
        await self._events.warn(pod, "WriteRefused", why)

    async def tell_waiting(self, key: Key, pod: Stored, reason: str, reasons: Sequence[Reason]) -> Stored | None:
        """Report why a pod waits: in the condition, and in events on the pod and its claims, each
        once.

        Returns the pod as written, None where nothing was written.
        """
        message = "; ".join(each_reason.message for each_reason in reasons)
        self._log.info("pod.waiting", pod=f"{key[0]}/{key[1]}", reason=reason, why=message)
        written = await self.write(key, pod, is_true=False, reason=reason, message=message)
        await self._events.warn(pod, reason, message, more=_REST)
        for other_claim in self._state.claims_of(key):
            claim = self._state.claims.get(other_claim)
            if claim is not None and not claim.claim.is_allocated:
                await self._events.warn(claim, reason, message, more=_REST)
        return written
