"""Tells why a gated pod waits, and sets a pod aside that nobody can work with.

Flows in: a pod, a reason's code and its words. Flows out: the condition and Events of `AllocatedCondition`, which are no reason to look at the pod again. It decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

from topobus.controller.cluster.allocated_condition import AllocatedCondition
from topobus.controller.cluster.gated_pod_queue import GatedPodQueue
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.engine.claims.stored import Stored
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = ["WaitingPods"]


class WaitingPods:
    """Tells pods why they wait."""

    def __init__(self, state: ApiServerState, condition: AllocatedCondition, metrics: ControllerMetrics, queue: GatedPodQueue) -> None:
        self._state = state
        self._condition = condition
        self._metrics = metrics
        self._queue = queue
        self._log = get_logger()

    async def report(self, key: Key, pod: Stored, reason: str, reasons: tuple[Reason, ...]) -> None:
        """Tell why a pod waits.

        Errors: raises PeerUnavailable.
        """
        written = await self._condition.tell_waiting(key, pod, reason, reasons)
        if written is not None and pod.uid in self._queue.seen:
            # Only our own write is no news; what came meanwhile is.
            self._queue.seen[pod.uid] = replace(self._queue.seen[pod.uid], pod=written.revision)

    async def set_aside(self, key: Key, err: Exception) -> None:
        """Set a pod aside until something about it changes, and tell it why; one that cannot even be told is only logged.

        Errors: raises PeerUnavailable.
        """
        name = f"{key[0]}/{key[1]}"
        if isinstance(err, ContractError):
            message = str(err)
            self._log.warning("pod.set-aside", pod=name, error=message)
        else:
            message = f"the controller cannot work with pod {name} and its claims ({type(err).__name__}: {err}); it is set aside until one of them changes"
            self._log.error("pod.set-aside", pod=name, error=message, exc_info=err)
        self._metrics.malformed.inc()
        self._metrics.set_aside.labels("gated-pods").inc()
        pod = self._state.pods.get(key)
        if pod is None:
            return
        self._queue.seen[pod.uid] = self._queue.versions_of(key)
        try:
            await self.report(key, pod, "Malformed", (Reason(code="malformed", message=message),))
        except ContractError as untold:
            # What the server keeps of it cannot be read: the next version of it is looked at again.
            self._log.warning("pod.untold", pod=name, error=str(untold))
