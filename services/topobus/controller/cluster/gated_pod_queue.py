"""A queue of the gated pods of a cluster: it returns the pods to work on, and skips those whose
inputs have not changed since their last result.

It writes nothing. `GatedPodReconciler` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field

from prometheus_client import Counter

from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.stored import Stored
from topobus.engine.scheduling.node_resources import priority_of
from topobus.process.clock import Clock
from topobus.process.work_queue import Again, Behind, Result, WorkQueue
from topobus.values.outcome import Reason

__all__ = ["GatedPodQueue", "PodVersions"]

# Times `retry_s` for which a pod may wait for its claims before that is reported, and between the
# first two reports of why it does not fit.
_PATIENCE = 5
_LONGEST_WAIT_S = 30.0
# The oldest reason that a waiting pod may show.
_LONGEST_SILENCE_S = 60.0
# The longest pause before nodes that kube-scheduler refused are tried again. It looks itself so
# seldom at a pod that nothing wakes (podMaxInUnschedulablePodsDuration, 5 minutes).
_LONGEST_REFUSAL_S = 300.0


@dataclass(frozen=True)
class PodVersions:
    """The versions of a pod and its claims, and of the state, on which its next step depends."""

    pod: int
    claims: tuple[tuple[str, int], ...]
    supply: Hashable
    moves: int = field(default=0, compare=False)
    """How many moves of pods (to a node, or off it) there had been, at most some seconds ago."""

    @property
    def own_versions(self) -> Hashable:
        """The versions of the pod and its claims alone."""
        return self.pod, self.claims

    @property
    def with_moves(self) -> Hashable:
        """Versions that also change with the pods on nodes, for a pod that other pods keep off."""
        return self, self.moves


@dataclass
class _Waiting:
    """Since when a pod waits for what, and when it was last reported why it does not fit."""

    uid: str
    since_s: dict[str, float] = field(default_factory=dict)
    told_s: float = 0.0
    pause_s: float = 0.0
    """Seconds for which the reason is not written again, even when the state changes."""
    refused_until_s: float = math.inf
    """When the nodes that kube-scheduler refused are tried again. Infinite while some other node
    may be tried."""


class GatedPodQueue:
    """The gated pods on their work queue. The cost of a round depends on the changes, not on the
    number of pods.
    """

    def __init__(self, clock: Clock, state: ApiServerState, retry_s: float, failures: Counter | None = None) -> None:
        self._clock = clock
        self._state = state
        self._patience_s = _PATIENCE * retry_s
        self._queue = WorkQueue("gated-pods", clock, retry_s, longest_s=_LONGEST_WAIT_S, failures=failures)
        self._busy: set[Key] = set()
        """Pods that are being worked on."""
        self._pending: dict[Key, _Waiting] = {}
        """The pods to be advanced."""
        self._touched: set[Key] = set()
        """Pods to check in the next round."""
        self._released: set[Key] = set()
        """Pods on which work has ended since the last round."""
        self._moves = 0
        self._moves_due_s = 0.0
        self._supply: Hashable = None
        """The free devices, classes and moves of pods in the last round."""

    def pending_pods(self) -> Collection[Key]:
        """Apply the changes, and return the pods to be advanced.

        Cost: O(changes since the last call), or O(all pending pods) when something became free.
        """
        changed = self._state.changed_pods.take() | self._released
        self._released.clear()
        for key in changed:
            pod = self._state.pods.get(key)
            if pod is not None and self.needs_work(key, pod):
                if key in self._pending and self._pending[key].uid != pod.uid:
                    self._forget(key)  # another pod of that name
                self._pending.setdefault(key, _Waiting(pod.uid))
                self._touched.add(key)
            elif key in self._busy:
                self._touched.add(key)
            else:
                self._forget(key)
        if self._clock.monotonic() >= self._moves_due_s:
            # Pods move all the time, and a pod that other pods keep off costs a check of every
            # node.
            self._moves, self._moves_due_s = (
                self._state.room.changes,
                self._clock.monotonic() + self._patience_s,
            )
        supply = (self._state.supply, len(self._state.classes), self._moves)
        if supply != self._supply:
            self._supply = supply
            self._touched.update(self._pending)
        return self._pending.keys()

    def release(self, key: Key) -> None:
        """End the work on a pod. It is checked again in the next round."""
        self._busy.discard(key)
        self._released.add(key)

    def take_ready(self) -> list[Key]:
        """Return the pods to work on now, those of the highest priority first, and mark them as
        busy.
        """
        touched = self._touched | {key for key in self._pending if self._queue.is_due(key)}
        self._touched = set()
        ready = sorted(
            (
                key
                for key in touched
                if key in self._pending and key not in self._busy and self._queue.is_ready(key, *self._versions(key))
            ),
            key=lambda pod: (
                -priority_of(self._state.pods[pod].value.spec),
                self._state.pods[pod].metadata.creation_timestamp,
                pod,
            ),
        )
        self._busy.update(ready)
        return ready

    def take_costly(self) -> Key | None:
        """Return the pod that is next for a long search, and mark it as busy."""
        freedoms: list[Hashable] = []

        def read_now(_: Key) -> Hashable:
            # The same for all pods, and read only when needed, since it reads each node.
            if not freedoms:
                freedoms.append(self.freedoms())
            return freedoms[0]

        turn = next((key for key in self._queue.behind(self._pending, read_now) if key not in self._busy), None)
        if turn is not None:
            self._busy.add(turn)
        return turn

    def wait_s(self) -> float | None:
        """Return after how many seconds a pod is due by time alone."""
        waits = [self._queue.wait_s()]
        if self._state.room.changes != self._moves:
            waits.append(self._moves_due_s - self._clock.monotonic())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    async def run(
        self,
        key: Key,
        work: Callable[[], Awaitable[Result]],
        report: Callable[[Reason], Awaitable[object]],
        *,
        is_costly: bool,
    ) -> None:
        """Do the work on a pod, as `WorkQueue.run`."""
        pod = self._state.pods.get(key)
        if pod is not None:
            version, *narrow = self._versions(key)
            await self._queue.run(
                key, version, work, name=pod.shown, report=report, narrow=tuple(narrow), is_costly=is_costly
            )

    def has_waited(self, key: Key, versions: PodVersions) -> bool:
        """Return, within the work on a pod, whether it has waited at its own versions."""
        return self._queue.has_waited(key, versions.own_versions)

    def later(self, key: Key) -> Result:
        """Return the result that checks a pod again after a while, or when its versions change."""
        return Again(version=self.versions_of(key)) if key in self._state.pods else None

    def behind_others(self, key: Key) -> Result:
        """Return the result that queues a pod for a long search, at its present versions."""
        return Behind(self.versions_of(key).own_versions) if key in self._state.pods else None

    def waits_briefly(self, key: Key, reason: str) -> bool:
        """Return whether a pod has waited for something too briefly for a report."""
        now_s = self._clock.monotonic()
        return now_s - self._waiting(key).since_s.setdefault(reason, now_s) < self._patience_s

    def has_come(self, key: Key, reason: str) -> None:
        """Note that what a pod waited for is there."""
        self._waiting(key).since_s.pop(reason, None)

    def silence_s(self, key: Key) -> float:
        """Return the seconds until it may be reported again why a pod fits nowhere. 0: now."""
        waiting = self._waiting(key)
        return max(0.0, waiting.told_s + waiting.pause_s - self._clock.monotonic())

    def silence(self, key: Key) -> None:
        """Note that it is reported now why a pod fits nowhere.

        The pause until the next report doubles each time, up to a minute, since the text changes
        with each change on the nodes.
        """
        waiting, first_s = self._waiting(key), self._patience_s
        waiting.told_s = self._clock.monotonic()
        waiting.pause_s = min(waiting.pause_s * 2, max(first_s, _LONGEST_SILENCE_S)) if waiting.pause_s else first_s

    def refused_wait_s(self, key: Key, first_s: float, rounds: int) -> float:
        """Return the seconds until the nodes that refused a pod may be tried again. The first call
        begins the pause, which doubles with each round.
        """
        waiting, now_s = self._waiting(key), self._clock.monotonic()
        if waiting.refused_until_s == math.inf:
            longest_s = max(first_s, _LONGEST_REFUSAL_S)
            waiting.refused_until_s = now_s + min(first_s * 2 ** min(rounds, 16), longest_s)
        return max(0.0, waiting.refused_until_s - now_s)

    def may_begin_round(self, key: Key) -> bool:
        """Return whether the pause is over after which the nodes that refused a pod are tried
        again. The next pause begins with the next call of `refused_wait_s`.
        """
        waiting = self._waiting(key)
        is_over = self._clock.monotonic() >= waiting.refused_until_s
        if is_over:
            waiting.refused_until_s = math.inf
        return is_over

    def _waiting(self, key: Key) -> _Waiting:
        """Return the notes on a pod's waits. Those on a pod that is gone are dropped."""
        return self._pending.get(key) or _Waiting("")

    def freedoms(self) -> Hashable:
        """Return the version of what a search reads and of what may become free. While it is the
        same, the search has the same result.
        """
        stock = self._state.stock
        return len(self._state.classes), tuple([(node, stock.freedom_of(node)) for node in self._state.node_names])

    def needs_work(self, key: Key, pod: Stored) -> bool:
        """Return whether a pod has to be advanced: it waits behind the gate, or a claim allocated
        here for it has lost its allocation.

        The latter holds for a pod on a node as well: if it was bound before the claim was allocated
        again, it could otherwise never start.
        """
        if pod.pod.is_over or pod.pod.is_deleting:
            return False
        return pod.pod.has_gate or any(self._is_lost(claim, pod.uid) for claim in self._state.claims_of(key))

    def _is_lost(self, key: Key, uid: str) -> bool:
        claim, note = self._state.claims.get(key), self._state.gated_pods.note(key)
        return claim is not None and note is not None and note.pod == uid and not claim.claim.is_allocated

    def versions_of(self, key: Key) -> PodVersions:
        """Return the versions on which a pod's next step depends."""
        pod = self._state.pods[key]
        claims = [self._state.claims.get(claim) for claim in self._state.claims_of(key)]
        versions = tuple((claim.uid, claim.revision) for claim in claims if claim is not None)
        supply = (self._state.supply, len(self._state.classes))
        return PodVersions(pod.revision, versions, supply, self._moves)

    def _versions(self, key: Key) -> tuple[Hashable, ...]:
        """Return what a pod's result may wait for: all its versions, those of itself and its
        claims, all with the pods on nodes, and its uid, which never changes.
        """
        versions = self.versions_of(key)
        return versions, versions.own_versions, versions.with_moves, self._state.pods[key].uid

    def is_live(self, key: Key, note: Attempt) -> bool:
        """Say whether the pod of an intent still exists and needs it."""
        other = self._state.gated_pods.pod_of(note.pod)
        return (
            other is not None
            and other[0] == key[0]
            and other in self._state.pods
            and self.needs_work(other, self._state.pods[other])
        )

    def _forget(self, key: Key) -> None:
        """Drop the notes on a pod that is gone or needs no work."""
        self._pending.pop(key, None)
        self._touched.discard(key)
        self._queue.drop(key)
