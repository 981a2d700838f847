"""Which pods use which claims, by the stored pods of the stand-alone home."""

from __future__ import annotations

from collections.abc import Mapping

from topobus.controller.state.age_order import AgeOrder
from topobus.controller.state.links import Links
from topobus.engine.claims.stored import ObjectKey, Stored

__all__ = ["ClaimUsers"]


class ClaimUsers:
    """The stored pods and the claims that they use.

    Args: objects — all stored objects, as they are now.
    """

    def __init__(self, objects: Mapping[ObjectKey, Stored]) -> None:
        self._objects = objects
        self._pods = AgeOrder()
        self._uses: Links[ObjectKey, ObjectKey] = Links()

    def put(self, key: ObjectKey, pod: Stored) -> None:
        """Store a pod.

        Errors: raises ContractError for a pod whose claims cannot be read. It uses none then.
        """
        self._pods.put(key, pod.metadata.creation_timestamp)
        self._uses.put(key)
        self._uses.put(key, [ObjectKey("resourceclaim", key.namespace, name) for name in pod.pod.claim_names])

    def drop(self, key: ObjectKey) -> None:
        """Remove a pod, if it is there."""
        self._pods.drop(key)
        self._uses.put(key)

    def pods(self) -> tuple[ObjectKey, ...]:
        """List all pods, oldest first."""
        return tuple(self._pods)

    def keys(self, pod: ObjectKey) -> tuple[ObjectKey, ...]:
        """List the claims that a pod uses, stored or not."""
        return self._uses.targets_of(pod)

    def claims(self, pod: ObjectKey) -> dict[str, Stored]:
        """Give the claims of a pod that are stored, by name."""
        return {key.name: claim for key in self.keys(pod) if (claim := self._objects.get(key)) is not None}

    def revisions(self, pod: ObjectKey) -> tuple[int, ...]:
        """Tell states of a pod's claims apart."""
        return tuple(self._objects[key].revision if key in self._objects else 0 for key in self.keys(pod))

    def is_used(self, claim: ObjectKey) -> bool:
        """Say whether any pod uses a claim."""
        return bool(self._uses.keys_of(claim))

    def is_awaited(self, claim: ObjectKey) -> bool:
        """Say whether a pod that uses a claim is still to be scheduled: the claim is allocated with
        the first of them.
        """
        return any(_is_waiting(self._objects[pod]) for pod in self._uses.keys_of(claim))

    def mates(self, claim: ObjectKey) -> list[tuple[ObjectKey, Stored]]:
        """List the other stored claims of the pods that use this one, by name."""
        keys = {key for pod in self._uses.keys_of(claim) for key in self.keys(pod)} - {claim}
        return [(key, self._objects[key]) for key in sorted(keys) if key in self._objects]

    def missing_mates(self, claim: ObjectKey) -> tuple[str, ...]:
        """List the claims that are not stored yet and without which no pod that uses this one can
        start.

        Empty when one pod has all of its claims.
        """
        missing = [
            tuple(key.name for key in self.keys(pod) if key not in self._objects)
            for pod in sorted(self._uses.keys_of(claim))
        ]
        return min(missing, key=len, default=())


def _is_waiting(pod: Stored) -> bool:
    """Say whether a pod is to be scheduled: it has no node yet and is not being deleted."""
    metadata = pod.metadata
    return bool(metadata.uid) and not metadata.deletion_timestamp and not pod.pod.is_bound
