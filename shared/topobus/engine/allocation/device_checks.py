"""The checks on one device, in upstream's order, and the grants that a search holds at a point.

The search calls `take` for a device, then grants it or undoes the take. The order of the checks
decides which error is reported first, so it is part of the result.
Source: docs/knowledge/dynamic-resource-allocation.md#the-search.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from topobus.engine.allocation.capacity import RemainingCounters, amounts_taken, fits_capacity, shortage
from topobus.engine.allocation.constraints import ActiveConstraint, DistinctAttribute, make_constraint
from topobus.engine.allocation.miss_reasons import OTHER_CLASS, OUTSIDE, Blocker
from topobus.engine.allocation.pools import Candidate, Pool
from topobus.engine.allocation.requests import FaultError, PreparedRequest
from topobus.engine.allocation.results import Grant
from topobus.engine.allocation.tolerations import SILENT_TAINT
from topobus.engine.allocation.values import (
    AllocationInput,
    DeviceId,
    Gate,
    Mode,
)
from topobus.engine.cel.seam import Selector, SelectorCompiler, SelectorError
from topobus.engine.health.silence import SERVICE_SILENT
from topobus.formats.kubernetes.slices import health_reason
from topobus.formats.kubernetes.tolerations import tolerates
from topobus.values.node_text import first_of
from topobus.values.outcome import Reason
from topobus.values.quantity import Quantity

__all__ = ["DeviceChecks"]


class DeviceChecks:
    """What is selected, in use, taken and granted during one search."""

    def __init__(self, given: AllocationInput, pools: tuple[Pool, ...], compiler: SelectorCompiler) -> None:
        self.grants: tuple[list[Grant], ...] = tuple([] for _ in given.claims)
        self._given = given
        self._outside = tuple(claim.outside for claim in given.claims)
        self._pools = pools
        self._compiler = compiler
        self._selectors: dict[str, Selector | SelectorError] = {}
        self._verdicts: dict[tuple[str, Candidate], bool | SelectorError] = {}
        self._amounts: dict[tuple[PreparedRequest, Candidate], dict[str, Quantity] | None] = {}
        self._is_corrected = given.mode is Mode.CORRECTED
        self._keeps_counters = given.keeps_counters and not self._is_corrected
        self._has_partitions = Gate.PARTITIONABLE_DEVICES in given.gates
        self._has_taints = Gate.DEVICE_TAINTS in given.gates
        self._has_binding = Gate.BINDING_CONDITIONS in given.gates
        self._has_shares = Gate.CONSUMABLE_CAPACITY in given.gates
        self._has_lists = Gate.LIST_ATTRIBUTES in given.gates
        self._held: dict[DeviceId, list[int]] = {}
        self._sharing: dict[DeviceId, list[Mapping[str, Quantity]]] = {}
        self._counters = RemainingCounters(pools, given.usage, is_corrected=self._is_corrected)
        self._constraints: tuple[tuple[ActiveConstraint, ...], ...] = tuple(
            tuple(
                made
                for constraint in claim.spec.devices.constraints
                if (made := make_constraint(constraint, given.gates, given.mode)) is not None
            )
            for claim in given.claims
        )

    def afresh(self) -> DeviceChecks:
        """Return checks of the same input that hold nothing.

        The selectors' verdicts are kept.
        """
        checks = DeviceChecks(self._given, self._pools, self._compiler)
        checks._selectors, checks._verdicts = self._selectors, self._verdicts
        checks.is_reversible = self.is_reversible
        return checks

    def is_in_use(self, request: PreparedRequest, candidate: Candidate) -> bool:
        """Say whether the device is taken. For admin access only a device of its own claim counts
        as taken.
        """
        if candidate.id in self._given.usage.excluded or candidate.id in self._outside[request.claim_index]:
            return True
        held = self._held.get(candidate.id)
        if request.is_admin:
            return bool(held) and request.claim_index in (held or ())
        return bool(held) or candidate.id in self._given.usage.holders or self._has_old_shares(candidate)

    def _has_old_shares(self, candidate: Candidate) -> bool:
        """Say whether shares are held of a device that its driver no longer shares.

        Upstream allocates it whole, so mode `compatible` does as well.
        """
        return self._is_corrected and candidate.id in self._given.usage.consumed and not self.is_shared(candidate)

    def is_selected(self, request: PreparedRequest, candidate: Candidate) -> bool:
        """Say whether class and request select the device, and the node can reach it."""
        if candidate.device.binding_conditions and not self._has_binding:
            return False
        verdict = request.verdicts.get(candidate)
        if verdict is None:
            verdict = self._failing_selector(request, candidate) is None and candidate.reaches(self._given.node)
            request.verdicts[candidate] = verdict
        return verdict

    def _failing_selector(self, request: PreparedRequest, candidate: Candidate) -> Blocker | None:
        """Name the first selector that refuses the device: the class's, then the request's."""
        for is_of_class, selectors in ((True, request.device_class.selectors), (False, request.selectors)):
            for index, selector in enumerate(selectors):
                expression = selector.cel.expression if selector.cel is not None else ""
                verdict = self._verdict(expression, candidate)
                if isinstance(verdict, SelectorError):
                    owner = f"class {request.class_name}" if is_of_class else ""
                    raise _selector_fault(request, candidate, owner, index, expression, verdict)
                if not verdict:
                    return (
                        Blocker(OTHER_CLASS, "")
                        if is_of_class
                        else Blocker("selector", f"selector #{index} is false: {expression}")
                    )
        return None

    def _verdict(self, expression: str, candidate: Candidate) -> bool | SelectorError:
        key = (expression, candidate)
        verdict = self._verdicts.get(key)
        if verdict is None:
            selector = self._selectors.get(expression)
            if selector is None:
                selector = self._selectors[expression] = self._compiler.compile(expression)
            problem = candidate.unreadable[self._has_lists]
            if problem and not isinstance(selector, SelectorError):
                selector = SelectorError(f"cannot be evaluated: {problem}")
            verdict = self._verdicts[key] = (
                selector if isinstance(selector, SelectorError) else selector.matches(candidate.facts)
            )
        return verdict

    def _amounts_of(self, request: PreparedRequest, candidate: Candidate) -> dict[str, Quantity] | None:
        key = (request, candidate)
        if key not in self._amounts:
            self._amounts[key] = amounts_taken(candidate, request.capacity)
        return self._amounts[key]

    def would_select(self, request: PreparedRequest, candidate: Candidate) -> bool | None:
        """Say whether a device is selected, without ending the search.

        None when its selector fails.
        """
        try:
            return self.is_selected(request, candidate)
        except FaultError:
            return None

    def can_count(self, request: PreparedRequest, candidate: Candidate) -> bool | None:
        """Say whether a device could serve the request by itself, constraints and counters aside.

        None when its selector fails.
        """
        if self.is_in_use(request, candidate):
            return False
        verdict = self.would_select(request, candidate)
        return self.is_large_enough(request, candidate) if verdict else verdict

    def count_at_most(self, request: PreparedRequest, candidates: Sequence[Candidate]) -> int:
        """Count how many devices the request can have at most, constraints aside.

        A device whose selector fails counts.
        """
        usable = [
            candidate
            for candidate in candidates
            if self.can_count(request, candidate) is not False and self._untolerated(request, candidate) is None
        ]
        paying = [candidate for candidate in usable if self._pays_counters(request, candidate)]
        return len(usable) - len(paying) + self._counters.count_at_most(paying)

    def could_take(self, request: PreparedRequest, candidate: Candidate) -> bool:
        """Say whether a device could serve the request if this search had made no grants.

        Constraints and counters aside.
        """
        usage = self._given.usage
        if (
            candidate.id in usage.excluded
            or candidate.id in usage.holders
            or candidate.id in self._outside[request.claim_index]
        ):
            return False
        if self._has_old_shares(candidate) or not self.would_select(request, candidate):
            return False
        return self._untolerated(request, candidate) is None and self.is_large_enough(request, candidate)

    def constraint_states(self, claim_index: int) -> tuple[Hashable, ...]:
        """Return the state of each of a claim's constraints."""
        return (
            tuple(constraint.state for constraint in self._constraints[claim_index])
            if claim_index < len(self._constraints)
            else ()
        )

    @cached_property
    def is_reversible(self) -> bool:
        """Say whether backtracking restores everything. It does in mode `corrected`, and where none
        of upstream's defects applies.
        """
        return self._is_corrected or not (
            any(
                isinstance(constraint, DistinctAttribute)
                for constraints in self._constraints
                for constraint in constraints
            )
            or any(
                candidate.has_list or (self._keeps_counters and bool(candidate.device.consumes_counters))
                for pool in self._pools
                for candidate in pool.candidates
            )
        )

    def is_large_enough(self, request: PreparedRequest, candidate: Candidate) -> bool:
        """Say whether the amounts asked for fit into what is left of the device."""
        if not self._has_shares:
            return True
        used, shared = self._given.usage.consumed.get(candidate.id), self._sharing.get(candidate.id)
        if not used and not shared and request.capacity is None and not candidate.has_policies:
            return True  # it takes the whole device, which is there
        amounts = self._amounts_of(request, candidate)
        if amounts is None:
            return False
        return fits_capacity(candidate, amounts, used or {}, *(shared or ()))

    def _shortage(self, request: PreparedRequest, candidate: Candidate) -> str:
        in_use = (self._given.usage.consumed.get(candidate.id, {}), *self._sharing.get(candidate.id, ()))
        return shortage(candidate, self._amounts_of(request, candidate), *in_use)

    def is_shared(self, candidate: Candidate) -> bool:
        """Say whether several requests may have the device, by capacity."""
        return self._has_shares and bool(candidate.device.allow_multiple_allocations)

    def _pays_counters(self, request: PreparedRequest, candidate: Candidate) -> bool:
        """Say whether a grant takes counters. A shared device takes them once.

        kubernetes/kubernetes#140729: upstream takes counters for admin access, which holds nothing.
        Mode `compatible` does so as well.
        """
        if not candidate.device.consumes_counters or (request.is_admin and self._is_corrected):
            return False
        return not (
            self.is_shared(candidate)
            and (candidate.id in self._given.usage.consumed or self._sharing.get(candidate.id))
        )

    def take(self, request: PreparedRequest, candidate: Candidate, *, is_trial: bool = False) -> Blocker | None:
        """Take counters and constraints for a selected device that is not in use, so that it can be
        granted, or name the blocker and take nothing.

        kubernetes/kubernetes#140436: upstream before 1.36.3 keeps the counters of a device that a
        taint or a constraint then refuses, so mode `compatible` does as well, except for a trial.
        """
        if candidate.device.consumes_counters and not self._has_partitions:
            return Blocker("counters", f"{Gate.PARTITIONABLE_DEVICES} is off")
        pays = self._pays_counters(request, candidate)
        if pays and not self._counters.take(candidate):
            return Blocker("counters", "the card's shared counters are used up")
        blocker = self._untolerated(request, candidate) or self._add_constraints(request, candidate)
        if blocker is None and not self.is_large_enough(request, candidate):
            self._remove_constraints(request)
            blocker = Blocker("capacity", self._shortage(request, candidate))
        if blocker is not None and pays and (is_trial or not self._keeps_counters):
            self._counters.give_back(candidate)
        return blocker

    def _explain_use(self, request: PreparedRequest, candidate: Candidate) -> Blocker:
        if candidate.id in self._outside[request.claim_index]:
            return Blocker(OUTSIDE, self._outside[request.claim_index][candidate.id])
        if candidate.id in self._given.usage.excluded:
            return Blocker("excluded", self._given.usage.excluded[candidate.id])
        if self._has_old_shares(candidate):
            return Blocker("in-use", "shares of it are held from when it could be shared")
        holder = self._given.usage.holders.get(candidate.id)
        return Blocker("in-use", f"held by {holder}" if holder else "taken by another request of the same claims")

    def _explain_counters(self, candidate: Candidate) -> Blocker | None:
        """Name who holds what the device lacks. None when the claims themselves take it."""
        names: dict[str, list[str]] = {}
        for device in self._counters.users_of(candidate):
            names.setdefault(self._given.usage.holders.get(device, "those who share it"), []).append(device.device)
        held = [
            f"{first_of(devices, 4)} {'is' if len(devices) == 1 else 'are'} held by {holder}"
            for holder, devices in names.items()
        ]
        return Blocker("counters", "; ".join(held)) if held else None

    def _untolerated(self, request: PreparedRequest, candidate: Candidate) -> Blocker | None:
        if not self._has_taints:
            return None
        for taint in candidate.device.taints:
            if taint.key == SILENT_TAINT:
                since = f" since {taint.value}" if taint.value else ""
                return Blocker(
                    SERVICE_SILENT, f"their service does not answer{since}: whether they are well is unknown"
                )
            if taint.effect in ("NoSchedule", "NoExecute") and not any(
                tolerates(toleration, taint) for toleration in request.tolerations
            ):
                reason = health_reason(candidate.device, taint)
                why = f" ({reason})" if reason else ""
                return Blocker("tainted", f"tainted {taint.key}={taint.value}:{taint.effect}{why}")
        return None

    def _add_constraints(self, request: PreparedRequest, candidate: Candidate) -> Blocker | None:
        constraints = self._constraints[request.claim_index]
        for count, index in enumerate(request.constraints):
            if not constraints[index].add(candidate, request.base):
                for earlier in request.constraints[:count]:
                    constraints[earlier].remove(request.base)
                return Blocker("constraint", f"constraint #{index} wants {constraints[index].wanted}")
        return None

    def _remove_constraints(self, request: PreparedRequest) -> None:
        for index in request.constraints:
            self._constraints[request.claim_index][index].remove(request.base)

    def grant(self, claim_index: int, request: PreparedRequest, candidate: Candidate) -> None:
        """Record a device that `take` accepted."""
        is_shared = self.is_shared(candidate)
        amounts = (self._amounts_of(request, candidate) or {}) if is_shared else {}
        if is_shared:
            self._sharing.setdefault(candidate.id, []).append(amounts)
        else:
            self._held.setdefault(candidate.id, []).append(claim_index)
        self.grants[claim_index].append(Grant(request, candidate, amounts, is_shared))

    def take_back(self, claim_index: int, request: PreparedRequest, candidate: Candidate) -> None:
        """Undo the newest grant.

        kubernetes/kubernetes#134100: upstream before 1.36.3 does not give back the counters of a device
        that is shared by capacity.
        """
        self.grants[claim_index].pop()
        (self._sharing if self.is_shared(candidate) else self._held)[candidate.id].pop()
        if self._pays_counters(request, candidate) and not (self._keeps_counters and self.is_shared(candidate)):
            self._counters.give_back(candidate)
        self._remove_constraints(request)

    def take_all_back(self) -> None:
        """Undo all grants, the newest first."""
        for claim_index in reversed(range(len(self.grants))):
            for grant in reversed(tuple(self.grants[claim_index])):
                self.take_back(claim_index, grant.request, grant.candidate)

    def explain(self, request: PreparedRequest, candidate: Candidate) -> Blocker | None:
        """Name what prevents the search from taking a candidate in its present state.

        Nothing stays taken. The reason is for people: a device of another class is reported as such
        first, though the search checks for a holder before a selector.
        """
        try:
            failing = self._failing_selector(request, candidate)
        except FaultError as err:  # a device that the search itself never had to look at
            failing = Blocker("selector", err.reason.message)
        if failing is not None and failing.code == OTHER_CLASS:
            return failing
        if self.is_in_use(request, candidate):
            return self._explain_use(request, candidate)
        if candidate.device.binding_conditions and not self._has_binding:
            return Blocker("gate", f"{Gate.BINDING_CONDITIONS} is off")
        if failing is not None:
            return failing
        if not candidate.reaches(self._given.node):
            return Blocker("node", "it serves other nodes")
        if not self.is_large_enough(request, candidate):
            return Blocker("capacity", self._shortage(request, candidate))
        blocker = self.take(request, candidate, is_trial=True)
        if blocker is not None and blocker.code == "counters":
            return self._explain_counters(candidate) or blocker
        if blocker is None:
            self._remove_constraints(request)
            if self._pays_counters(request, candidate):
                self._counters.give_back(candidate)
        return blocker


def _selector_fault(
    request: PreparedRequest,
    candidate: Candidate,
    owner: str,
    index: int,
    expression: str,
    error: SelectorError,
) -> FaultError:
    """Report a selector that fails, and whose it is: the claim's own without an owner."""
    place = f" (line {error.line}, column {error.column})" if error.line else ""
    device = "" if error.line else str(candidate.id)
    message = f"{request.where}: {owner}{' ' if owner else ''}selector #{index}{place} {error.message}"
    return FaultError(
        Reason(
            code="selector-error",
            message=f"{message} on {device}" if device else message,
            facts={
                "claim": request.claim,
                "request": request.name,
                "owner": owner or f"claim {request.claim}",
                "selector": index,
                "expression": expression,
                "line": error.line,
                "column": error.column,
                "device": device,
            },
        )
    )
