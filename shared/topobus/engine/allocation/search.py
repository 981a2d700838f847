"""The allocation search: a depth-first search over claims, requests and devices in order.

The first complete solution is the result.

Nothing is scored: the names of pools, slices and devices decide which device is tried first, so the
result equals that of kube-scheduler, except for the choice of CPUs (`cpu_policy`). The order of
checks on one device is also upstream's, since it decides which error is reported first. Source:
docs/knowledge/dynamic-resource-allocation.md#the-search.

The recursion runs on an explicit stack of generators: a pod with many claims would exceed Python's
call stack.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from enum import Enum
from functools import reduce
from operator import or_
from typing import NamedTuple

from topobus.engine.allocation.admission import has_heavy_selector
from topobus.engine.allocation.backjumping import (
    ANYTHING,
    ConflictSet,
    blames,
    without,
)
from topobus.engine.allocation.cpu_policy import with_policy_cpus
from topobus.engine.allocation.device_checks import DeviceChecks
from topobus.engine.allocation.lookahead import Lookahead
from topobus.engine.allocation.miss_reasons import describe_miss, summarize
from topobus.engine.allocation.nearest_miss import Attempt, NearestMiss, Requests
from topobus.engine.allocation.pools import (
    Candidate,
    Pool,
    PoolState,
    gather_pools,
)
from topobus.engine.allocation.requests import (
    FaultError,
    PreparedRequest,
    prepare,
)
from topobus.engine.allocation.results import assemble
from topobus.engine.allocation.symmetry import Symmetry
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    Fault,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.values.outcome import Reason, Refusal

__all__ = ["DEFAULT_STEP_BUDGET", "allocate"]

DEFAULT_STEP_BUDGET = 200_000
"""Work of one search on one node, in steps; looking ahead counts as well. A step costs some ten
microseconds, so this is two seconds: what is not found by then is worth an answer, not a wait."""

# Most searches end within a few dozen steps; only beyond these is it worth while to
# find out which devices are equal.
_HARD_STEPS = 256
# So many devices are not looked for before it is clear that they are there: one way
# down costs more than counting.
_MANY_DEVICES = 16
# The cost of a look-ahead: it counts this number of devices of one request in the time of a step.
_DEVICES_PER_STEP = 16
# A step takes some ten microseconds, so a search that was abandoned ends within a millisecond.
_STEPS_BETWEEN_LOOKS = 64
# Failures remembered at most: some 20 MB. What is forgotten is only proved again.
_REMEMBERED = 50_000


def allocate(
    given: AllocationInput,
    compiler: SelectorCompiler,
    *,
    step_budget: int = DEFAULT_STEP_BUDGET,
    is_clever: bool = True,
    is_brief: bool = False,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Find devices for all claims on one node, or explain why there are none.

    Shapes: is_clever — skip branches that are proved to fail; False takes every step that upstream
            takes, and gives the same answer later; is_brief — a miss comes without reasons, which
            cost more than the search; is_abandoned — asked every few steps: True when the caller no
            longer waits, and then the search gives up.
    Order: claims, requests and devices as given. The first complete solution wins, so equal inputs
            give equal answers.
    Errors: raises nothing for anything that a claim, class or slice can contain.
    Cost: O(devices x requests) selector evaluations. Steps grow exponentially in the worst case and
            end at the budget.
    """
    try:
        pools = gather_pools(given.slices, given.node, given.gates) if given.pools is None else given.pools
    except ValueError as err:
        return Fault(Reason(code="malformed-slice", message=f"node {given.node.name}: {err}"), 0, is_local=True)
    # A step that evaluates a heavy selector may take half a second.
    is_heavy = any(has_heavy_selector(claim.spec, compiler) for claim in given.claims)
    search = _Search(
        given,
        pools,
        DeviceChecks(given, pools, compiler),
        step_budget,
        is_abandoned,
        steps_between_looks=1 if is_heavy else _STEPS_BETWEEN_LOOKS,
        is_clever=is_clever,
        is_brief=is_brief,
    )
    try:
        return search.run()
    except FaultError as err:
        return Fault(err.reason, search.steps)
    except ValueError as err:  # a malformed quantity in a slice or claim
        return Fault(
            Reason(code="malformed-quantity", message=f"node {given.node.name}: {err}"), search.steps, is_local=True
        )


class _At(NamedTuple):
    """The position of the search: the claim, the request, the alternative, how many of its devices
    it has, and which candidate comes next.
    """

    claim: int = 0
    request: int = 0
    alternative: int = 0
    device: int = 0
    start: int = 0


