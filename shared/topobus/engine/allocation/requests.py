"""Prepares requests for a search: checks them against the feature gates, resolves their class, and
counts devices for "all devices".

An error here is the same on every node and ends the allocation. A request that merely does
not fit is left to the search.
Source: docs/knowledge/dynamic-resource-allocation.md#checks-before-the-search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from topobus.engine.allocation.pools import Candidate, Pool, PoolState
from topobus.engine.allocation.values import AllocationInput, ClaimToAllocate, Gate
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.formats.kubernetes.resource import (
    CapacityRequirements,
    ClaimRequest,
    DeviceClassSpec,
    ExactRequest,
    Selector,
    SubRequest,
    Toleration,
)
from topobus.values.names import meant_name
from topobus.values.outcome import Reason

__all__ = ["Alternatives", "FaultError", "PreparedRequest", "prepare"]

_EXACT, _ALL = "ExactCount", "All"


class FaultError(Exception):
    """Ends a search: the request cannot be answered until an object is changed.

    `search.allocate` turns it into a `Fault`.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message)
        self.reason = reason


class PreparedRequest(Struct, frozen=True, eq=False):
    """A request, or one alternative of one, ready to be searched for."""

    claim_index: int
    claim: str
    where: str
    """Its name in messages: `request gpu`, with the claim when there are several."""
    base: str
    """The request's name in the claim."""
    alternative: str
    """The alternative's name; empty when the request has none."""
    class_name: str
    device_class: DeviceClassSpec
    selectors: tuple[Selector, ...]
    tolerations: tuple[Toleration, ...]
    capacity: CapacityRequirements | None
    count: int
    is_admin: bool = False
    everything: tuple[Candidate, ...] | None = None
    """The devices of an `All` request; None for one that counts."""
    constraints: tuple[int, ...] = ()
    """Indices of the claim's constraints that apply."""
    verdicts: dict[Candidate, bool] = {}

    @property
    def name(self) -> str:
        """The name as results carry it: `gpu`, or `gpu/big` for an alternative."""
        return f"{self.base}/{self.alternative}" if self.alternative else self.base


Alternatives = tuple[PreparedRequest, ...]
"""The ways to serve one request, best first; one way unless it has firstAvailable."""


def prepare(
    given: AllocationInput,
    pools: tuple[Pool, ...],
    is_selected: Callable[[PreparedRequest, Candidate], bool],
    is_large_enough: Callable[[PreparedRequest, Candidate], bool],
) -> tuple[tuple[Alternatives, ...], ...]:
    """Prepare all requests of all claims, in order.

    Shapes: result — for each claim, for each request, its alternatives.
    Errors: raises FaultError.
    """
    prepared: list[tuple[Alternatives, ...]] = []
    for index, claim in enumerate(given.claims):
        requests = tuple(
            _alternatives(given, pools, index, claim, request, is_selected, is_large_enough)
            for request in claim.spec.devices.requests
        )
        fewest = sum(min(alternative.count for alternative in alternatives) for alternatives in requests)
        if fewest > MAX_LIST:
            raise FaultError(
                Reason(
                    code="claim-too-large",
                    message=f"claim {claim.name} asks for at least {fewest} devices: wanted at most {MAX_LIST}",
                    facts={"claim": claim.name, "wanted": fewest, "limit": MAX_LIST},
                )
            )
        for number, constraint in enumerate(claim.spec.devices.constraints):
            if constraint.match_attribute is None and constraint.distinct_attribute is None:
                raise _fault("unknown-constraint", claim, "", f"constraint #{number} is of a kind that is not known")
        prepared.append(requests)
    return tuple(prepared)


