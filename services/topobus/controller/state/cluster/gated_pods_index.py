"""An index of the gated pods and of their claims, updated with each change, so that a change costs
only the objects that it concerns.

It has the pods that wait behind the scheduling gate or have lost their allocation, the pods that
have devices and no node, and the attempts noted in claims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from topobus.controller.state.links import Links
from topobus.engine.claims.attempts import Attempt, holds_what_was_attempted
from topobus.engine.claims.gate import REFUSED_BY_SCHEDULER, allocated_reason
from topobus.engine.claims.stored import Stored
from topobus.engine.scheduling.kube_rules.scheduler_reasons import is_unschedulable
from topobus.formats.kubernetes.objects import ATTEMPT_ANNOTATION
from topobus.values.errors import ContractError

__all__ = ["GatedPodsIndex"]

Key = tuple[str, str]


class _Noted(NamedTuple):
    """A claim with our note."""

    uid: str
    version: int
    note: Attempt
    users: frozenset[str]
    is_ours: bool
    """Whether its allocation has exactly the devices of the note."""


class GatedPodsIndex:
    """Pods behind the gate, and claims with our notes."""

    def __init__(self) -> None:
        self._uids: dict[Key, str] = {}
        self._pods: dict[str, Key] = {}
        self._unbound: set[str] = set()
        self._told_refused: set[str] = set()
        self._unschedulable: set[str] = set()
        """Pods without a node that kube-scheduler reports as unschedulable."""
        self._noted: dict[Key, _Noted] = {}
        self._of_pod: Links[Key, str] = Links()
        self._on: Links[Key, str] = Links()
        self._lost: set[Key] = set()
        self._unreserved: set[Key] = set()
        self._pending: set[Key] = set()

    def put_pod(self, key: Key, pod: Stored | None) -> None:
        """Store a pod, or remove it with None."""
        before = self._uids.pop(key, "")
        self._pods.pop(before, None)
        self._unbound.discard(before)
        self._told_refused.discard(before)
        self._unschedulable.discard(before)
        if pod is None:
            return
        uid = pod.uid
        self._uids[key] = uid
        self._pods[uid] = key
        if not pod.pod.node and not pod.pod.is_over:
            self._unbound.add(uid)
            if is_unschedulable(pod.value):
                self._unschedulable.add(uid)
        if allocated_reason(pod.value) == REFUSED_BY_SCHEDULER:
            self._told_refused.add(uid)

    def put_claim(self, key: Key, stored: Stored | None) -> None:
        """Store a claim, or remove it with None."""
        self._noted.pop(key, None)
        self._of_pod.put(key)
        self._on.put(key)
        for keys in (self._lost, self._unreserved, self._pending):
            keys.discard(key)
        note = _note(stored) if stored is not None and ATTEMPT_ANNOTATION in stored.metadata.annotations else None
        if stored is None or note is None:
            return
        claim = stored.value
        is_allocated = stored.claim.is_allocated
        users = frozenset(consumer.uid for consumer in stored.claim.consumers)
        noted = _Noted(stored.uid, stored.revision, note, users, is_allocated and holds_what_was_attempted(claim, note))
        self._noted[key] = noted
        self._of_pod.put(key, (note.pod,))
        self._on.put(key, (note.node,))
        if not is_allocated:
            self._lost.add(key)
            if note.node:
                self._pending.add(key)
        elif note.pod not in users:
            self._unreserved.add(key)

    def note(self, key: Key) -> Attempt | None:
        """Return the attempt noted in a claim. None when there is no readable one."""
        noted = self._noted.get(key)
        return noted.note if noted is not None else None

    def users_of_ours(self, key: Key) -> frozenset[str] | None:
        """Name the pods that have reserved a claim whose allocation equals the noted attempt.

        None for any other claim.
        """
        noted = self._noted.get(key)
        return noted.users if noted is not None and noted.is_ours else None

    def noted(self) -> tuple[Key, ...]:
        """List the claims with our notes."""
        return tuple(sorted(self._noted))

    def is_pending(self, key: Key) -> bool:
        """Say whether a claim has an intent and no allocation."""
        return key in self._pending

    def unallocated(self) -> tuple[Key, ...]:
        """List the claims with our notes that have no devices."""
        return tuple(sorted(self._lost))

    def pending(self) -> frozenset[tuple[str, int]]:
        """Name the intents that are to be committed: the claim's uid and the attempt's number."""
        return frozenset((self._noted[key].uid, self._noted[key].note.number) for key in self._pending)

    def placeless(self) -> frozenset[Key]:
        """Name the pods for which we allocated claims and that kube-scheduler cannot place or that
        have such a reason in their condition, and those that have not reserved, or no longer
        reserve, what we allocated for them.

        Pods that simply have no node yet are left out: there are thousands of them while a cluster
        fills, and they need no work.
        """
        unplaced = [self._pods[uid] for uid in self._unschedulable | self._told_refused if self._of_pod.keys_of(uid)]
        left = (self._pods.get(self._noted[key].note.pod) for key in self._unreserved)
        return frozenset(unplaced) | frozenset(key for key in left if key is not None)

    def intended_on(self, node: str, counts: Callable[[Key], bool], *, without: str) -> frozenset[Key]:
        """Name the pods that have no node yet and for which this one is intended, by the notes in
        their claims.

        Shapes: counts — returns whether a claim's note counts; without — uid of a pod that is left
        out.
        """
        notes = ((key, self._noted[key].note.pod) for key in self._on.keys_of(node))
        return frozenset(
            self._pods[uid] for key, uid in notes if uid != without and uid in self._unbound and counts(key)
        )

    def pod_of(self, uid: str) -> Key | None:
        """Find a pod by its uid."""
        return self._pods.get(uid)

    def later_intents(self, version: int) -> frozenset[str]:
        """Name the claims (by uid) with an intent that was written after a version: a later intent
        must respect the earlier ones, not the other way round.
        """
        return frozenset(self._noted[key].uid for key in self._pending if self._noted[key].version > version)


def _note(claim: Stored) -> Attempt | None:
    """Read our note in a claim.

    None when there is none, it is not for a pod, or it cannot be read.
    """
    try:
        attempt = claim.claim.attempt
    except ContractError:
        return None
    return attempt if attempt is not None and attempt.pod else None
