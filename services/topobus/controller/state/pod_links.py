"""Indexes which claims belong to pods: those that a pod owns, and those that a pod has reserved.

It finds the claims whose pod is no longer stored. Such a query costs one set difference over the
pods that own or reserve claims, so a round may ask each time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import TypeVar

from topobus.controller.state.links import Links
from topobus.engine.claims.reservations import Consumer
from topobus.engine.claims.stored import ObjectKey

__all__ = ["PodLinks"]

H = TypeVar("H", bound=Hashable)

_Pod = tuple[str, str, str]
"""Namespace, name and uid: a later pod of the same name is a different pod."""


class PodLinks:
    """The links between claims and pods."""

    def __init__(self) -> None:
        self._pods: dict[ObjectKey, _Pod] = {}
        self._stored: set[_Pod] = set()
        self._uids: dict[str, int] = {}
        self._owners: Links[ObjectKey, str] = Links()
        self._users: Links[ObjectKey, _Pod] = Links()

    def put_claim(self, key: ObjectKey, owner_uid: str | None, users: Iterable[Consumer]) -> None:
        """Store a claim's owner and the pods that have reserved it, or neither for a claim that is
        gone.
        """
        self._owners.put(key, () if owner_uid is None else (owner_uid,))
        self._users.put(key, {(key.namespace, user.name, user.uid) for user in users if user.resource == "pods"})

    def put_pod(self, key: ObjectKey, uid: str) -> None:
        """Store a pod."""
        self.drop_pod(key)
        pod = self._pods[key] = (key.namespace, key.name, uid)
        self._stored.add(pod)
        self._uids[uid] = self._uids.get(uid, 0) + 1

    def drop_pod(self, key: ObjectKey) -> None:
        """Remove a pod, if it is there."""
        pod = self._pods.pop(key, None)
        if pod is None:
            return
        self._stored.discard(pod)
        self._uids[pod[2]] -= 1
        if not self._uids[pod[2]]:
            del self._uids[pod[2]]

    def owned_by_gone_pods(self) -> list[ObjectKey]:
        """List the claims that were made for a pod that is not stored."""
        return _without(self._owners, self._uids.keys())

    def reserved_by_gone_pods(self) -> list[ObjectKey]:
        """List the claims that a pod has reserved which is not stored."""
        return _without(self._users, self._stored)


def _without(links: Links[ObjectKey, H], targets: AbstractSet[H]) -> list[ObjectKey]:
    """List the claims that refer to any other pod than these."""
    return sorted({key for target in links.targets - targets for key in links.keys_of(target)})
