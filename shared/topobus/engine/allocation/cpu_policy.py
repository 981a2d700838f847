"""Chooses which CPUs a request gets: those that kubelet's static policy would take, out of all that
could serve the request.

A search has found that the claims fit. It takes the first devices that fit, which leaves half cores
and half caches behind. So its CPUs are exchanged for those of the policy, or refused
(full-pcpus-only). Only CPUs that are allocated as whole devices by count are exchanged: requests
for "all devices", admin access or distinct values determine their own CPUs, and of a group the node
chooses.
Source: docs/knowledge/kubelet-cpu-assignment.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.cpus.exclusive_choice import choose_exclusive_cpus
from topobus.engine.alignment.planning.node_view import cpu_name, cpu_of_name
from topobus.engine.allocation.constraints import attribute_values
from topobus.engine.allocation.device_checks import DeviceChecks
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import PreparedRequest
from topobus.engine.allocation.results import Grant
from topobus.engine.allocation.values import AllocationInput, CpuPolicy, DeviceId, Gate, Node
from topobus.values.dra_names import CPU_CLASS, DRIVER, pool_of_class
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal

__all__ = ["is_policy_cpu", "reserved_cpus", "with_policy_cpus"]

Grants = tuple[tuple[Grant, ...], ...]


def is_policy_cpu(candidate: Candidate, node: str) -> bool:
    """Say whether a device is a single CPU of this node, to which the policy applies."""
    return (
        candidate.id.driver == DRIVER
        and candidate.id.pool == pool_of_class(node, CPU_CLASS)
        and not candidate.device.allow_multiple_allocations
        and not candidate.device.consumes_counters
        and cpu_of_name(candidate.id.device) is not None
    )


def reserved_cpus(node: Node) -> Mapping[DeviceId, str]:
    """Name a node's CPUs that are never given exclusively, with the reason."""
    reserved = node.cpus.reserved if node.cpus is not None else ()
    pool = pool_of_class(node.name, CPU_CLASS)
    return {DeviceId(DRIVER, pool, cpu_name(cpu)): "reserved for the system" for cpu in reserved}


def with_policy_cpus(given: AllocationInput, candidates: Sequence[Candidate], checks: DeviceChecks) -> Grants | Refusal:
    """Exchange the CPUs in the grants of a search for those of the policy.

    Shapes: result — one tuple per claim, in the order of the search.
    Order: requests in their order. A request may take CPUs that the search gave to a later one.
            Where a later one is then left without CPUs, each request chooses only among CPUs that
            the others did not get.
    Errors: raises nothing; Refusal code smt-alignment.
    """
    grants: Grants = tuple(tuple(claim) for claim in checks.grants)
    policy = given.node.cpus
    if policy is None or not any(
        is_policy_cpu(grant.candidate, given.node.name) for claim in grants for grant in claim
    ):
        return grants
    cpus = [candidate for candidate in candidates if is_policy_cpu(candidate, given.node.name)]
    tries = (
        _Exchange(given, policy, cpus, checks, grants, may_move_others=may_move_others).run()
        for may_move_others in (True, False)
    )
    return next((outcome for outcome in tries if outcome is not None), grants)


