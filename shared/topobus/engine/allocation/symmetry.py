"""Finds devices that the rest of a search cannot distinguish, so that a failure is not repeated for
each of them.

Two devices are equivalent from a request on when every later request selects both or neither and no
other check distinguishes them: taints, attributes under a constraint, capacity, counters. If the
search failed with one of them, it fails with the other. It also fails again when it returns to the
same request with equivalent devices in use. Only failures are deduced, so the first solution stays
the first.

Cost: O(candidates x remaining requests) once for each request, and only in searches that turn out
to be hard.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain

from topobus.engine.allocation.constraints import attribute_values
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import Alternatives, PreparedRequest
from topobus.engine.allocation.results import Grant
from topobus.engine.allocation.values import AllocationInput, DeviceId

__all__ = ["Symmetry"]


class Symmetry:
    """Classes of equal devices, from each request on."""

    def __init__(
        self,
        given: AllocationInput,
        requests: Sequence[Sequence[Alternatives]],
        is_selected: Callable[[PreparedRequest, Candidate], bool | None],
    ) -> None:
        self._given = given
        self._requests = requests
        self._is_selected = is_selected
        self._classes: dict[tuple[int, int], dict[Candidate, int | None]] = {}
        self._numbers: dict[Hashable, int] = {}

    def class_of(self, claim: int, request: int, candidate: Candidate) -> int | None:
        """Number the set of devices that are equal to this one from a request on.

        None when no later request wants it.
        """
        classes = self._classes.setdefault((claim, request), {})
        if candidate not in classes:
            classes[candidate] = self._classify(claim, request, candidate)
        return classes[candidate]

    def signature(self, claim: int, request: int, grants: Sequence[Sequence[Grant]]) -> Hashable:
        """Describe the devices in use, as far as the requests from this one on can distinguish
        them.

        The claim's own devices are separate, because only they matter for admin access.
        """
        return (
            len(grants[claim]) if claim < len(grants) else 0,
            *(self._gone(claim, request, part) for part in self._parts(claim, grants)),
        )

    def _parts(self, claim: int, grants: Sequence[Sequence[Grant]]) -> Iterable[Iterable[Grant]]:
        return chain.from_iterable(grants[:claim]), grants[claim] if claim < len(grants) else ()

    def _gone(self, claim: int, request: int, grants: Iterable[Grant]) -> Hashable:
        grants_of_group: list[tuple[int, str, tuple[tuple[str, int], ...]]] = []
        for grant in grants:
            number = self.class_of(claim, request, grant.candidate)
            if number is not None:
                # A device that is shared by capacity stays itself: what is left of
                # it depends on all that it gave.
                identity = str(grant.candidate.id) if grant.is_shared else ""
                grants_of_group.append(
                    (number, identity, tuple(sorted((name, amount.nano) for name, amount in grant.amounts.items())))
                )
        return tuple(sorted(grants_of_group))

    def _classify(self, claim: int, request: int, candidate: Candidate) -> int | None:
        verdicts: list[Hashable] = []
        attributes: set[str] = set()
        for index in range(claim, len(self._requests)):
            for alternatives in self._requests[index][request if index == claim else 0 :]:
                for alternative in alternatives:
                    verdict = self._is_selected(alternative, candidate)
                    verdicts.append(candidate.id if verdict is None else verdict)
            for constraint in self._given.claims[index].spec.devices.constraints:
                attributes.update(name for name in (constraint.match_attribute, constraint.distinct_attribute) if name)
        if not any(verdicts) and not candidate.device.consumes_counters:
            return None
        device, usage = candidate.device, self._given.usage
        return self._numbers.setdefault(
            (
                tuple(verdicts),
                tuple(attribute_values(candidate, name) for name in sorted(attributes)),
                tuple((taint.key, taint.value, taint.effect) for taint in device.taints),
                _capacity(candidate),
                (candidate.id[:2], repr(device.consumes_counters)) if device.consumes_counters else None,
                bool(device.allow_multiple_allocations),
                candidate.id in usage.holders,
                candidate.id in usage.excluded,
                tuple(candidate.id in claim_to_allocate.outside for claim_to_allocate in self._given.claims),
                _amounts(usage.consumed, candidate.id),
            ),
            len(self._numbers),
        )


def _capacity(candidate: Candidate) -> Hashable:
    return tuple(
        (name, amount.nano, repr(candidate.device.capacity[name].request_policy))
        for name, amount in sorted(candidate.capacity.items())
    )


def _amounts(consumed: Mapping[DeviceId, Mapping[str, object]], device: DeviceId) -> Hashable:
    return device if device in consumed else None
