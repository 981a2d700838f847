"""Which gated pods of a cluster are to be looked at, and when: nothing is searched twice at the same state of the world.

Flows in: the copy of the cluster, and what `GatedPodReconciler` found for a pod. Flows out: the pods to work on now. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from topobus.contracts.messages import ApiObject
from topobus.controller.claims.gate import has_gate, is_over, version_of
from topobus.controller.claims.gated_claims import GateAttempt
from topobus.controller.claims.stored import Stored
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.state.costly_work import CostlyWork
from topobus.kubernetes.api.objects import metadata_of
from topobus.runtime.clock import Clock

__all__ = ["Due", "GatedPodQueue", "Sight"]

_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True)
class Sight:
    """At which state of the world a pod was last found to be without a way forward."""

    pod: int
    claims: tuple[tuple[str, int], ...]
    supply: Hashable

    @property
    def own(self) -> Hashable:
        """Tell versions of the pod itself and its claims apart."""
        return self.pod, self.claims


@dataclass(frozen=True)
class Due:
    """When a pod is to be looked at again although nothing may have changed."""

    at_s: float
    sight: Sight | None
    """A change ends the wait; None: nothing does."""


class GatedPodQueue:
    """Remembers of each gated pod at which state of the world there was nothing to do for it, and when it is due all the same.

    A pod is looked at again when something about it or what is free changes (`seen`), when its time has come (`due`), and behind all others where it needs more than a
    short search (`costly`).
    """

    def __init__(self, clock: Clock, world: ApiServerState, retry_s: float) -> None:
        self._clock = clock
        self._world = world
        self._retry_s = retry_s
        self.seen: dict[str, Sight] = {}
        """By the pod's uid."""
        self.blocked: dict[str, float] = {}
        """Since when a pod waits for claims, by its uid."""
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
            keys, key=lambda pod: (-_priority(self._world.pods[pod].value), self._world.pods[pod].metadata.creation_timestamp, pod)
        ):
            if key in self.busy:
                continue
            sight, due = self.sight(key), self.due.get(key)
            if due is not None and due.sight in (None, sight) and due.at_s > now_s:
                waits.append(due.at_s - now_s)
            elif due is not None:
                # Its time has come, whatever was found before.
                self.costly.drop(key)
                ready.append(key)
            elif self.seen.get(self._world.pods[key].uid) != sight and not self.costly.holds(key, sight.own):
                ready.append(key)
        self.busy.update(ready)
        return ready, min(waits, default=None)

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
        self.due = {key: due for key, due in self.due.items() if key in self._world.pods}
        self.failures = {key: count for key, count in self.failures.items() if key in self._world.pods}
        living = {self._world.pods[key].uid for key in keys}
        self.seen = {uid: seen for uid, seen in self.seen.items() if uid in living}
        self.blocked = {uid: since for uid, since in self.blocked.items() if uid in living}
        self.told = {uid: at for uid, at in self.told.items() if uid in living}

    def freedoms(self) -> Hashable:
        """Name what a search reads and may be freed: while it is the same, the search finds the same."""
        stock = self._world.stock
        return len(self._world.classes), tuple([(node, stock.freedom_of(node)) for node in self._world.node_names])

    def wait(self, key: Key) -> None:
        """Look at a pod again after a while, or when something about it changes."""
        if key in self._world.pods:
            wait_s = min(self._retry_s * 2 ** min(self.failures.get(key, 0), 16), _LONGEST_WAIT_S)
            self.due[key] = Due(self._clock.monotonic() + wait_s, self.sight(key))

    def is_ours(self, key: Key, pod: Stored) -> bool:
        """Say whether a pod is to be brought further: it waits behind our gate, or a claim that we allocated for it has lost its allocation.

        The latter on its node, too: a binding that overtook us must not leave a pod that can never start.
        """
        if is_over(pod.value) or pod.pod.is_deleting:
            return False
        return has_gate(pod.value) or any(self._is_lost(claim, pod.uid) for claim in self._world.claims_of(key))

    def _is_lost(self, key: Key, uid: str) -> bool:
        claim, note = self._world.claims.get(key), self._world.book.note(key)
        return claim is not None and note is not None and note.pod == uid and not claim.status.get("allocation")

    def ours(self) -> list[Key]:
        """List the pods that are to be brought further."""
        return [key for key in self._world.book.waiting() if key in self._world.pods and self.is_ours(key, self._world.pods[key])]

    def sight(self, key: Key) -> Sight:
        """Name the state of the world on which a pod's next step depends."""
        pod = self._world.pods[key]
        claims = [self._world.claims.get(claim) for claim in self._world.claims_of(key)]
        versions = tuple((_uid(claim), version_of(claim)) for claim in claims if claim is not None)
        return Sight(pod.revision, versions, (self._world.supply, len(self._world.classes)))

    def is_alive(self, key: Key, note: GateAttempt) -> bool:
        """Say whether the pod of an intent is still there to make it true."""
        other = self._world.book.pod_of(note.pod)
        return other is not None and other[0] == key[0] and other in self._world.pods and self.is_ours(other, self._world.pods[other])

    def put_behind(self, key: Key) -> None:
        """Leave a pod that needs more than a short search until it is its turn."""
        if key in self._world.pods:
            sight = self.sight(key)
            self.seen[self._world.pods[key].uid] = sight
            self.costly.put(key, sight.own)


def _uid(claim: ApiObject) -> str:
    return metadata_of(claim).uid


def _priority(pod: ApiObject) -> int:
    priority = pod.spec.get("priority")
    return priority if isinstance(priority, int) else 0
