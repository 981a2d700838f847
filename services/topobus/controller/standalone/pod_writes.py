"""Writes the decisions on a pod into the pod: its finalizer, its node, or why it waits.

All are compare-and-set writes. Each new reason is also published as a decision event.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims.lifecycle import with_finalizer
from topobus.engine.claims.reservations import with_node, with_pod_condition, with_retreat
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import PLACEMENT_PROTECTION
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.timestamps import rfc3339

__all__ = ["PodWrites"]


class PodWrites:
    """Writes pods that are being scheduled."""

    def __init__(
        self, clock: Clock, store: ObjectStore, decisions: DecisionPublisher, metrics: ControllerMetrics
    ) -> None:
        self._clock = clock
        self._store = store
        self._decisions = decisions
        self._metrics = metrics
        self._log = get_logger()

    async def protect(self, key: ObjectKey, stored: Stored) -> Stored | None:
        """Write the finalizer. None when another writer was first."""
        protected = with_finalizer(stored.value, PLACEMENT_PROTECTION)
        return stored if protected is stored.value else await self._store.write(key, stored.revision, protected)

    async def retreat(self, key: ObjectKey, stored: Stored) -> Stored | None:
        """Mark the pod, so that no other replica binds it to a claim that is about to be taken from
        it.

        None when another writer has bound or changed the pod.
        """
        return await self._store.write(key, stored.revision, with_retreat(stored.value))

    async def bind(self, key: ObjectKey, stored: Stored, node: str) -> None:
        """Write the pod's node."""
        if await self._store.write(key, stored.revision, with_node(stored.value, node, now=self._now())) is not None:
            self._metrics.pods.labels("scheduled").inc()
            self._log.info("pod.scheduled", pod=stored.shown, node=node)

    async def report(self, key: ObjectKey, stored: Stored, reason: str, reasons: Sequence[Reason]) -> Stored:
        """Put the reasons for which a pod waits into its condition and into an event, once.

        Returns the pod with them, or as it was when another writer was first.
        """
        message = "; ".join(each_reason.message for each_reason in reasons)
        api_object = with_pod_condition(stored.value, is_true=False, reason=reason, message=message, now=self._now())
        if api_object is stored.value:
            return stored
        written = await self._store.write(key, stored.revision, api_object)
        if written is None:
            return stored
        self._metrics.pods.labels("waiting").inc()
        self._log.info("pod.waiting", pod=stored.shown, reason=reason, why=message)
        metadata = stored.metadata
        op_id = f"schedule-{metadata.uid}-{written.revision}"
        owner = Owner(kind=OwnerKind.POD, namespace=key.namespace, name=key.name, uid=metadata.uid)
        await self._decisions.publish("schedule", owner, Refusal(reasons=tuple(reasons)), op_id=op_id)
        return written

    def _now(self) -> str:
        return rfc3339(self._clock.now())
