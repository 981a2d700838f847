"""A queue of the gated pods of a cluster: it gives the pods to work on, and skips those whose inputs have not changed since the last search.

Flows in: the copy of the cluster, and the results of `GatedPodReconciler`. Flows out: the pods to work on now. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from topobus.controller.claims.attempts import Attempt
from topobus.controller.claims.stored import Stored
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.state.costly_work import CostlyWork
from topobus.runtime.clock import Clock

__all__ = ["Due", "GatedPodQueue", "PodVersions"]

_LONGEST_WAIT_S = 30.0


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
        self.told: dict[str, float] = {}
        """When a pod was told why it does not fit, by its uid."""
        self.busy: set[Key] = set()
        """Pods that are being worked on."""
        self.due: dict[Key, Due] = {}
        self.costly: CostlyWork[Key] = CostlyWork(retry_s)

    def take_ready(self, keys: Collection[Key]) -> tuple[list[Key], float | None]:
        """Name the pods to work on now, which are busy from now on, those of the highest priority first; and after how many seconds another is due by time alone."""
        ready: list[Key] = []
        waits: list[float] = []
        now_s = self._clock.monotonic()
        for key in sorted(
            keys, key=lambda pod: (-_priority(self._state.pods[pod]), self._state.pods[pod].metadata.creation_timestamp, pod)
        ):
            if key in self.busy:
                continue
            versions, due = self.versions_of(key), self.due.get(key)
            until_s = self._until(due) if due is not None else 0.0
            if due is not None and due.versions in (None, versions) and until_s > now_s:
                waits.append(until_s - now_s)
            elif due is not None:
                # Its time has come, whatever was found before.
                self.costly.drop(key)
                ready.append(key)
            elif self.seen.get(self._state.pods[key].uid) != versions and not self.costly.holds(key, versions.own_versions):
                ready.append(key)
        self.busy.update(ready)
        return ready, min(waits, default=None)

    def _until(self, due: Due) -> float:
        """Say until when a pod waits whose versions are the same."""
        has_moved = due.room is not None and due.room != self._state.room.changes
        return min(due.at_s, due.earliest_s) if has_moved else due.at_s

    def take_costly(self, keys: Collection[Key], *, is_searching: bool) -> tuple[Key | None, bool]:
        """Name the costly pod whose turn it is, which is busy from now on, None while one is searched for; True says that another will be due by time alone."""
        self.costly.keep(lambda key: key in keys)
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

    def keep(self, keys: Collection[Key]) -> None:
        """Forget pods that are not among these. Call it once a round."""
        self.due = {key: due for key, due in self.due.items() if key in self._state.pods}
        self.failures = {key: count for key, count in self.failures.items() if key in self._state.pods}
        living = {self._state.pods[key].uid for key in keys}
        self.seen = {uid: seen for uid, seen in self.seen.items() if uid in living}
        self.blocked = {uid: since for uid, since in self.blocked.items() if uid in living}
        self.volumeless = {uid: since for uid, since in self.volumeless.items() if uid in living}
        self.told = {uid: at for uid, at in self.told.items() if uid in living}

    def freedoms(self) -> Hashable:
        """Name what a search reads and may be freed: while it is the same, the search finds the same."""
        stock = self._state.stock
        return len(self._state.classes), tuple([(node, stock.freedom_of(node)) for node in self._state.node_names])

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

    def pending_pods(self) -> list[Key]:
        """List the pods to be advanced."""
        return [key for key in self._state.gated_pods.waiting() if key in self._state.pods and self.needs_work(key, self._state.pods[key])]

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


def _priority(pod: Stored) -> int:
    priority = pod.value.spec.get("priority")
    return priority if isinstance(priority, int) else 0