class _End(Enum):
    """How a part of the search ended."""

    DONE = "done"
    MISS = "miss"
    TOO_LARGE = "too-large"
    """More results than a claim may have; another alternative may need fewer, but no other device
    can help."""


_Visit = Generator[tuple[_At, bool], _End, _End]


class _Search:
    """One search. Backtracking restores its state."""

    def __init__(
        self,
        given: AllocationInput,
        pools: tuple[Pool, ...],
        checks: DeviceChecks,
        step_budget: int,
        is_abandoned: Callable[[], bool],
        *,
        steps_between_looks: int,
        is_clever: bool,
        is_brief: bool,
    ) -> None:
        self.steps = 0
        self._work = 0
        self._given = given
        self._budget = step_budget
        self._is_abandoned = is_abandoned
        self._between_looks = steps_between_looks
        self._is_clever = is_clever
        self._has_invalid = any(pool.state is PoolState.INVALID for pool in pools)
        self._is_brief = is_brief and not self._has_invalid
        self._pools = pools
        self._candidates = tuple(
            candidate for pool in pools if pool.state is PoolState.READY for candidate in pool.candidates
        )
        self._checks = checks
        self._chosen: dict[tuple[int, int], int] = {}
        self._requests: Requests = ()
        self._can_prune = False
        self._may_conclude = False
        self._symmetry: Symmetry | None = None
        self._total = 0
        self._lookahead: Lookahead | None = None
        self._can_look_ahead = False
        self._failed: dict[Hashable, _End] = {}
        self._blame = ANYTHING
        """Which choices the newest miss is to be blamed on."""

    def run(self) -> Outcome:
        """Search until done, exhausted, or out of budget."""
        end = self._solve(prepare(self._given, self._pools, self._checks.is_selected, self._checks.is_large_enough))
        if end is None:
            return GaveUp(self.steps)
        if end is not _End.DONE:
            if self._is_brief:
                return NoFit((), self.steps)
            miss = NearestMiss(self._requests, self._candidates, self._checks.afresh(), self._attempt).find()
            reasons = describe_miss(self._given, self._pools, miss)
            if self._has_invalid:
                # The devices wanted may be there, but it is unknown: that is not "does not fit".
                return Fault(
                    Reason(code="pool-invalid", message=summarize(reasons), facts=reasons[0].facts),
                    self.steps,
                    is_local=True,
                )
            return NoFit(reasons, self.steps)
        grants = with_policy_cpus(self._given, self._candidates, self._checks)
        if isinstance(grants, Refusal):
            return NoFit(grants.reasons, self.steps)
        return Allocated(assemble(self._given, self._requests, self._chosen, grants), self.steps)

    def _solve(self, requests: Requests) -> _End | None:
        """Search for devices for all requests.

        None when the budget is spent before that is known.
        """
        self._requests = requests
        self._can_prune = self._is_clever and self._checks.is_reversible
        self._total = sum(len(requests_of_claim) for requests_of_claim in requests)
        ways = [alternative for claim in requests for alternatives in claim for alternative in alternatives]
        # A constraint that "all devices" break ends a search where it is met. With another of two
        # equal devices taken before, it may not be broken.
        self._may_conclude = self._can_prune and not any(
            request.everything is not None and request.constraints for request in ways
        )
        wanted = self._count_wanted() if self._may_conclude else 0
        if wanted > _MANY_DEVICES and self._is_brief and self._is_hopeless(_At()):
            return _End.MISS
        end, is_complete = self._walk(stops_at_miss=wanted > 1)
        if not is_complete:
            # The first way down found nothing. Before all others are tried: can any of them?
            self._checks.take_all_back()
            if not self._is_hopeless(_At()):
                self.steps = 0
                end, _ = self._walk()
        return end

    def _attempt(self, requests: Requests, budget: int) -> Attempt:
        """Search for a part of the requests, to find out what is lacking.

        It meets nothing that the search for all of them did not meet.
        """
        checks = self._checks.afresh()
        search = _Search(
            self._given,
            self._pools,
            checks,
            budget,
            self._is_abandoned,
            steps_between_looks=self._between_looks,
            is_clever=True,
            is_brief=True,
        )
        end = search._solve(requests)
        return Attempt(checks, None if end is None else end is _End.DONE, search._work)

    def _walk(self, *, stops_at_miss: bool = False) -> tuple[_End | None, bool]:
        """Run the visits on a stack. None when the budget is spent.

        With `stops_at_miss` it may end before it is complete: False then.
        """
        self.steps += 1
        stack: list[_Visit] = []
        visit = self._visit(_At(), is_inside=False)
        while True:
            if isinstance(visit, _At):
                at, is_inside = visit, False
            else:
                if not isinstance(visit, _End):
                    stack.append(visit)
                elif not stack:
                    return visit, True
                elif stops_at_miss and visit is _End.MISS:
                    return visit, False
                try:
                    at, is_inside = stack[-1].send(visit) if isinstance(visit, _End) else next(visit)
                except StopIteration as stop:
                    stack.pop()
                    visit = stop.value
                    continue
            self.steps += 1
            self._work += 1
            if self._work > self._budget or (self.steps % self._between_looks == 0 and self._is_abandoned()):
                return None, True
            visit = self._visit(at, is_inside=is_inside)

    def _visit(self, at: _At, *, is_inside: bool) -> _Visit | _At | _End:
        """Serve one more device: the end, where that is plain at once, the position where the search
        goes on with the same end, or else the visits that it takes.

        Shapes: is_inside — the visit has entered an alternative already.
        """
        if at.claim == len(self._requests):
            return _End.DONE
        is_hard = self._is_hard()
        if is_hard and self._is_hopeless(at):
            return self._miss(ANYTHING)
        if at.device or is_inside or not is_hard:
            return self._serve(at, is_inside=is_inside)
        return self._serve_once(at)

    def _serve_once(self, at: _At) -> _Visit:
        """Serve a request, unless that failed before with equal devices left."""
        symmetry = self._symmetry_now()
        key = (
            at.claim,
            at.request,
            symmetry.signature(at.claim, at.request, self._checks.grants),
            self._checks.constraint_states(at.claim),
        )
        known_end = self._failed.get(key)
        if known_end is not None:
            self._blame = ANYTHING
            return known_end
        served = self._serve(at, is_inside=False)
        if isinstance(served, _At):
            end = yield served, False
        else:
            end = served if isinstance(served, _End) else (yield from served)
        if end is not _End.DONE and len(self._failed) < _REMEMBERED:
            self._failed[key] = end
        return end

    def _serve(self, at: _At, *, is_inside: bool) -> _Visit | _At | _End:
        requests = self._requests[at.claim]
        if at.request == len(requests):
            return _At(at.claim + 1) if at.claim + 1 == len(self._requests) else self._serve_next_claim(at)
        alternatives = requests[at.request]
        if not is_inside and alternatives[0].alternative:
            return self._try_alternatives(at, len(alternatives))
        request = alternatives[at.alternative]
        if request.everything is not None and not request.everything:
            return self._miss(0)
        if at.device >= request.count:
            return _At(at.claim, at.request + 1)
        if len(self._checks.grants[at.claim]) + request.count - at.device > MAX_LIST:
            return _End.TOO_LARGE
        if request.everything is not None:
            return self._take_all(at, request, request.everything[at.device], is_inside=is_inside)
        return self._take_one(at, request, is_inside=is_inside)

    def _serve_next_claim(self, at: _At) -> _Visit:
        end = yield _At(at.claim + 1), False
        # Fewer devices for an earlier claim do not help a later one's limit,
        # but another choice there might.
        return self._miss(ANYTHING) if end is _End.TOO_LARGE else end

    def _try_alternatives(self, at: _At, count: int) -> _Visit:
        is_all_too_large = True
        blame = 0
        for index in range(count):
            self._chosen[at.claim, at.request] = index
            end = yield _At(at.claim, at.request, index), True
            if end is _End.DONE:
                return end
            is_all_too_large = is_all_too_large and end is _End.TOO_LARGE
            blame |= self._blame if end is _End.MISS else ANYTHING
        return _End.TOO_LARGE if is_all_too_large else self._miss(blame)

    def _take_all(self, at: _At, request: PreparedRequest, candidate: Candidate, *, is_inside: bool) -> _Visit:
        is_in_use = self._checks.is_in_use(request, candidate)
        blocker = None if is_in_use else self._checks.take(request, candidate)
        if blocker is not None and blocker.code == "constraint":
            raise FaultError(
                Reason(
                    code="constraint-on-all",
                    message=f"{request.where} asks for all devices, but {candidate.id} breaks a constraint: "
                    f"{blocker.detail}",
                    facts={"claim": request.claim, "request": request.name, "device": str(candidate.id)},
                )
            )
        if is_in_use or blocker is not None:
            return self._miss(
                ConflictSet(request, self._checks.grants).refusing(candidate) if self._is_hard() else ANYTHING
            )
        self._checks.grant(at.claim, request, candidate)
        end = yield _At(at.claim, at.request, at.alternative, at.device + 1), is_inside
        if end is not _End.DONE:
            self._checks.take_back(at.claim, request, candidate)
            self._blame = without(self._blame, self._level())
        return end

    def _take_one(self, at: _At, request: PreparedRequest, *, is_inside: bool) -> _Visit:
        # For the last device counting shows no more than trying the devices one by one.
        is_last = at.device + 1 == request.count
        missing = self._count_missing(at, request) if self._can_prune and not is_last else 0
        failed: set[int | None] = set()
        suspects = ConflictSet(request, self._checks.grants) if self._is_hard() else None
        # The devices before `start` were passed by with the request's device before this one.
        blame = ANYTHING if suspects is None else 1 << self._level() - 1 if at.device else 0
        if suspects is not None and missing:
            blame |= self._blame_for_too_few(at, request, suspects)
        for index in range(at.start, 0 if missing else len(self._candidates)):
            candidate = self._candidates[index]
            if (
                self._checks.is_in_use(request, candidate)
                or not self._checks.is_selected(request, candidate)
                or not self._checks.is_large_enough(request, candidate)
            ):
                if suspects is not None and self._checks.would_select(request, candidate):
                    blame |= suspects.holding(candidate)
                continue
            if failed and self._symmetry_now().class_of(at.claim, at.request, candidate) in failed:
                continue
            if self._checks.take(request, candidate) is not None:
                blame |= suspects.refusing(candidate) if suspects is not None else 0
                continue
            self._checks.grant(at.claim, request, candidate)
            end = yield _At(at.claim, at.request, at.alternative, at.device + 1, index + 1), is_inside
            if end is _End.DONE:
                return end
            self._checks.take_back(at.claim, request, candidate)
            if end is _End.TOO_LARGE:
                return end
            if self._can_look_ahead:
                level = self._level()
                if not blames(self._blame, level):
                    return end  # no other device here would have helped
                blame |= without(self._blame, level)
            if self._is_hard():
                failed.add(self._symmetry_now().class_of(at.claim, at.request, candidate))
        return self._miss(blame)

    def _miss(self, blame: int) -> _End:
        """End a part of the search, and record the conflict set of the miss."""
        self._blame = blame
        return _End.MISS

    def _level(self) -> int:
        """Number the next choice."""
        return sum(len(grants) for grants in self._checks.grants)

    def _blame_for_too_few(self, at: _At, request: PreparedRequest, suspects: ConflictSet) -> int:
        """Return the conflict set of the devices that the request could have had."""
        wanted = (
            candidate for candidate in self._candidates[at.start :] if self._checks.would_select(request, candidate)
        )
        return reduce(or_, map(suspects.holding, wanted), 0)

    def _count_missing(self, at: _At, request: PreparedRequest) -> int:
        """Count how many devices the request lacks however they are combined.

        0 when that is unknown. A selector that fails ends a search where it is met, so no
        conclusion is drawn past one.
        """
        wanted = request.count - at.device
        for index in range(at.start, len(self._candidates)):
            verdict = self._checks.can_count(request, self._candidates[index])
            if verdict is None:
                return 0
            wanted -= verdict
            if wanted == 0:
                return 0
        return wanted

    def _count_wanted(self) -> int:
        """Count the devices wanted at least: for a single device, counting shows no more than
        trying the devices one by one.
        """
        return sum(
            min(alternative.count for alternative in alternatives) for claim in self._requests for alternatives in claim
        )

    def _is_hard(self) -> bool:
        return self._may_conclude and self.steps > _HARD_STEPS

    def _is_hopeless(self, at: _At) -> bool:
        """Look ahead, where that is allowed."""
        if self._lookahead is None:
            self._lookahead = Lookahead(self._given, self._requests, self._candidates, self._checks)
            self._can_look_ahead = self._lookahead.is_applicable()
        if not self._can_look_ahead:
            return False
        self._work += len(self._candidates) * self._total // _DEVICES_PER_STEP
        return self._lookahead.is_hopeless(at.claim, at.request, at.alternative, at.device)

    def _symmetry_now(self) -> Symmetry:
        if self._symmetry is None:
            self._symmetry = Symmetry(self._given, self._requests, self._checks.would_select)
        return self._symmetry
