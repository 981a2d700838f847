"""Follows the pods of this node that have claims: reserves devices for those that wait, and makes
kubelet retry as soon as the obstacle is gone.

It withholds devices from the device plugins, annotates pods, creates events on pod and claim (also
when a device fails), and evicts pods where the settings allow it. The annotation matters because
kubelet retries a failed preparation only after 60 to 90 s, but processes a pod at once when its
annotations change. A field selector restricts the watch to pods bound to this node, so that a
thousand gateways do not read all claims. Without the API server, or without the right, nothing is
reserved or annotated. Everything else continues.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import structs

from topobus.gateway.claims.attempts import Attempts
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.cluster.device_health import DeviceHealthReports
from topobus.gateway.cluster.objects import CLAIMS, PODS, ClusterChangeKind, Rejected
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.rules.device_faults import lost_claim
from topobus.gateway.cluster.rules.waiting import (
    NodePod,
    PodWait,
    WaitingClaim,
    due_at,
    in_the_way,
    obstacle_of,
    pod_of,
    waiting_claim,
    withheld_devices,
)
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.kubernetes.answers import CONFLICT, NOT_FOUND
from topobus.process.broadcast import Broadcast, first_of
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.work_queue import Again, WorkQueue
from topobus.values.errors import TopobusError
from topobus.values.names import PodUid
from topobus.values.request import Owner
from topobus.values.timestamps import rfc3339

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["ANNOTATION", "PodRetries"]

ANNOTATION = "topobus.dev/prepare-again"
"""Annotation on a pod: when kubelet was last made to process it again. Its value is never read,
because the change itself triggers kubelet."""

# Seconds between two changes of pods: after a service comes back, a hundred pods may have been
# waiting.
_BETWEEN_S = 0.05
# Seconds between two requests for the eviction of one pod. A disruption budget may refuse it for
# long.
_EVICT_AGAIN_S = 10.0
# Seconds between two checks, while a pod waits, of conditions without an event: an API server that
# did not answer, a try that becomes due.
_LOOK_S = 0.5
# Seconds before a claim is read again that had no allocation when its pod was bound, or did not
# exist: the pod was bound without waiting for it.
_READ_AGAIN_S = 10.0
# Seconds that a starting gateway waits for the list of pods before it reports device health to
# claims alone. It may lack the right to list pods.
_PODS_S = 10.0
# Calls that can fail for reasons that concern no single pod.
_COMMON_CALLS = frozenset({"claims", "annotate", "evict"})


class PodRetries:
    """Follows the pods of one node."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        state: NodeState,
        attempts: Attempts,
        checkpoint: Checkpoint,
        settings: ClusterSettings,
        clock: Clock,
        events: PodEvents,
        health: DeviceHealthReports,
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._attempts = attempts
        self._checkpoint = checkpoint
        self._settings = settings
        self._clock = clock
        self._events = events
        self._health = health
        self._changed = Broadcast()
        self._pods: dict[PodUid, NodePod] = {}
        self._has_seen_pods = False
        self._since_s = clock.monotonic()
        self._claims: dict[tuple[str, str], WaitingClaim | None] = {}
        """Claims of pods as they were read; absent: to be read."""
        self._parts: dict[str, tuple[str, ...]] = {}
        """The node's shapes with which `_claims` were read."""
        self._unallocated = WorkQueue("unallocated-claims", clock, _READ_AGAIN_S)
        """Claims that were read without an allocation: they change yet, and are read again."""
        self._waits: dict[PodUid, PodWait] = {}
        self._obstacles: dict[PodUid, str] = {}
        self._blocked_since: dict[PodUid, float] = {}
        self._sick_since: dict[PodUid, float] = {}
        """Pods with an unhealthy device, and the clock's time when it was first seen."""
        self._evicted_at: dict[PodUid, float] = {}
        self._failed_calls: dict[str, str] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_pods())
            sources = (self._changed, self._state.changed, self._state.ledger_changed, self._attempts.changed)
            while True:
                tickets = [source.ticket() for source in sources]
                await self._read_claims()
                self._withhold()
                is_waiting = await self._check_pods()
                is_waiting = await self._check_health() or is_waiting
                await first_of(tickets, _LOOK_S if is_waiting else None)

    async def _follow_pods(self) -> None:
        async with aclosing(self._cluster.watch(PODS, fields=f"spec.nodeName={self._state.node}")) as changes:
            async for change in changes:
                if change.kind is ClusterChangeKind.SNAPSHOT:
                    self._pods = {pod.uid: pod for pod in map(pod_of, change.objects) if pod is not None}
                    self._has_seen_pods = True
                    self._claims.clear()
                else:
                    uid = PodUid(str(change.object.metadata.get("uid", "")))
                    pod = pod_of(change.object) if change.kind is ClusterChangeKind.PUT else None
                    if pod == self._pods.get(uid):
                        # Most changes only concern parts of the status that do not matter here.
                        continue
                    if pod is None:
                        self._pods.pop(uid, None)
                    else:
                        self._pods[uid] = pod
                self._drop_gone_pods()
                self._changed.announce()

    def _drop_gone_pods(self) -> None:
        """Drop what belongs to pods that are gone."""
        wanted = {(pod.namespace, name) for pod in self._pods.values() for name in pod.claims}
        self._claims = {key: claim for key, claim in self._claims.items() if key in wanted}
        self._unallocated.keep(wanted)
        for by_uid in (self._waits, self._obstacles, self._blocked_since, self._sick_since, self._evicted_at):
            for uid in by_uid.keys() - self._pods.keys():
                del by_uid[uid]
        self._failed_calls = {
            what: why for what, why in self._failed_calls.items() if what in _COMMON_CALLS or what in self._pods
        }
        self._attempts.keep({claim.uid for claim in self._claims.values() if claim is not None})
        self._events.keep({*self._pods, *(claim.uid for claim in self._claims.values() if claim is not None)})

    async def _read_claims(self) -> None:
        """Read the claims that are not known yet.

        A claim that was allocated before its pod was bound does not change any more, and its shapes
        only with the devices of the machine.
        """
        shapes = self._state.shapes()
        if (parts := shapes.parts) != self._parts:
            self._parts = parts
            self._claims.clear()
        for pod in tuple(self._pods.values()):
            for name in pod.claims:
                key = (pod.namespace, name)
                if key in self._claims and not self._unallocated.is_due(key):
                    continue
                try:
                    api_object = await self._cluster.get(CLAIMS, name, pod.namespace)
                except TopobusError as err:
                    self._log_failure("claims", str(err))
                    return
                self._claims[key] = waiting_claim(api_object, self._state.node, self._parts, shapes.cpus)
                is_allocated = api_object is not None and api_object.status.get("allocation")
                self._unallocated.put(key, None if is_allocated else Again())
        self._failed_calls.pop("claims", None)

    def _withhold(self) -> None:
        self._state.withhold(
            withheld_devices(
                claim for claim in self._claims.values() if claim is not None and not self._is_prepared(claim)
            )
        )

    def _is_prepared(self, claim: WaitingClaim) -> bool:
        return all(self._checkpoint.ready(claim.uid, device_class) is not None for device_class in claim.classes)

    def _waiting_claims(self, pod: NodePod) -> tuple[WaitingClaim, ...]:
        waiting_claims = (self._claims.get((pod.namespace, name)) for name in pod.claims)
        return tuple(claim for claim in waiting_claims if claim is not None and not self._is_prepared(claim))

    async def _check_pods(self) -> bool:
        """Look at each pod once; True: one waits."""
        is_waiting = self._unallocated.wait_s() is not None or any(
            (pod.namespace, name) not in self._claims for pod in self._pods.values() for name in pod.claims
        )
        awaited: set[str] = set()
        for pod in tuple(self._pods.values()):
            claims = self._waiting_claims(pod)
            if not claims:
                for by_uid in (self._waits, self._obstacles, self._blocked_since):
                    by_uid.pop(pod.uid, None)
                continue
            is_waiting = True
            awaited |= {
                holder.key for claim in claims for holder in in_the_way(claim, self._holders_of(claim)).values()
            }
            try:
                await self._check_pod(pod, claims)
            except Exception as err:  # noqa: BLE001 - boundary: one pod, the node's other pods are checked
                self._log_failure(pod.uid, f"pod {pod.namespace}/{pod.name}: {type(err).__name__}: {err}")
        self._state.wait_for(frozenset(awaited))
        return is_waiting

    async def _check_pod(self, pod: NodePod, claims: Iterable[WaitingClaim]) -> None:
        now_s = self._clock.monotonic()
        wait = self._waits.setdefault(pod.uid, PodWait(since_s=now_s))
        failures = [failure for claim in claims if (failure := self._attempts.failure(claim.uid)) is not None]
        for claim in claims:
            failure = self._attempts.failure(claim.uid)
            if failure is not None:
                self._events.not_prepared(pod, claim.owner, failure, self._users_of(claim))
        obstacle = next((text for claim in claims if (text := self._obstacle_of(claim))), "")
        if not obstacle and self._obstacles.get(pod.uid):
            # The obstacle is gone: the next try counts as the first one. It comes at once if
            # kubelet had asked another gateway before.
            wait = structs.replace(wait, nudged_s=None, tries=0, since_s=-math.inf)
        self._obstacles[pod.uid] = obstacle
        if obstacle:
            self._blocked_since.setdefault(pod.uid, now_s)
        else:
            self._blocked_since.pop(pod.uid, None)
        wait = structs.replace(wait, failed_s=max((failure.at_s for failure in failures), default=None))
        is_trying = any(self._attempts.is_running(claim.uid) for claim in claims)
        if self._settings.retries_pods and not obstacle and not is_trying and now_s >= due_at(wait):
            wait = structs.replace(wait, nudged_s=now_s, tries=wait.tries + 1)
            await self._annotate(pod)
        self._waits[pod.uid] = wait
        if obstacle and failures:
            await self._evict(pod, obstacle, self._blocked_since[pod.uid], now_s)

    async def _check_health(self) -> bool:
        """Report unhealthy devices, and evict pods that lose a device and that the cluster does not
        evict.

        True: a pod is to be evicted later.
        """
        now_s = self._clock.monotonic()
        if not self._has_seen_pods and now_s - self._since_s < _PODS_S:
            # A change of a claim's health is reported to its pods together with it, so wait for the
            # pods.
            return True
        sick_claims = self._health.tell(tuple(self._pods.values()))
        whys = {uid: why for uid, pod in self._pods.items() if (why := lost_claim(pod, sick_claims))}
        self._sick_since = {uid: self._sick_since.get(uid, now_s) for uid in whys}
        for uid, why in whys.items():
            if uid in self._pods:
                await self._evict(self._pods[uid], why, self._sick_since[uid], now_s)
        return bool(whys) and self._settings.evict_after_s > 0

    def _obstacle_of(self, claim: WaitingClaim) -> str:
        return obstacle_of(
            claim,
            holders=self._holders_of(claim),
            inventories=self._state.inventories(),
            silent=self._state.silent,
            is_connected=self._state.is_connected,
        )

    def _holders_of(self, claim: WaitingClaim) -> dict[str, dict[str, Owner]]:
        return {device_class: self._whole_holders(claim, device_class) for device_class in claim.held}

    def _whole_holders(self, claim: WaitingClaim, device_class: str) -> dict[str, Owner]:
        """Return the holders that block a claim. Holders of a share do not block a share."""
        beside = set(claim.by_share.get(device_class, ())) & self._state.sharers(device_class).keys()
        return {name: owner for name, owner in self._state.holders(device_class).items() if name not in beside}

    def _users_of(self, claim: WaitingClaim) -> dict[str, Owner]:
        """Find the pods whose device plugin allocations block a claim, by device."""
        ledger = self._state.ledger
        allocations = ledger.allocations if ledger is not None else {}
        found_allocations = {
            name: allocations.get(holder.key) for name, holder in in_the_way(claim, self._holders_of(claim)).items()
        }
        return {
            name: allocation.user
            for name, allocation in found_allocations.items()
            if allocation is not None and allocation.user is not None
        }

    async def _annotate(self, pod: NodePod) -> None:
        """Make kubelet process a pod."""
        try:
            annotations = {ANNOTATION: rfc3339(self._clock.now())}
            rejected = await self._cluster.annotate(PODS, pod.name, pod.namespace, uid=pod.uid, annotations=annotations)
        except TopobusError as err:
            self._log_failure(pod.uid, str(err))
            return
        if self._is_refused(pod, "annotate", rejected):
            return
        get_logger().info("pod.retried", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid)
        await self._clock.sleep(_BETWEEN_S)

    async def _evict(self, pod: NodePod, why: str, since_s: float, now_s: float) -> None:
        """Evict a pod that has waited long enough for a device, if a controller recreates it."""
        after_s = self._settings.evict_after_s
        if not after_s or not pod.has_controller or now_s - since_s < after_s:
            return
        if now_s - self._evicted_at.get(pod.uid, -_EVICT_AGAIN_S) < _EVICT_AGAIN_S:
            return
        self._evicted_at[pod.uid] = now_s
        try:
            rejected = await self._cluster.evict(pod.name, pod.namespace, uid=pod.uid)
        except TopobusError as err:
            self._log_failure(pod.uid, str(err))
            return
        if not self._is_refused(pod, "evict", rejected):
            get_logger().warning("pod.evicted", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid, why=why)

    def _is_refused(self, pod: NodePod, what: str, rejected: Rejected | None) -> bool:
        # A pod that is gone or was replaced is no failure.
        if rejected is not None and rejected.code not in (NOT_FOUND, CONFLICT):
            self._log_failure(what, f"{what} pod {pod.namespace}/{pod.name}: {rejected.message}")
        elif rejected is None:
            self._failed_calls.pop(what, None)
        return rejected is not None

    def _log_failure(self, what: str, why: str) -> None:
        """Log a failing call once. It is tried again."""
        if self._failed_calls.get(what) != why:
            self._failed_calls[what] = why
            get_logger().warning(
                "pods.retry-failed", what=what, error=why, next_step="check the gateway's rights in the cluster"
            )
