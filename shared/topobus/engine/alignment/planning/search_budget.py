"""The limit of a search for another way to place a pod, and its answer when it stopped before it
knew.

The planner counts tries, not time: the same view and request give the same answer on any machine.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.values.outcome import Reason

__all__ = ["GaveUp", "Steps"]


class Steps:
    """A budget of tries."""

    __slots__ = ("budget", "left")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.left = budget

    def take(self) -> bool:
        """Spend one try. False when there is none."""
        self.left -= 1
        return self.left >= 0

    @property
    def used(self) -> int:
        """How many tries were spent."""
        return self.budget - max(self.left, 0)


class GaveUp(Struct, frozen=True, kw_only=True):
    """The budget was spent: whether the pod fits is not known."""

    conflict: Conflict
    """What stopped kubelet's order."""
    reason: Reason
