"""An index of which pods use which claims, and of the pods of which something changed since
somebody looked.

Flows in: pods with the claims that they use, and claims that changed. Flows out: the pods that a
change concerns, so that a round costs what changed and not what there is.
"""

from __future__ import annotations

__all__ = ["ChangedPods"]

Key = tuple[str, str]


class ChangedPods:
    """Pods, their claims, and what changed of them."""

    def __init__(self) -> None:
        self._uses: dict[Key, tuple[Key, ...]] = {}
        self._users: dict[Key, set[Key]] = {}
        self._changed: set[Key] = set()

    def put_pod(self, pod: Key, claims: tuple[Key, ...] | None) -> None:
        """Take in a pod with the claims that it uses, or None for one that is gone."""
        for claim in self._uses.pop(pod, ()):
            users = self._users[claim]
            users.discard(pod)
            if not users:
                del self._users[claim]
        if claims is not None:
            self._uses[pod] = claims
            for claim in claims:
                self._users.setdefault(claim, set()).add(pod)
        self._changed.add(pod)

    def put_claim(self, claim: Key) -> None:
        """Note that a claim changed, came or went."""
        self._changed |= self._users.get(claim, set())

    def claims_of(self, pod: Key) -> tuple[Key, ...]:
        """List the claims that a pod uses."""
        return self._uses.get(pod, ())

    def take(self) -> frozenset[Key]:
        """Name the pods of which something changed since the last call: they themselves, or claims
        that they use.
        """
        taken = frozenset(self._changed)
        self._changed.clear()
        return taken