@dataclass
class _Exchange:
    """One attempt to give all requests the policy's CPUs."""

    given: AllocationInput
    policy: CpuPolicy
    cpus: Sequence[Candidate]
    checks: DeviceChecks
    grants: Grants
    may_move_others: bool

    @cached_property
    def topology(self) -> CpuTopology:
        """Where the node's CPUs are."""
        return CpuTopology.of_cores(self.policy.cores)

    def run(self) -> Grants | Refusal | None:
        """Exchange the CPUs of each request. None when one is left without CPUs."""
        for claim_index, request in self._exchanged.values():
            chosen = self._choose(claim_index, request)
            if chosen is None or isinstance(chosen, Refusal):
                return chosen
            self._put(claim_index, request, chosen)
        return self.grants

    @cached_property
    def _exchanged(self) -> dict[tuple[int, str], tuple[int, PreparedRequest]]:
        """The requests whose CPUs may be exchanged, in order."""
        return {
            (claim_index, request.name): (claim_index, request)
            for claim_index, claim in enumerate(self.grants)
            for request in dict.fromkeys(grant.request for grant in claim)
            if self._is_by_count(claim_index, request)
            and all(is_policy_cpu(grant.candidate, self.given.node.name) for grant in claim if grant.request is request)
        }

    @cached_property
    def _done(self) -> set[tuple[int, str]]:
        """The requests that have the policy's CPUs already."""
        return set()

    def _is_by_count(self, claim_index: int, request: PreparedRequest) -> bool:
        constraints = self.given.claims[claim_index].spec.devices.constraints
        return (
            not request.is_admin
            and request.everything is None
            and all(constraints[index].distinct_attribute is None for index in request.constraints)
        )

    def _choose(self, claim_index: int, request: PreparedRequest) -> CpuSet | Refusal | None:
        own = [grant.candidate for grant in self.grants[claim_index] if grant.request is request]
        usable = CpuSet.of(_cpu(candidate) for candidate in self._usable(claim_index, request, own))
        chosen = choose_exclusive_cpus(
            self.topology, usable, len(own), self.policy.options, reserved=self.policy.reserved
        )
        if isinstance(chosen, Refusal):
            # Too few is no refusal of the policy's: the search found enough, and
            # another request has taken some.
            return chosen if chosen.reasons[0].code == "smt-alignment" else None
        return chosen

    def _usable(self, claim_index: int, request: PreparedRequest, own: Sequence[Candidate]) -> Iterator[Candidate]:
        """List the CPUs that the request could have instead of its own: those that no other request
        has, and that keep its constraints.
        """
        movable = {*self._exchanged} - self._done if self.may_move_others else set()
        others = {
            grant.candidate.id
            for index, claim in enumerate(self.grants)
            for grant in claim
            if grant.request is not request and (index, grant.request.name) not in movable
        }
        common = [
            (attribute, self._common(claim_index, index, attribute))
            for index, attribute in self._matched(claim_index, request)
        ]
        own_ids = {candidate.id for candidate in own}
        for candidate in self.cpus:
            if candidate.id in others or (
                candidate.id not in own_ids and not self.checks.could_take(request, candidate)
            ):
                continue
            if all(values <= self._values(candidate, attribute) for attribute, values in common):
                yield candidate

    def _matched(self, claim_index: int, request: PreparedRequest) -> list[tuple[int, str]]:
        constraints = self.given.claims[claim_index].spec.devices.constraints
        return [
            (index, attribute)
            for index in request.constraints
            if (attribute := constraints[index].match_attribute) is not None
        ]

    def _common(self, claim_index: int, constraint: int, attribute: str) -> frozenset[object]:
        """Return the values that all devices under a constraint have in common, as the search found
        them.
        """
        values = [
            self._values(grant.candidate, attribute)
            for grant in self.grants[claim_index]
            if constraint in grant.request.constraints
        ]
        return frozenset.intersection(*values) if values else frozenset()

    def _values(self, candidate: Candidate, attribute: str) -> frozenset[object]:
        return frozenset(attribute_values(candidate, attribute, has_lists=Gate.LIST_ATTRIBUTES in self.given.gates))

    def _put(self, claim_index: int, request: PreparedRequest, chosen: CpuSet) -> None:
        """Write the chosen CPUs into the request's grants, in ascending order."""
        by_cpu = {_cpu(candidate): candidate for candidate in self.cpus}
        names = iter(chosen)
        claims = list(self.grants)
        claims[claim_index] = tuple(
            grant._replace(candidate=by_cpu[next(names)]) if grant.request is request else grant
            for grant in claims[claim_index]
        )
        self.grants = tuple(claims)
        self._done.add((claim_index, request.name))


def _cpu(candidate: Candidate) -> int:
    cpu = cpu_of_name(candidate.id.device)
    return cpu if cpu is not None else -1
