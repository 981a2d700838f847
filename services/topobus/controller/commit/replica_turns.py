"""Decides for how long this replica leaves a pod to the others, so that replicas which see the same
pods do not all plan each of them.

There is no leader and no list of replicas: each works on every pod, and of two intents for
one claim the API server takes one. That is safe and costs a lost write, a read and a second
search for most pods when two replicas see them at one moment. While another replica is at
work, each waits with a pod for a random part of a short time: who has the shortest wait
writes first, and the others see its intent. Nothing depends on it: a replica that waits for
one that is dead goes on after its own wait.
Flows in: that another replica was seen. Flows out: seconds.
"""

from __future__ import annotations

import random
from enum import Enum

from topobus.process.clock import Clock

__all__ = ["ReplicaTurns", "Stage"]

# How long one intent of somebody else shows that there is another replica: a pod that comes
# now and then is worth no wait.
_SEEN_S = 10.0
# The longest wait for a turn: some writes long, so that in most cases the first intent is seen
# before the second replica's turn.
_LONGEST_TURN_S = 0.5
_MOST_KEPT = 4096


class Stage(Enum):
    """What a pod waits for."""

    PLAN = "plan"
    """A node and devices: whoever's turn it is."""
    FINISH = "finish"
    """The last write, by the replica that made those before."""


class ReplicaTurns:
    """The waits of one replica.

    Args: grace_s — how long a replica that is between two of its writes is left to finish.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._seen_s: float | None = None
        self._until_s: dict[tuple[str, Stage], float] = {}

    def see_another(self) -> None:
        """Note that another replica is at work now."""
        self._seen_s = self._clock.monotonic()

    def wait_s(self, uid: str, stage: Stage) -> float:
        """Say for how long a pod, by its uid, is left to others from now on.

        Counted from the first time that this is asked, and 0 when no other replica is at work.
        """
        now_s = self._clock.monotonic()
        if self._seen_s is None or now_s - self._seen_s > _SEEN_S:
            self._until_s.clear()
            return 0.0
        if len(self._until_s) >= _MOST_KEPT:
            self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}
        longest_s = self._grace_s if stage is Stage.FINISH else random.uniform(0.0, _LONGEST_TURN_S)
        return max(0.0, self._until_s.setdefault((uid, stage), now_s + longest_s) - now_s)
