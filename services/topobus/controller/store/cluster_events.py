"""Writes Kubernetes Events on pods and claims, deduplicated, aggregated and rate-limited, for
`kubectl describe`.

The same message within a short time is dropped. Later it raises the count of the existing Event. An
object whose messages change too often has its Events limited by a token bucket. When many objects
of a namespace have the same reason, all but the first ones share one Event that counts them: a
cluster that is full must not write an Event for each of thousands of pods. An Event that cannot be
written is logged and dropped, since no decision depends on it.

Source: client-go tools/record (EventCorrelator: 25 at once, then one in 5 minutes for each object).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from topobus.controller.store.api import EVENTS, FIELD_MANAGER
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.engine.claims.stored import Stored
from topobus.kubernetes.answers import Rejected
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.timestamps import in_whole_seconds

__all__ = ["EventRecorder"]

# What `kubectl describe` shows in three lines of a terminal. An API server accepts 1,024 and
# refuses more. A condition has room for longer messages.
_MAX_MESSAGE = 300
_SAME_S = 300.0
_BURST = 25.0
_REFILL_S = 300.0
_MOST_KNOWN = 4096
# Objects of a namespace that get Events of their own for one reason: so many at once, then one more
# in so many seconds. The others are counted in one Event.
_ALIKE_BURST = 25.0
_ALIKE_REFILL_S = 1.0
_COUNTED_EVERY_S = 10.0


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


@dataclass(frozen=True)
class _Counted:
    """One Event for many objects."""

    namespace: str
    name: str
    count: int
    message: str
    at_s: float
    """When it was written last."""
    is_written: bool


class EventRecorder:
    """Writes Events."""

    def __init__(self, api: KubernetesApi, clock: Clock, instance: str) -> None:
        self._api = api
        self._clock = clock
        self._instance = instance
        self._written: dict[tuple[str, str], _Written] = {}
        self._budgets: dict[tuple[str, ...], _Budget] = {}
        self._counted: dict[tuple[str, str], _Counted] = {}
        """By namespace and reason."""

    async def warn(self, stored: Stored, reason: str, message: str, *, more: str = "") -> None:
        """Write a Warning Event on a pod, a claim or a node: 300 characters of the message at most.

        Shapes: more — where the rest of a cut message is found: `its condition
        topobus.dev/Allocated`.
        """
        await self._write_event(stored, "Warning", reason, _shorten(message, more))

    async def _write_event(self, stored: Stored, kind: str, reason: str, shown: str) -> None:
        metadata = stored.metadata
        now_s = self._clock.monotonic()
        before = self._written.get((metadata.uid, reason))
        if before is not None and before.message == shown and now_s - before.at_s < _SAME_S:
            return
        if not self._is_within_budget((metadata.uid,), _BURST, _REFILL_S, now_s):
            return
        if len(self._written) >= _MOST_KNOWN:
            self._written.clear()
            self._budgets.clear()
        # The namespace for Events of objects without one (client-go tools/record).
        namespace = metadata.namespace or "default"
        is_new = before is None or before.message != shown
        if is_new and not self._is_within_budget((namespace, reason), _ALIKE_BURST, _ALIKE_REFILL_S, now_s):
            await self._count_alike(stored, kind, reason, shown, namespace)
            return
        now = self._now()
        try:
            if before is not None and before.message == shown:
                again = replace(before, count=before.count + 1, at_s=now_s)
                self._written[metadata.uid, reason] = again
                patched = await self._api.patch(
                    EVENTS, namespace, before.name, {"count": again.count, "lastTimestamp": now}
                )
                if not isinstance(patched, Rejected):
                    return
            # The name is derived from the message: neither a repeated write nor another replica
            # creates a second Event.
            digest = hashlib.sha256(f"{metadata.uid}/{reason}/{shown}".encode()).hexdigest()[:16]
            name = f"{metadata.name[:200]}.{digest}"
            self._written[metadata.uid, reason] = _Written(shown, name, 1, now, now_s)
            made = await self._api.create(EVENTS, self._event(stored, kind, reason, shown, name, namespace))
            if isinstance(made, Rejected) and made.code != 409:
                get_logger().warning("event.refused", object=metadata.name, reason=reason, error=made.message)
        except TopobusError as err:
            get_logger().warning("event.untold", object=metadata.name, reason=reason, error=str(err))

    async def write_counts(self) -> float | None:
        """Write the counts of Events for many objects that are due.

        Returns after how many seconds the next is due, None when there is none.
        """
        waits: list[float] = []
        for place, counted in tuple(self._counted.items()):
            if counted.is_written:
                continue
            rest_s = counted.at_s + _COUNTED_EVERY_S - self._clock.monotonic()
            if rest_s > 0:
                waits.append(rest_s)
                continue
            self._counted[place] = replace(counted, at_s=self._clock.monotonic(), is_written=True)
            changes = {
                "count": counted.count,
                "message": _of_many(counted.count, counted.message),
                "lastTimestamp": self._now(),
            }
            try:
                if isinstance(await self._api.patch(EVENTS, counted.namespace, counted.name, changes), Rejected):
                    # A server keeps Events for an hour: the next object creates a new one.
                    self._counted.pop(place, None)
            except TopobusError as err:
                get_logger().warning("event.untold", object=counted.namespace, reason=place[1], error=str(err))
        return min(waits, default=None)

    async def _count_alike(self, stored: Stored, kind: str, reason: str, shown: str, namespace: str) -> None:
        """Count an object in the Event of its namespace and reason, which is on the first object
        that was counted.
        """
        place, name = (namespace, reason), stored.metadata.name
        message = f"{stored.value.kind} {name}: {shown}"
        counted = self._counted.get(place)
        if counted is not None:
            self._counted[place] = replace(counted, count=counted.count + 1, message=message, is_written=False)
            return
        event = f"{name[:200]}.{hashlib.sha256(f'{namespace}/{reason}/{stored.uid}'.encode()).hexdigest()[:16]}"
        self._counted[place] = _Counted(namespace, event, 1, message, self._clock.monotonic(), is_written=True)
        try:
            await self._api.create(EVENTS, self._event(stored, kind, reason, _of_many(1, message), event, namespace))
        except TopobusError as err:
            get_logger().warning("event.untold", object=name, reason=reason, error=str(err))

    def _event(self, stored: Stored, kind: str, reason: str, message: str, name: str, namespace: str) -> dict[str, Any]:
        """Make a new Event."""
        api_object, metadata, now = stored.value, stored.metadata, self._now()
        return {
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
            "message": message,
            "action": "Allocating",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance,
        }

    def _now(self) -> str:
        return in_whole_seconds(self._clock.now())

    def _is_within_budget(self, budget_key: tuple[str, ...], burst: float, refill_s: float, now_s: float) -> bool:
        budget = self._budgets.get(budget_key, _Budget(burst, now_s))
        tokens = min(burst, budget.tokens + (now_s - budget.at_s) / refill_s)
        self._budgets[budget_key] = _Budget(tokens - 1 if tokens >= 1 else tokens, now_s)
        return tokens >= 1


def _of_many(count: int, message: str) -> str:
    """Return how many objects an Event counts, with the message of the last one."""
    return _shorten(f"{count} more of this namespace, the last: {message}", "each pod's condition")


def _shorten(message: str, more: str) -> str:
    if len(message) <= _MAX_MESSAGE:
        return message
    tail = f" … (all of it: {more})" if more else " …"
    kept = message[: _MAX_MESSAGE - len(tail)]
    # Cut between two words where the line has words.
    return (kept.rpartition(" ")[0] or kept) + tail
