"""Taking an allocation back: when kube-scheduler cannot place the pod where its devices are, and when a device was given to two claims at one moment.

kube-scheduler binds a pod whose claims are reserved without writing to them, so a binding may be under way while we look. Hence two stages: first the reservation
goes, so that any later scheduling must write to the claim and one of us two loses by the resource version; then, after `settle_s`, the pod is read, and the devices
go only while it has no node. A pod that was bound meanwhile gets its reservation back, and one that was bound later still gets devices on that node. What was begun and left by a crash is found in this very state.
A pod behind its gate has no scheduler at work: its allocation is taken back at once.

Flows in: the copy of the cluster. Flows out: status writes; the reconciler of gated pods then allocates elsewhere. An allocation that kube-scheduler made is never touched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.values import DeviceId
from topobus.controller.claims import gated_claims
from topobus.controller.claims.gate import has_gate, is_over, version_of
from topobus.controller.claims.gated_claims import GateAttempt
from topobus.controller.claims.reservations import pod_ref
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.deallocate_claims import ClusterDeallocation
from topobus.controller.reconcilers.object_boundary import ObjectBoundary
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.store.api import PODS
from topobus.controller.store.api_server_store import ApiServerWriter
from topobus.controller.store.cluster_events import EventRecorder
from topobus.domain.outcome import Reason
from topobus.kubernetes.api.objects import metadata_of, name_of
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["UnschedulablePods"]


@dataclass(frozen=True)
class _Mine:
    """A claim that we allocated for a pod."""

    key: Key
    claim: ApiObject
    note: GateAttempt
    users: frozenset[str]


class UnschedulablePods:
    """Looks at pods that have their devices and no node."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        world: ApiServerState,
        writer: ApiServerWriter,
        deallocation: ClusterDeallocation,
        events: EventRecorder,
        metrics: ControllerMetrics,
    ) -> None:
        self._settings = settings.cluster
        self._clock = clock
        self._world = world
        self._writer = writer
        self._deallocation = deallocation
        self._events = events
        self._metrics = metrics
        self._since: dict[tuple[str, str, int], float] = {}
        self._boundary = ObjectBoundary("deallocation", metrics.set_aside)
        self._log = get_logger()

    async def reconcile_all(self) -> float | None:
        """Look at every pod; gives after how many seconds another look is due, None when nothing waits for time."""
        doubles = self._yielding()
        waits: list[float] = []
        seen: set[tuple[str, str, int]] = set()
        looked_at: set[Hashable] = set()
        for key in sorted(self._world.book.placeless()):
            pod = self._world.pods.get(key)
            if pod is None:
                continue
            looked_at.add(("pod", key))
            is_due = await self._boundary.run(
                ("pod", key),
                self._versions(key, pod.value),
                partial(self._look_at_pod, key, pod.value, doubles, seen, waits),
                name=pod.shown,
                report=partial(self._report, pod.value),
            )
            if is_due:
                waits.append(self._settings.retry_s)
        self._since = {key: since for key, since in self._since.items() if key in seen}
        await self._tell_doubles(looked_at)
        for key, before in tuple(self._world.let_go.items()):
            looked_at.add(("let-go", key))
            version = (version_of(before), self._world.is_taken_back(key))
            if await self._boundary.run(("let-go", key), version, partial(self._deallocation.release, key, before), name=name_of(before)):
                waits.append(self._settings.retry_s)
        self._boundary.keep(looked_at)
        return min(waits, default=None)

    def _versions(self, key: Key, pod: ApiObject) -> Hashable:
        """Tell states of a pod and its claims apart."""
        claims = [self._world.claims.get(claim_key) for claim_key in self._world.claims_of(key)]
        return version_of(pod), tuple(version_of(claim) for claim in claims if claim is not None)

    async def _report(self, pod: ApiObject, reason: Reason) -> None:
        await self._events.warn(pod, "Malformed", reason.message)

    async def _look_at_pod(
        self, key: Key, pod: ApiObject, doubles: frozenset[Key], seen: set[tuple[str, str, int]], waits: list[float]
    ) -> bool:
        """Look at one pod that has its devices and no node, or that has not reserved them; adds to `waits` after how long another look is due."""
        mine = self._allocated_for(key, pod)
        if not mine or is_over(pod):
            return False
        if pod.spec.get("nodeName"):
            await self._reserve_again(pod, [claim for claim in mine if metadata_of(pod).uid not in claim.users])
            return False
        wait_s = await self._look(key, pod, mine, seen, is_double=bool(doubles & {claim.key for claim in mine}))
        if wait_s is not None:
            waits.append(wait_s)
        return False

    async def _look(self, key: Key, pod: ApiObject, mine: list[_Mine], seen: set[tuple[str, str, int]], *, is_double: bool) -> float | None:
        """Bring one pod's taking back further; gives how long to wait for the next step."""
        uid = metadata_of(pod).uid
        number = max(owned.note.number for owned in mine)
        ours = [owned for owned in mine if owned.users <= {uid}]
        if has_gate(pod):
            if is_double and len(ours) == len(mine):
                await self._deallocate(pod, mine, "a device was given to another claim as well")
            return None
        if not ours:
            return None  # other pods use them, too: they stay
        left = [owned for owned in ours if not owned.users]
        if left:
            return await self._second(key, pod, left, self._waited("left", uid, number, seen))
        if is_double:
            await self._first(pod, ours, "a device was given to another claim as well")
            return self._settings.settle_s
        if not _is_unschedulable(pod):
            return None
        rest_s = self._settings.unschedulable_s - self._waited("unschedulable", uid, number, seen)
        if rest_s > 0:
            return rest_s
        await self._first(pod, ours, f"kube-scheduler could not place the pod for {self._settings.unschedulable_s:g} s: {_why(pod)}")
        return self._settings.settle_s

    def _waited(self, what: str, uid: str, number: int, seen: set[tuple[str, str, int]]) -> float:
        """Say for how long this has been so, as far as we have watched: a replica that has just started waits the whole time again."""
        key = (what, uid, number)
        seen.add(key)
        now_s = self._clock.monotonic()
        return now_s - self._since.setdefault(key, now_s)

    async def _first(self, pod: ApiObject, ours: list[_Mine], why: str) -> None:
        """Take the reservations off."""
        uid = metadata_of(pod).uid
        self._log.info("claim.unreserved", pod=name_of(pod), claims=[owned.key[1] for owned in ours], why=why)
        for owned in ours:
            await self._writer.claim(owned.key, gated_claims.unreservation_patch(owned.claim, frozenset({uid})), part="status")
        await self._events.warn(pod, "AllocationTakenBack", f"its devices are taken back, to be allocated elsewhere: {why}")

    async def _second(self, key: Key, pod: ApiObject, left: list[_Mine], waited_s: float) -> float | None:
        """Take the devices back, or the reservation if the pod was bound after all."""
        rest_s = self._settings.settle_s - waited_s
        if rest_s > 0:
            return rest_s
        now = await self._writer.refresh(PODS, key)
        if now is not None and metadata_of(now).uid == metadata_of(pod).uid and now.spec.get("nodeName"):
            await self._reserve_again(now, left)
            return None
        await self._deallocate(pod, left, "the pod has no node")
        return None

    async def _reserve_again(self, pod: ApiObject, left: list[_Mine]) -> None:
        """Give a bound pod its reservations back: a binding that was under way when they went has won."""
        for owned in left:
            self._log.info("claim.reserved-again", claim=name_of(owned.claim), pod=name_of(pod), node=pod.spec.get("nodeName"))
            patch = gated_claims.reservation_patch(owned.claim, pod_ref(pod))
            if isinstance(patch, Reason):
                await self._events.warn(pod, "ClaimFull", patch.message)
                continue
            await self._writer.claim(owned.key, patch, part="status")

    async def _deallocate(self, pod: ApiObject, ours: list[_Mine], why: str) -> None:
        for owned in ours:
            await self._deallocation.deallocate(owned.key, owned.claim, f"{name_of(pod)}: {why}")

    def _allocated_for(self, key: Key, pod: ApiObject) -> list[_Mine]:
        """List the claims of a pod that we allocated for it."""
        uid = metadata_of(pod).uid
        found = [self._mine(claim) for claim in self._world.claims_of(key)]
        return [owned for owned in found if owned is not None and owned.note.pod == uid]

    def _mine(self, key: Key) -> _Mine | None:
        """Read a claim as one that we allocated; None when it is not."""
        claim, note, users = self._world.claims.get(key), self._world.book.note(key), self._world.book.users_of_ours(key)
        if claim is None or note is None or users is None or claim.metadata.get("deletionTimestamp"):
            return None
        return _Mine(key, claim, note, users)

    def _yielding(self) -> frozenset[Key]:
        """Of each device that two claims have, name the claims that give way: ours to another's, and of two of ours the later one."""
        found: set[Key] = set()
        for _, keys in self._world.doubles():
            mine = {key: claim for key in keys if (claim := self._mine(key)) is not None}
            if len(mine) == len(keys):
                first = min(mine, key=lambda key: (_allocated_at(mine[key].claim), key))
                del mine[first]
            found |= mine.keys()
        return frozenset(found)

    async def _tell_doubles(self, looked_at: set[Hashable]) -> None:
        """Tell the users of claims that have one device together: where both pods run already, the node's ledger lets only the first one prepare."""
        for device, keys in self._world.doubles():
            looked_at.add(("double", device))
            await self._boundary.run(("double", device), keys, partial(self._tell_double, device, keys), name=f"device {device}")

    async def _tell_double(self, device: DeviceId, keys: tuple[Key, ...]) -> bool:
        message = f"device {device} is allocated to {' and '.join(f'{namespace}/{name}' for namespace, name in keys)} at once"
        for key in keys:
            claim = self._world.claims.get(key)
            if claim is not None:
                await self._events.warn(claim, "DoubleAllocation", message)
        return False


def _allocated_at(claim: ApiObject) -> str:
    allocation = claim.status.get("allocation")
    return str(allocation.get("allocationTimestamp") or "") if isinstance(allocation, dict) else ""


def _is_unschedulable(pod: ApiObject) -> bool:
    return any(
        condition.get("type") == "PodScheduled" and condition.get("status") == "False" and condition.get("reason") == "Unschedulable"
        for condition in _conditions(pod)
    )


def _why(pod: ApiObject) -> str:
    return next((str(condition.get("message") or "") for condition in _conditions(pod) if condition.get("type") == "PodScheduled"), "")


def _conditions(pod: ApiObject) -> list[dict[str, object]]:
    conditions = pod.status.get("conditions")
    return [condition for condition in conditions if isinstance(condition, dict)] if isinstance(conditions, list) else []
