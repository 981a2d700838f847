"""Conflict sets for backjumping: finds the earlier choices that a dead end depends on, so that the
search returns to one of them and skips the others.

A choice is a grant. Its level is its index among all grants that the search holds. A conflict set
is a bit mask of levels, and a negative integer means all levels. A level too many costs time, a
level too few would lose solutions. So a conflict set includes every grant that may have caused the
miss: grants of the same device, grants under a constraint of the request, and grants that consume
counters.
Source: Prosser, Hybrid algorithms for the constraint satisfaction problem (1993), conflict-directed
backjumping.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import PreparedRequest
from topobus.engine.allocation.results import Grant
from topobus.engine.allocation.values import DeviceId

__all__ = ["ANYTHING", "ConflictSet", "blames", "without"]

ANYTHING = -1
"""Every level may be to blame."""


class ConflictSet:
    """The grants that may keep a request from a device, computed once for each visit.

    Cost: O(grants).
    """

    def __init__(self, request: PreparedRequest, grants: Sequence[Sequence[Grant]]) -> None:
        self._by_device: dict[DeviceId, int] = {}
        self._constrained = 0
        self._counted = 0
        constraints = frozenset(request.constraints)
        for level, grant in enumerate(chain.from_iterable(grants)):
            bit = 1 << level
            self._by_device[grant.candidate.id] = self._by_device.get(grant.candidate.id, 0) | bit
            if grant.request.claim_index == request.claim_index and not constraints.isdisjoint(
                grant.request.constraints
            ):
                self._constrained |= bit
            if grant.candidate.device.consumes_counters:
                self._counted |= bit

    def holding(self, candidate: Candidate) -> int:
        """Return the levels that hold the device, or a share of it."""
        return self._by_device.get(candidate.id, 0)

    def refusing(self, candidate: Candidate) -> int:
        """Return the levels that may have made a free device unfit."""
        return (
            self.holding(candidate) | self._constrained | (self._counted if candidate.device.consumes_counters else 0)
        )


def blames(blame: int, level: int) -> bool:
    """Say whether a conflict set contains a level.

    >>> blames(0b101, 0), blames(0b101, 1), blames(ANYTHING, 7)
    (True, False, True)
    """
    return bool(blame >> level & 1)


def without(blame: int, level: int) -> int:
    """Remove a level whose choices were all tried.

    >>> without(0b101, 0), without(ANYTHING, 0) < 0
    (4, True)
    """
    return blame & ~(1 << level)
