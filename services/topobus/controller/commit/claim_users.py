"""Indexes which pods use which claims, from the stored pods.

A pod is parsed once for each revision.
"""

from __future__ import annotations

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.reservations import Consumer
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.process.work_queue import WorkQueue
from topobus.values.errors import ContractError

__all__ = ["ClaimUsers", "consuming_pods"]


class ClaimUsers:
    """The users of claims, brought up to date before each round."""

    def __init__(self, state: StandaloneState, queue: WorkQueue) -> None:
        self._state = state
        self._queue = queue
        self._read: dict[ObjectKey, tuple[int, tuple[str, ...]]] = {}
        self._users: dict[tuple[str, str], list[ObjectKey]] = {}
        self.pods: list[tuple[ObjectKey, Stored]] = []
        """All stored pods, oldest first."""
        self._epoch = -1

    def update(self) -> None:
        """Read the pods that are new or were changed. Cost: nothing while no pod has changed."""
        if self._epoch == self._state.pod_epoch:
            return
        self._epoch = self._state.pod_epoch
        self.pods = sorted(
            self._state.of_kind("pod").items(),
            key=lambda item: (str(item[1].value.metadata.get("creationTimestamp") or ""), item[0]),
        )
        read: dict[ObjectKey, tuple[int, tuple[str, ...]]] = {}
        self._users = {}
        for key, stored in self.pods:
            names = self._read.get(key)
            read[key] = (
                names
                if names is not None and names[0] == stored.revision
                else (stored.revision, self._names(key, stored))
            )
            for name in read[key][1]:
                self._users.setdefault((key.namespace, name), []).append(key)
        self._read = read
        self._queue.keep(read.keys())

    def _names(self, key: ObjectKey, pod: Stored) -> tuple[str, ...]:
        """Read which claims a pod uses. A pod that cannot be read uses none."""
        names: list[str] = []
        self._queue.run_now(key, pod.revision, lambda: names.extend(_names(pod)), name=pod.shown)
        return tuple(names)

    def keys(self, pod: ObjectKey) -> list[ObjectKey]:
        """List the claims that a pod uses, stored or not."""
        return [ObjectKey("resourceclaim", pod.namespace, name) for name in self._read.get(pod, (0, ()))[1]]

    def claims(self, pod: ObjectKey) -> dict[str, Stored]:
        """Give the claims of a pod that are stored, by name."""
        return {key.name: claim for key in self.keys(pod) if (claim := self._state.objects.get(key)) is not None}

    def revisions(self, pod: ObjectKey) -> tuple[int, ...]:
        """Tell states of a pod's claims apart."""
        objects = self._state.objects
        return tuple(objects[key].revision if key in objects else 0 for key in self.keys(pod))

    def users(self, claim: ObjectKey) -> tuple[ObjectKey, ...]:
        """List the pods that use a claim."""
        return tuple(key for key in self._users.get((claim.namespace, claim.name), ()) if key in self._state.objects)

    def waiting(self, claim: ObjectKey) -> tuple[ObjectKey, ...]:
        """List the pods that use a claim and are still to be scheduled: the claim is allocated with
        the first of them.
        """
        return tuple(key for key in self.users(claim) if is_waiting(self._state.objects[key]))


def is_waiting(pod: Stored) -> bool:
    """Say whether a pod is to be scheduled: it has no node yet and is not being deleted."""
    metadata = pod.metadata
    return bool(metadata.uid) and not metadata.deletion_timestamp and not pod.pod.is_bound


def consuming_pods(claim: Stored) -> tuple[Consumer, ...]:
    """List the pods that have reserved a claim.

    Empty for a claim that cannot be read.
    """
    return tuple(consumer for consumer in claim.known_consumers if consumer.resource == "pods")


def _names(pod: Stored) -> tuple[str, ...]:
    try:
        return pod.pod.claim_names
    except ContractError:
        return ()
