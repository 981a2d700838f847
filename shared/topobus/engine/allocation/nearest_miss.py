"""Measures what claims that do not fit lack: which request cannot be served beside those before it,
and the most devices that it can have at once.

The number is measured: so many devices were found together, and with one more nothing was found, or
a count shows that there cannot be one more. Where measuring takes more work than a refusal is
worth, the number is a lower bound and marked as one. Searches that fit are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from topobus.engine.allocation.device_checks import DeviceChecks
from topobus.engine.allocation.miss_reasons import LIMIT, Blocker, Miss
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import Alternatives, PreparedRequest
from topobus.formats.kubernetes.limits import MAX_LIST

__all__ = ["Attempt", "NearestMiss", "Requests"]

Requests = tuple[tuple[Alternatives, ...], ...]
"""Prepared requests: for each claim, for each request, its alternatives."""

_STEPS = 2_000
"""Work of all searches for one miss together, in steps of a search: some twenty milliseconds."""


class Attempt(NamedTuple):
    """A search for part of the requests."""

    checks: DeviceChecks
    """What it holds: all that was asked when it fits."""
    is_fit: bool | None
    """None when the budget was spent before that was known."""
    work: int


@dataclass
class NearestMiss:
    """Finds what claims lack."""

    requests: Requests
    candidates: Sequence[Candidate]
    fresh: DeviceChecks
    """Checks that hold nothing."""
    attempt: Callable[[Requests, int], Attempt]
    """Searches for requests, with so many steps at most."""
    left: int = field(default_factory=lambda: _STEPS)

    def find(self) -> Miss:
        """Find the first request that cannot be served, and measure what it can have.

        Of alternatives the one that lacks least.
        """
        places = [(claim, number) for claim, requests in enumerate(self.requests) for number in range(len(requests))]
        # All of them do not fit, none of them does.
        fits, fails, is_proved = 0, len(places), True
        held = self.fresh
        while fails - fits > 1:
            middle = (fits + fails) // 2
            attempt = self._try(self._before(*places[middle]))
            if attempt.is_fit:
                fits, held = middle, attempt.checks
            else:
                fails, is_proved = middle, attempt.is_fit is not None
        claim, number = places[fits]
        before = self._before(claim, number)
        misses = [
            self._measure(before, claim, request, held, is_proved=is_proved) for request in self.requests[claim][number]
        ]
        return min(misses, key=lambda miss: miss.request.count - miss.found_count)

    def _before(self, claim: int, number: int) -> Requests:
        return (*self.requests[:claim], self.requests[claim][:number])

    def _measure(
        self, before: Requests, claim: int, request: PreparedRequest, held: DeviceChecks, *, is_proved: bool
    ) -> Miss:
        """Find the largest number of the request's devices that can be had beside the requests
        before it.

        Shapes: held — what those before it may have; is_proved — the request as it is was searched
                to the end.
        """
        most = min(request.count, self.fresh.count_at_most(request, self.candidates))
        proved = min(most, request.count - 1) if is_proved else most
        fitting, tried = 0, min(most, max(request.count - 1, 0))
        part = request
        number = tried
        while fitting < tried:
            wanted = replace(request, count=number, everything=None)
            attempt = self._try((*before[:claim], (*before[claim], (wanted,))))
            if attempt.is_fit:
                fitting, held, part = number, attempt.checks, wanted
            else:
                tried = number - 1
                proved = tried if attempt.is_fit is False else proved
            number = (fitting + tried + 1) // 2
        return Miss(request, fitting, is_exact=fitting >= proved, blockers=self._blockers(request, part, held))

    def _blockers(
        self, request: PreparedRequest, part: PreparedRequest, held: DeviceChecks
    ) -> tuple[tuple[Candidate, Blocker | None], ...]:
        """Name the blocker of each device that the request does not have.

        None for each device that it has.
        """
        own = {grant.candidate.id for grant in held.grants[request.claim_index] if grant.request is part}
        is_full = len(held.grants[request.claim_index]) >= MAX_LIST
        return tuple(
            (
                candidate,
                None if candidate.id in own else held.explain(request, candidate) or (LIMIT if is_full else None),
            )
            for candidate in self.candidates
        )

    def _try(self, requests: Requests) -> Attempt:
        # Half of what is left: what is asked next is easier, as a rule.
        attempt = self.attempt(requests, self.left // 2)
        self.left -= attempt.work
        return attempt
