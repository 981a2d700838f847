"""Decides for how long this replica leaves a pod to the others, so that replicas which see the same
pods do not all plan each of them.

There is no leader and no list of replicas: each works on every pod, and of two intents for one
claim the API server accepts one. That is safe, but costs a lost write, a read and a second search
for most pods when two replicas see them at the same moment. While another replica is active, each
replica delays a pod by a random part of a short time. The replica with the shortest delay writes
first, and the others see its intent. Correctness does not depend on it: a replica that waits for a
dead one continues after its own delay.
"""

from __future__ import annotations

import random
from enum import Enum

from topobus.process.clock import Clock

__all__ = ["ReplicaTurns", "Stage"]

# How long one intent of another replica shows that it is active. A pod now and then is not worth a
# delay.
_SEEN_S = 10.0
# The longest wait for a turn: some writes long, so that in most cases the first intent is seen
# before the second replica's turn.
_LONGEST_TURN_S = 0.5
_MOST_KEPT = 4096


class Stage(Enum):
    """What a pod waits for."""

    PLAN = "plan"
    """A node and devices, by the replica whose delay ends first."""
    FINISH = "finish"
    """The last write, by the replica that made the writes before."""


class ReplicaTurns:
    """The delays of one replica.

    Args: grace_s — how long a replica that is between two of its writes is left to finish.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._seen_s: float | None = None
        self._until_s: dict[tuple[str, Stage], float] = {}

    def see_another(self) -> None:
        """Record that another replica is active now."""
        self._seen_s = self._clock.monotonic()

    def wait_s(self, uid: str, stage: Stage) -> float:
        """Return for how many seconds a pod, by its uid, is left to other replicas.

        Counted from the first call for the pod and stage. 0 when no other replica is active.
        """
        now_s = self._clock.monotonic()
        if self._seen_s is None or now_s - self._seen_s > _SEEN_S:
            self._until_s.clear()
            return 0.0
        if len(self._until_s) >= _MOST_KEPT:
            self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}
        longest_s = self._grace_s if stage is Stage.FINISH else random.uniform(0.0, _LONGEST_TURN_S)
        return max(0.0, self._until_s.setdefault((uid, stage), now_s + longest_s) - now_s)
