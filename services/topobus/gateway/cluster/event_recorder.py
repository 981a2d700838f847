"""Writes few Kubernetes events about pods and claims: one for each different message, with its
repeats counted in it, and never more than an object's share.

No caller waits for an event. One that cannot be written is logged and dropped, because nothing
depends on it. The event's name is derived from its content, so that a gateway that is started again
creates no duplicate.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from topobus.gateway.cluster.rules.shortening import shortened
from topobus.kubernetes.answers import CONFLICT, NOT_FOUND
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock, is_set_within
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.request import Owner
from topobus.values.timestamps import in_whole_seconds

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["EventRecorder", "Involved", "claim_object", "pod_object"]

# An API server does not truncate longer messages, it refuses them (core/v1 event validation).
_MAX_MESSAGE = 1024
# Seconds between two updates of a repeated event's count. kubelet and client-go update it at each
# repeat, which is their most frequent write.
_COUNT_S = 60.0
# Different events for one object at once, and the seconds until it may have one more. client-go: 25
# and 300.
_BURST, _REFILL_S = 10, 60.0
# Events that wait to be written, in all. Beyond this number the newest is dropped, because the
# server is away.
_WAITING = 500
# Events that are remembered, in all. The oldest is forgotten, and a repeat of it would be written
# as a new event.
_REMEMBERED = 5000


class Involved(Struct, frozen=True, kw_only=True, rename="camel"):
    """The object that an event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class _Series:
    """One event, and how often it has occurred."""

    def __init__(self, now: str) -> None:
        self.name = ""
        self.count = 1
        self.written = 0
        self.first = now
        self.last = now
        self.due_s = 0.0
        """The clock's time from which on it may be written again."""


class _Share:
    """How many more events one object may have."""

    def __init__(self, now_s: float) -> None:
        self.left = float(_BURST)
        self.at_s = now_s


class EventRecorder:
    """Writes events of one node's pods and claims."""

    def __init__(self, cluster: KubernetesCluster, clock: Clock, node: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._node = node
        self._series: dict[tuple[Involved, str, str, bool], _Series] = {}
        self._waiting: dict[tuple[Involved, str, str, bool], None] = {}
        self._shares: dict[str, _Share] = {}
        self._trouble = ""
        self._changed = Broadcast()

    def note(self, involved: Involved, reason: str, message: str, *, is_warning: bool) -> None:
        """Queue an event about an object. A repeat is counted."""
        key = (involved, reason, shortened(message, _MAX_MESSAGE), is_warning)
        series = self._series.get(key)
        now = in_whole_seconds(self._clock.now())
        if series is not None:
            series.count += 1
            series.last = now
        elif len(self._waiting) >= _WAITING or not self._has_share(involved.uid):
            get_logger().debug("event.dropped", kind=involved.kind, name=involved.name, reason=reason)
            return
        else:
            while len(self._series) >= _REMEMBERED:
                del self._series[next(iter(self._series))]
            self._series[key] = _Series(now)
        self._waiting[key] = None
        self._changed.announce()

    async def run(self) -> None:
        """Write one event after the other until cancelled."""
        while True:
            ticket = self._changed.ticket()
            now_s = self._clock.monotonic()
            due_s = {key: self._series[key].due_s if key in self._series else now_s for key in self._waiting}
            key = min(due_s, key=lambda key: due_s[key], default=None)
            if key is None or due_s[key] > now_s:
                await is_set_within(ticket, self._clock.timeout(due_s[key] - now_s if key is not None else None))
                continue
            del self._waiting[key]
            series = self._series.get(key)
            if series is not None:
                series.due_s = now_s + _COUNT_S
                await self._write(key, series)

    def _has_share(self, uid: str) -> bool:
        now_s = self._clock.monotonic()
        if len(self._shares) >= _REMEMBERED:
            # An object without an event for this long has its whole share again.
            self._shares = {
                other: share for other, share in self._shares.items() if now_s - share.at_s < _BURST * _REFILL_S
            }
        share = self._shares.setdefault(uid, _Share(now_s))
        share.left = min(_BURST, share.left + (now_s - share.at_s) / _REFILL_S)
        share.at_s = now_s
        if share.left < 1:
            return False
        share.left -= 1
        return True

    async def _write(self, key: tuple[Involved, str, str, bool], series: _Series) -> None:
        involved, reason, _, _ = key
        try:
            trouble = await self._try_to_write(key, series)
        except TopobusError as err:
            trouble = str(err)
        except Exception as err:  # noqa: BLE001 - boundary: one event
            trouble = f"{type(err).__name__}: {err}"
        if trouble and trouble != self._trouble:
            get_logger().warning("event.untold", kind=involved.kind, name=involved.name, reason=reason, error=trouble)
        self._trouble = trouble

    async def _try_to_write(self, key: tuple[Involved, str, str, bool], series: _Series) -> str:
        """Create the event or update its count. Returns the error, empty when it is written."""
        involved = key[0]
        count = series.count
        if series.written:
            body = {"count": count, "lastTimestamp": series.last}
            rejected = await self._cluster.patch_event(involved.namespace, series.name, body)
            if rejected is None or rejected.code != NOT_FOUND:
                series.written = count
                return rejected.message if rejected is not None else ""
        event = self._event(key, series)
        series.name = event["metadata"]["name"]
        rejected = await self._cluster.create_event(involved.namespace, event)
        series.written = count
        # Conflict: it exists already, created by the previous process.
        return rejected.message if rejected is not None and rejected.code != CONFLICT else ""

    def _event(self, key: tuple[Involved, str, str, bool], series: _Series) -> dict[str, Any]:
        involved, reason, message, is_warning = key
        digest = hashlib.sha256(f"{involved.uid}/{reason}/{message}".encode()).hexdigest()[:16]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{involved.name[:200].rstrip('-.')}.{digest}", "namespace": involved.namespace},
            "involvedObject": msgspec.to_builtins(involved),
            "reason": reason,
            "message": message,
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": "topobus-gateway", "host": self._node},
            "reportingComponent": "topobus.dev/gateway",
            "reportingInstance": self._node,
            "firstTimestamp": series.first,
            "lastTimestamp": series.last,
            "count": series.count,
        }


def pod_object(namespace: str, name: str, uid: str) -> Involved:
    """Return the reference to a pod."""
    return Involved(api_version="v1", kind="Pod", namespace=namespace, name=name, uid=uid)


def claim_object(claim: Owner) -> Involved:
    """Return the reference to a claim."""
    return Involved(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        namespace=claim.namespace,
        name=claim.name,
        uid=claim.uid,
    )