def _alternatives(
    given: AllocationInput,
    pools: tuple[Pool, ...],
    claim_index: int,
    claim: ClaimToAllocate,
    request: ClaimRequest,
    is_selected: Callable[[PreparedRequest, Candidate], bool],
    is_large_enough: Callable[[PreparedRequest, Candidate], bool],
) -> Alternatives:
    options: tuple[ExactRequest | SubRequest, ...] = request.first_available or (
        (request.exactly,) if request.exactly is not None else ()
    )
    if not options:
        raise _fault("unknown-request", claim, request.name, "is of a kind that is not known")
    if request.first_available and Gate.PRIORITIZED_LIST not in given.gates:
        raise _fault("gate-off", claim, request.name, f"has alternatives, but {Gate.PRIORITIZED_LIST} is off")
    if Gate.CONSUMABLE_CAPACITY not in given.gates and any(option.capacity is not None for option in options):
        raise _fault("gate-off", claim, request.name, f"asks for capacity, but {Gate.CONSUMABLE_CAPACITY} is off")
    prepared_requests: list[PreparedRequest] = []
    for option in options:
        alternative = option.name if isinstance(option, SubRequest) else ""
        made = _check(given.classes, given.gates, claim_index, claim, request.name, alternative, option)
        if made.everything is not None:
            made = _collect(made, claim, pools, is_selected, is_large_enough)
        prepared_requests.append(made)
    return tuple(prepared_requests)


def _check(
    classes: Mapping[str, DeviceClassSpec],
    gates: frozenset[Gate],
    claim_index: int,
    claim: ClaimToAllocate,
    base: str,
    alternative: str,
    request: ExactRequest | SubRequest,
) -> PreparedRequest:
    name = f"{base}/{alternative}" if alternative else base
    for index, selector in enumerate(request.selectors):
        if selector.cel is None:
            raise _fault("unknown-selector", claim, name, f"selector #{index} is of a kind that is not known")
    admin = request.admin_access if isinstance(request, ExactRequest) else None
    if admin is not None and Gate.ADMIN_ACCESS not in gates:
        raise _fault("gate-off", claim, name, f"asks for admin access, but {Gate.ADMIN_ACCESS} is off")
    device_class = classes.get(request.device_class_name)
    if device_class is None:
        meant = meant_name(request.device_class_name, classes)
        existing = f"known are {', '.join(sorted(classes))}" if classes else "there is none at all"
        existing = f"did you mean {meant}? {existing}" if meant else existing
        raise _fault("unknown-class", claim, name, f"there is no DeviceClass {request.device_class_name!r}; {existing}")
    if request.allocation_mode not in ("", _EXACT, _ALL):
        raise _fault("unknown-mode", claim, name, f"allocation mode {request.allocation_mode!r} is not known")
    is_all = request.allocation_mode == _ALL
    return PreparedRequest(
        claim_index=claim_index,
        claim=claim.name,
        where=_where(claim, name),
        base=base,
        alternative=alternative,
        class_name=request.device_class_name,
        device_class=device_class,
        selectors=request.selectors,
        tolerations=request.tolerations,
        capacity=request.capacity,
        count=0 if is_all else 1 if request.count is None else request.count,
        is_admin=bool(admin),
        everything=() if is_all else None,
        constraints=tuple(
            number
            for number, constraint in enumerate(claim.spec.devices.constraints)
            if not constraint.requests or base in constraint.requests or name in constraint.requests
        ),
    )


def _collect(
    made: PreparedRequest,
    claim: ClaimToAllocate,
    pools: tuple[Pool, ...],
    is_selected: Callable[[PreparedRequest, Candidate], bool],
    is_large_enough: Callable[[PreparedRequest, Candidate], bool],
) -> PreparedRequest:
    """Find all devices of an `All` request.

    Errors: raises FaultError for a pool that is not complete, because then "all" is unknown.
    """
    everything: list[Candidate] = []
    for pool in pools:
        if pool.state is PoolState.OBSOLETE:
            continue
        if pool.state is not PoolState.READY:
            raise FaultError(
                Reason(
                    code=f"pool-{pool.state}",
                    message=f"{made.where} asks for all devices, but pool {pool.id} is {pool.state}: {pool.why}",
                    facts={"claim": claim.name, "request": made.name, "pool": str(pool.id)},
                )
            )
        everything.extend(
            candidate
            for candidate in pool.candidates
            if is_selected(made, candidate) and is_large_enough(made, candidate)
        )
    return replace(made, everything=tuple(everything), count=len(everything))


def _fault(code: str, claim: ClaimToAllocate, request: str, what: str) -> FaultError:
    where = _where(claim, request)
    message = f"{where}: {what}" if where else what
    return FaultError(Reason(code=code, message=message, facts={"claim": claim.name, "request": request}))


def _where(claim: ClaimToAllocate, request: str) -> str:
    parts = (
        *([f"claim {claim.name}"] if claim.is_one_of_several else []),
        *([f"request {request}"] if request else []),
    )
    return ", ".join(parts)
