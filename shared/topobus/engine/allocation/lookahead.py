"""Look-ahead for hard searches: checks whether the remaining requests can be served at all from the
devices that are left.

It checks necessary conditions only, each by counting: enough free devices for each request and for
all together; for `matchAttribute`, one value that enough devices of every request have; for
`distinctAttribute`, enough different values. So a positive answer proves nothing, and a negative
one ends a branch that upstream would search to its end with the same result.

Cost: O(remaining requests x devices) for each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from topobus.engine.allocation.constraints import attribute_values
from topobus.engine.allocation.device_checks import DeviceChecks
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import Alternatives, PreparedRequest
from topobus.engine.allocation.values import AllocationInput
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.formats.kubernetes.resource import Constraint

__all__ = ["Lookahead"]

Values = frozenset[tuple[str, Hashable]]
_Need = tuple[PreparedRequest, int, list[Candidate]]
"""A request without alternatives, how many devices it lacks, and those that are free for it."""


class Lookahead:
    """The look-ahead of one search."""

    def __init__(
        self,
        given: AllocationInput,
        requests: Sequence[Sequence[Alternatives]],
        candidates: Sequence[Candidate],
        checks: DeviceChecks,
    ) -> None:
        self._given = given
        self._requests = requests
        self._candidates = candidates
        self._checks = checks
        self._wanted: dict[PreparedRequest, list[Candidate]] = {}
        self._values: dict[tuple[str, Candidate], Values] = {}

    def is_applicable(self) -> bool:
        """Say whether a hopeless branch may be left at once.

        It may not where upstream would meet something other than a dead end there. At a claim's
        limit upstream jumps farther back. A selector that fails, or a constraint broken by "all
        devices", ends the search.
        """
        requests = [alternative for claim in self._requests for alternatives in claim for alternative in alternatives]
        return (
            all(
                sum(max(alternative.count for alternative in alternatives) for alternatives in claim) <= MAX_LIST
                for claim in self._requests
            )
            and not any(request.everything is not None and request.constraints for request in requests)
            and all(
                self._checks.would_select(request, candidate) is not None
                for request in requests
                for candidate in self._candidates
            )
        )

    def is_hopeless(self, claim: int, request: int, alternative: int, device: int) -> bool:
        """Say whether the rest cannot be served from here, whatever is chosen."""
        everything: list[_Need] = []
        for index in range(claim, len(self._requests)):
            is_current = index == claim
            needs: list[_Need] = []
            for number in range(request if is_current else 0, len(self._requests[index])):
                ways = self._requests[index][number]
                if is_current and number == request and (device or len(ways) == 1):
                    ways = (ways[alternative],)
                lacks = device if is_current and number == request else 0
                counted = [(way, way.count - lacks, self._free(way)) for way in ways if way.everything is None]
                if len(counted) < len(ways):
                    continue  # "all" takes what there is: its own check is exact
                if all(len(free) < count for _, count, free in counted):
                    return True
                if len(counted) == 1:
                    needs.append(counted[0])
            if self._breaks_constraint(index, needs, is_current=is_current):
                return True
            everything += needs
        return self._are_too_few(everything)

    def _free(self, request: PreparedRequest) -> list[Candidate]:
        """List the devices that could serve a request now, constraints and counters aside."""
        wanted = self._wanted.get(request)
        if wanted is None:
            wanted = self._wanted[request] = [
                candidate for candidate in self._candidates if self._checks.is_selected(request, candidate)
            ]
        return [
            candidate
            for candidate in wanted
            if not self._checks.is_in_use(request, candidate) and self._checks.is_large_enough(request, candidate)
        ]

    def _are_too_few(self, needs: Sequence[_Need]) -> bool:
        """Compare the number that all requests lack with the devices that are free for any of them.

        Requests that may share devices do not count.
        """
        exclusive = [
            (prepared_request, count, free) for prepared_request, count, free in needs if not prepared_request.is_admin
        ]
        devices = {candidate for _, _, free in exclusive for candidate in free}
        return not any(self._checks.is_shared(device) for device in devices) and sum(
            count for _, count, _ in exclusive
        ) > len(devices)

    def _breaks_constraint(self, claim: int, needs: Sequence[_Need], *, is_current: bool) -> bool:
        states = self._checks.constraint_states(claim) if is_current else ()
        for number, constraint in enumerate(self._given.claims[claim].spec.devices.constraints):
            concerned = [need for need in needs if number in need[0].constraints and need[1] > 0]
            if concerned:
                state = states[number] if is_current else None
                if constraint.match_attribute is not None and self._cannot_match(
                    constraint.match_attribute, concerned, state
                ):
                    return True
                if constraint.distinct_attribute is not None and self._cannot_differ(constraint, concerned, state):
                    return True
        return False

    def _cannot_match(self, attribute: str, needs: Sequence[_Need], state: Hashable) -> bool:
        possible = state if isinstance(state, frozenset) else frozenset(self._all_values(attribute, needs[0][2]))
        return not any(self._can_match(attribute, needs, value) for value in possible)

    def _can_match(self, attribute: str, needs: Sequence[_Need], value: tuple[str, Hashable]) -> bool:
        having = [
            (prepared_request, count, [device for device in free if value in self._values_of(attribute, device)])
            for prepared_request, count, free in needs
        ]
        return all(len(free) >= count for _, count, free in having) and not self._are_too_few(having)

    def _cannot_differ(self, constraint: Constraint, needs: Sequence[_Need], state: Hashable) -> bool:
        taken = state if isinstance(state, frozenset) else frozenset()
        attribute = constraint.distinct_attribute or ""
        left = {value for _, _, free in needs for value in self._all_values(attribute, free)} - taken
        return sum(count for _, count, _ in needs) > len(left)

    def _all_values(self, attribute: str, devices: Sequence[Candidate]) -> Iterator[tuple[str, Hashable]]:
        return (value for device in devices for value in self._values_of(attribute, device))

    def _values_of(self, attribute: str, device: Candidate) -> Values:
        key = (attribute, device)
        if key not in self._values:
            self._values[key] = attribute_values(device, attribute)
        return self._values[key]
