"""An index of which pods use which claims, and of the pods with changes since the last call.

A change concerns the pod itself or a claim that it uses. So the cost of a round depends on the
changes, not on the number of pods.
"""

from __future__ import annotations

from topobus.controller.state.links import Links

__all__ = ["ChangedPods"]

Key = tuple[str, str]


class ChangedPods:
    """Pods, their claims, and the pods with changes."""

    def __init__(self) -> None:
        self._uses: Links[Key, Key] = Links()
        self._changed: set[Key] = set()

    def put_pod(self, pod: Key, claims: tuple[Key, ...] | None) -> None:
        """Store a pod with the claims that it uses, or remove it with None."""
        self._uses.put(pod, claims or ())
        self._changed.add(pod)

    def put_claim(self, claim: Key) -> None:
        """Record that a claim was created, changed or deleted."""
        self._changed |= self._uses.keys_of(claim)

    def claims_of(self, pod: Key) -> tuple[Key, ...]:
        """List the claims that a pod uses."""
        return self._uses.targets_of(pod)

    def take(self) -> frozenset[Key]:
        """Return the pods with changes since the last call, of their own or of claims that they
        use.
        """
        taken = frozenset(self._changed)
        self._changed.clear()
        return taken
