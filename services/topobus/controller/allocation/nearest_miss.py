"""Where a search that failed got furthest: the point with the most devices found, and what each device failed there.

Flows in: each dead end of a search. Flows out: the reasons of the nearest one. A search meets thousands of dead ends and nearly all of them say less than another
one does, so only the one after the most devices is looked at, at the moment when it is met: later the search has given its devices back.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.controller.allocation.device_checks import DeviceChecks
from topobus.controller.allocation.miss_reasons import Blocker, describe_miss
from topobus.controller.allocation.pools import Candidate, Pool
from topobus.controller.allocation.requests import PreparedRequest
from topobus.controller.allocation.values import AllocationInput
from topobus.domain.outcome import Reason

__all__ = ["NearestMiss"]


class NearestMiss:
    """The dead end of one search that is nearest to a solution; of equals the first."""

    def __init__(self, candidates: Sequence[Candidate], checks: DeviceChecks) -> None:
        self._candidates = candidates
        self._checks = checks
        self._granted = -1
        self._request: PreparedRequest | None = None
        self._found_count = 0
        self._blockers: tuple[tuple[Candidate, Blocker | None], ...] = ()

    def note(self, request: PreparedRequest, found_count: int) -> None:
        """Take in a dead end: the request that ran out of candidates, with so many of its devices found.

        Cost: explains every candidate when the dead end is the nearest so far, else a sum over the claims.
        """
        granted = sum(len(grants) for grants in self._checks.grants)
        if granted <= self._granted:
            return
        self._granted, self._request, self._found_count = granted, request, found_count
        self._blockers = tuple((candidate, self._checks.explain(request, candidate)) for candidate in self._candidates)

    def describe(self, given: AllocationInput, pools: Sequence[Pool]) -> tuple[Reason, ...]:
        """Say why the claims do not fit: the summary first, then what stood in the way; without a dead end, that every alternative is too large."""
        return describe_miss(given, pools, self._request, self._found_count, self._blockers)
