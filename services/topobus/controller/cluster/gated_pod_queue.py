"""A queue of the gated pods of a cluster: it gives the pods to work on, and skips those whose inputs have not changed since the last search.

Flows in: the copy of the cluster, and the results of `GatedPodReconciler`. Flows out: the pods to work on now. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.state.costly_work import CostlyWork
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.stored import Stored
from topobus.process.clock import Clock

__all__ = ["Due", "GatedPodQueue", "PodVersions", "Told"]

_LONGEST_WAIT_S = 30.0
# A pod that waits reads words that are so old at most.
_LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True)
class PodVersions:
    """The versions of a pod and its claims, and of the state, at which its last search found nothing."""

    pod: int
    claims: tuple[tuple[str, int], ...]
    supply: Hashable
    volumes: Hashable = ()
    """What its volumes depend on."""

    @property
    def own_versions(self) -> Hashable:
        """Give the versions of the pod and its claims alone."""
        return self.pod, self.claims


@dataclass(frozen=True)
class Due:
    """When a pod is to be looked at again although nothing may have changed."""

    at_s: float
    versions: PodVersions | None
    """A change ends the wait; None: nothing does."""
    room: int | None = None
    """The count of changes of what pods take on nodes at which other pods were in the way: another count ends the wait, too."""
    earliest_s: float = 0.0
    """Before this a change of `room` ends nothing: pods come and go all the time, and each look costs a look at every node."""


@dataclass(frozen=True)
class Told:
    """That a pod was told why it does not fit."""

    at_s: float
    pause_s: float
    """For so long it is not told again, whatever changes elsewhere."""


class GatedPodQueue:
    """Stores for each gated pod the versions at which there was nothing to do, and when it is due again.

    A pod is looked at again when something about it or what is free changes (`seen`), when its time has come (`due`), and behind all others where it needs more than a
    short search (`costly`).
    """

    def __init__(self, clock: Clock, state: ApiServerState, retry_s: float) -> None:
        self._clock = clock
        self._state = state
        self._retry_s = retry_s
        self.seen: dict[str, PodVersions] = {}
        """By the pod's uid."""
        self.blocked: dict[str, float] = {}
        """Since when a pod waits for claims, by its uid."""
        self.volumeless: dict[str, float] = {}
        """Since when a pod waits for volumes, by its uid."""
        self.failures: dict[Key, int] = {}
        self.told: dict[str, Told] = {}
        """When a pod was told why it does not fit, by its uid."""
        self.busy: set[Key] = set()
        """Pods that are being worked on."""
        self.due: dict[Key, Due] = {}
        self.costly: CostlyWork[Key] = CostlyWork(retry_s)
        self._pending: dict[Key, str] = {}
        """The pods to be advanced, with their uids."""
        self._touched: set[Key] = set()
        """Pods to look at in the next round."""
        self._released: set[Key] = set()
        """Pods on which work has ended since the last round."""
        self._supply: Hashable = None
        """What was free, which classes there were, and what volumes there were, in the last round."""

    def pending_pods(self) -> Collection[Key]:
        """Take in what changed, and give the pods to be advanced.  Cost: O(what changed since the last call); O(all of them) when something became free."""
        changed = self._state.changed_pods.take() | self._released
        self._released.clear()
        for key in changed:
            pod = self._state.pods.get(key)
            if pod is not None and self.needs_work(key, pod):
                if self._pending.get(key, pod.uid) != pod.uid:
                    self._forget(key, None)  # another pod of that name
                self._pending[key] = pod.uid
                self._touched.add(key)
            elif key in self.busy:
                self._touched.add(key)
            else:
                self._forget(key, pod)
        supply = (self._state.supply, len(self._state.classes), self._state.volumes.revision)
        if supply != self._supply:
            self._supply = supply
            self._touched.update(self._pending)
        return self._pending.keys()

    def touch(self, key: Key) -> None:
        """Look at a pod again in the next round."""
        self._touched.add(key)

    def release(self, key: Key) -> None:
        """End the work on a pod: it is looked at again in the next round, whatever came of it."""
        self.busy.discard(key)
        self._released.add(key)

    def take_ready(self) -> tuple[list[Key], float | None]:
        """Name the pods to work on now, which are busy from now on, those of the highest priority first; and after how many seconds another is due by time alone."""
        ready: list[Key] = []
        now_s = self._clock.monotonic()
        touched = self._touched | {key for key, due in self.due.items() if self._until(due) <= now_s}
        self._touched = set()
        for key in sorted(
            (key for key in touched if key in self._pending and key not in self.busy),
            key=lambda pod: (-_priority(self._state.pods[pod]), self._state.pods[pod].metadata.creation_timestamp, pod),
        ):
            versions, due = self.versions_of(key), self.due.get(key)
            if due is not None and due.versions in (None, versions) and self._until(due) > now_s:
                continue
            if due is not None:
                # Its time has come, whatever was found before.
                self.costly.drop(key)
                ready.append(key)
            elif self.seen.get(self._state.pods[key].uid) != versions and not self.costly.holds(key, versions.own_versions):
                ready.append(key)
        self.busy.update(ready)
        waits = [self._until(due) - now_s for key, due in self.due.items() if key in self._pending and key not in self.busy]
        return ready, min(waits, default=None)

    def _until(self, due: Due) -> float:
        """Say until when a pod waits whose versions are the same."""
        has_moved = due.room is not None and due.room != self._state.room.changes
        return min(due.at_s, due.earliest_s) if has_moved else due.at_s

    def take_costly(self, *, is_searching: bool) -> tuple[Key | None, bool]:
        """Name the costly pod whose turn it is, which is busy from now on, None while one is searched for; True says that another will be due by time alone."""
        self.costly.keep(lambda key: key in self._pending)
        known_freedoms: list[Hashable] = []
        now_s = self._clock.monotonic()

        def read_now(_: Key) -> Hashable:
            # The same for all, and only when somebody asks: it costs a look at each node.
            if not known_freedoms:
                known_freedoms.append(self.freedoms())
            return known_freedoms[0]

        turn = None
        if not is_searching:
            turn = next((key for key in self.costly.due(read_now, now_s=now_s) if key not in self.busy and key not in self.due), None)
            if turn is not None:
                self.busy.add(turn)
        return turn, self.costly.is_pausing(read_now, now_s=now_s)

    def freedoms(self) -> Hashable:
        """Name what a search reads and may be freed: while it is the same, the search finds the same."""
        stock = self._state.stock
        return len(self._state.classes), tuple([(node, stock.freedom_of(node)) for node in self._state.node_names])

    def tell(self, uid: str, first_pause_s: float) -> None:
        """Note that a pod was told why it does not fit. Each time the pause until it is told again doubles, up to a minute: what others do changes the words all the time."""
        before = self.told.get(uid)
        pause_s = min(before.pause_s * 2, max(first_pause_s, _LONGEST_SILENCE_S)) if before is not None else first_pause_s
        self.told[uid] = Told(self._clock.monotonic(), pause_s)

    def silence_s(self, uid: str) -> float:
        """Say for how long a pod is not to be told again; 0 when it may be told now."""
        last = self.told.get(uid)
        return max(0.0, last.at_s + last.pause_s - self._clock.monotonic()) if last is not None else 0.0

    def wait(self, key: Key) -> None:
        """Look at a pod again after a while, or when something about it changes."""
        if key in self._state.pods:
            wait_s = min(self._retry_s * 2 ** min(self.failures.get(key, 0), 16), _LONGEST_WAIT_S)
            self.due[key] = Due(self._clock.monotonic() + wait_s, self.versions_of(key))

    def wait_for_pods(self, key: Key, versions: PodVersions, room: int, wait_s: float, pause: float) -> None:
        """Look at a pod again that others are in the way of: they come and go without a change of what there is to allocate.

        Shapes: room — the count of their changes when it was looked at; wait_s — after which it is looked at anyway; pause — in times of `retry_s`, the shortest between two looks.
        """
        now_s = self._clock.monotonic()
        self.due[key] = Due(now_s + wait_s, versions, room, now_s + pause * self._retry_s)

    def needs_work(self, key: Key, pod: Stored) -> bool:
        """Say whether a pod has to be advanced: it waits behind the gate, or a claim allocated here for it has lost its allocation.

        The latter on its node, too: a binding that overtook us must not leave a pod that can never start.
        """
        if pod.pod.is_over or pod.pod.is_deleting:
            return False
        return pod.pod.has_gate or any(self._is_lost(claim, pod.uid) for claim in self._state.claims_of(key))

    def _is_lost(self, key: Key, uid: str) -> bool:
        claim, note = self._state.claims.get(key), self._state.gated_pods.note(key)
        return claim is not None and note is not None and note.pod == uid and not claim.claim.is_allocated

    def versions_of(self, key: Key) -> PodVersions:
        """Give the versions on which a pod's next step depends."""
        pod = self._state.pods[key]
        claims = [self._state.claims.get(claim) for claim in self._state.claims_of(key)]
        versions = tuple((claim.uid, claim.revision) for claim in claims if claim is not None)
        return PodVersions(pod.revision, versions, (self._state.supply, len(self._state.classes)), self._state.volumes.version_for(key))

    def is_live(self, key: Key, note: Attempt) -> bool:
        """Say whether the pod of an intent is still there to make it true."""
        other = self._state.gated_pods.pod_of(note.pod)
        return other is not None and other[0] == key[0] and other in self._state.pods and self.needs_work(other, self._state.pods[other])

    def put_behind(self, key: Key) -> None:
        """Leave a pod that needs more than a short search until it is its turn."""
        if key in self._state.pods:
            versions = self.versions_of(key)
            self.seen[self._state.pods[key].uid] = versions
            self.costly.put(key, versions.own_versions)

    def _forget(self, key: Key, pod: Stored | None) -> None:
        """Forget what is known of a pod that is not to be advanced any more, or is gone."""
        uid = self._pending.pop(key, "")
        self._touched.discard(key)
        for by_uid in (self.seen, self.blocked, self.volumeless, self.told):
            by_uid.pop(uid, None)
        if pod is None:
            self.due.pop(key, None)
            self.failures.pop(key, None)


def _priority(pod: Stored) -> int:
    priority = pod.value.spec.get("priority")
    return priority if isinstance(priority, int) else 0
