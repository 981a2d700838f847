"""Writes Kubernetes Events on pods and claims, deduplicated and rate-limited, for `kubectl describe`.

Flows in: an object, a reason, a message. Flows out: v1 Events. The same message within a short time is dropped; later it raises the count of the
existing Event. An object whose messages change too often has its Events limited by a token bucket. An Event that cannot be written is logged and
dropped, since no decision depends on it.
Source: client-go tools/record (EventCorrelator: 25 at once, then one in 5 minutes for each object).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from topobus.controller.claims.stored import Stored
from topobus.controller.store.api import (
    EVENTS,
    FIELD_MANAGER,
    Api,
    Rejected,
)
from topobus.domain.errors import TopobusError
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["EventRecorder"]

# What `kubectl describe` shows in three lines of a terminal; an API server takes 1,024 and refuses more. Whoever has more to say has it in a condition.
_MAX_MESSAGE = 300
_SAME_S = 300.0
_BURST = 25.0
_REFILL_S = 300.0
_MOST_KNOWN = 4096


@dataclass(frozen=True)
class _Written:
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
    """Writes Events."""

    def __init__(self, api: Api, clock: Clock, instance: str) -> None:
        self._api = api
        self._clock = clock
        self._instance = instance
        self._written: dict[tuple[str, str], _Written] = {}
        self._budgets: dict[str, _Budget] = {}

    async def warn(self, stored: Stored, reason: str, message: str, *, more: str = "") -> None:
        """Write a Warning Event on a pod, a claim or a node: 300 characters of the message at most.

        Shapes: more — where the rest stands, for a message that is cut: `its condition topobus.dev/Allocated`.
        """
        await self._write_event(stored, "Warning", reason, _shorten(message, more))

    async def _write_event(self, stored: Stored, kind: str, reason: str, shown: str) -> None:
        api_object, metadata = stored.value, stored.metadata
        now_s = self._clock.monotonic()
        before = self._written.get((metadata.uid, reason))
        if before is not None and before.message == shown and now_s - before.at_s < _SAME_S:
            return
        if not self._is_within_budget(metadata.uid, now_s):
            return
        if len(self._written) >= _MOST_KNOWN:
            self._written.clear()
            self._budgets.clear()
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        # Events of an object without a namespace stand in this one (client-go tools/record).
        namespace = metadata.namespace or "default"
        try:
            if before is not None and before.message == shown:
                again = replace(before, count=before.count + 1, at_s=now_s)
                self._written[metadata.uid, reason] = again
                patched = await self._api.patch(EVENTS, namespace, before.name, {"count": again.count, "lastTimestamp": now})
                if not isinstance(patched, Rejected):
                    return
            # The name follows from what is told: neither a repeated write nor another replica makes a second event.
            digest = hashlib.sha256(f"{metadata.uid}/{reason}/{shown}".encode()).hexdigest()[:16]
            name = f"{metadata.name[:200]}.{digest}"
            self._written[metadata.uid, reason] = _Written(shown, name, 1, now, now_s)
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

    def _is_within_budget(self, uid: str, now_s: float) -> bool:
        budget = self._budgets.get(uid, _Budget(_BURST, now_s))
        tokens = min(_BURST, budget.tokens + (now_s - budget.at_s) / _REFILL_S)
        self._budgets[uid] = _Budget(tokens - 1 if tokens >= 1 else tokens, now_s)
        return tokens >= 1


def _shorten(message: str, more: str) -> str:
    if len(message) <= _MAX_MESSAGE:
        return message
    tail = f" … (all of it: {more})" if more else " …"
    kept = message[: _MAX_MESSAGE - len(tail)]
    # Where a line has words it is cut between two of them.
    return (kept.rpartition(" ")[0] or kept) + tail
