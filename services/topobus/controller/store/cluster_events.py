"""Events in the cluster: what a pod's or claim's user sees with `kubectl describe`, told once and not in a flood.

Flows in: an object, a reason, a message. Flows out: v1 Events; the same message again within a while is not written, later it raises the count of the one that is
there; an object that changes its story too often is told less. An event that cannot be written is logged and forgotten: the decision stands without it.
Source: client-go tools/record (EventCorrelator: 25 at once, then one in 5 minutes for each object).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from topobus.contracts.messages import ApiObject
from topobus.controller.store.api import (
    EVENTS,
    FIELD_MANAGER,
    Api,
    Rejected,
)
from topobus.domain.errors import TopobusError
from topobus.kubernetes.api.objects import metadata_of
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["EventRecorder"]

# An API server cuts nothing: longer messages are refused (core/v1 event validation).
_MAX_MESSAGE = 1024
_SAME_S = 300.0
_BURST = 25.0
_REFILL_S = 300.0
_MOST_KNOWN = 4096


@dataclass(frozen=True)
class _Told:
    message: str
    name: str
    count: int
    first: str
    at_s: float


@dataclass(frozen=True)
class _Budget:
    tokens: float
    at_s: float


class EventRecorder:
    """Tells events."""

    def __init__(self, api: Api, clock: Clock, instance: str) -> None:
        self._api = api
        self._clock = clock
        self._instance = instance
        self._told: dict[tuple[str, str], _Told] = {}
        self._budgets: dict[str, _Budget] = {}

    async def warn(self, api_object: ApiObject, reason: str, message: str) -> None:
        """Tell of trouble with a pod, a claim or a node."""
        await self._tell(api_object, "Warning", reason, message)

    async def _tell(self, api_object: ApiObject, kind: str, reason: str, message: str) -> None:
        metadata = metadata_of(api_object)
        shown = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"
        now_s = self._clock.monotonic()
        known = self._told.get((metadata.uid, reason))
        if known is not None and known.message == shown and now_s - known.at_s < _SAME_S:
            return
        if not self._may_tell(metadata.uid, now_s):
            return
        if len(self._told) >= _MOST_KNOWN:
            self._told.clear()
            self._budgets.clear()
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        # Events of an object without a namespace stand in this one (client-go tools/record).
        namespace = metadata.namespace or "default"
        try:
            if known is not None and known.message == shown:
                again = replace(known, count=known.count + 1, at_s=now_s)
                self._told[metadata.uid, reason] = again
                patched = await self._api.patch(EVENTS, namespace, known.name, {"count": again.count, "lastTimestamp": now})
                if not isinstance(patched, Rejected):
                    return
            # The name follows from what is told: neither a repeated write nor another replica makes a second event.
            digest = hashlib.sha256(f"{metadata.uid}/{reason}/{shown}".encode()).hexdigest()[:16]
            name = f"{metadata.name[:200]}.{digest}"
            self._told[metadata.uid, reason] = _Told(shown, name, 1, now, now_s)
            made = await self._api.create(
                EVENTS,
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": name, "namespace": namespace},
                    "involvedObject": {
                        "apiVersion": api_object.api_version,
                        "kind": api_object.kind,
                        "namespace": metadata.namespace,
                        "name": metadata.name,
                        "uid": metadata.uid,
                        "resourceVersion": str(api_object.metadata.get("resourceVersion") or ""),
                    },
                    "type": kind,
                    "reason": reason,
                    "message": shown,
                    "action": "Allocating",
                    "count": 1,
                    "firstTimestamp": now,
                    "lastTimestamp": now,
                    "source": {"component": FIELD_MANAGER},
                    "reportingComponent": FIELD_MANAGER,
                    "reportingInstance": self._instance,
                },
            )
            if isinstance(made, Rejected) and made.code != 409:
                get_logger().warning("event.refused", object=metadata.name, reason=reason, error=made.message)
        except TopobusError as err:
            get_logger().warning("event.untold", object=metadata.name, reason=reason, error=str(err))

    def _may_tell(self, uid: str, now_s: float) -> bool:
        budget = self._budgets.get(uid, _Budget(_BURST, now_s))
        tokens = min(_BURST, budget.tokens + (now_s - budget.at_s) / _REFILL_S)
        self._budgets[uid] = _Budget(tokens - 1 if tokens >= 1 else tokens, now_s)
        return tokens >= 1
