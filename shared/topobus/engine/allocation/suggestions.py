"""Advice for a claim that no node can serve: the node that comes nearest to a fit, and changes of
the claim that would fit.

The advice comes as two kinds of Reasons, `nearest-miss` and `would-fit`. Each piece of advice is
checked: the search ran with the changed claim, or without the current holders, and found devices.
It holds for the present state only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    NoFit,
    Outcome,
    Usage,
)
from topobus.engine.shapes.shape_parts import in_parts, parts_in, without_shapes
from topobus.formats.kubernetes.resource import (
    ClaimRequest,
    ClaimSpec,
    ExactRequest,
    Toleration,
)
from topobus.values.outcome import Fact, Reason

__all__ = ["ADVICE_STEPS", "nearest", "would_fit"]

ADVICE_STEPS = 500
"""Steps of one search for advice, a few milliseconds: what needs more work than that is not
advised."""

# Pieces of advice: a person reads three, and each costs searches.
_MOST = 3
_ALL = "All"
_TOLERATE_ALL = Toleration(operator="Exists")

Search = Callable[[AllocationInput], Outcome]


def nearest(nodes: Sequence[str], outcomes: Sequence[Outcome]) -> tuple[str, Reason] | None:
    """Name the node that lacks least, with what it lacks.

    None when no outcome shows how far its search came.

    Order: fewest devices lacking for the request at which it ended, then most devices found, then
            most of that class at all, then the order of the nodes.
    """
    misses: list[tuple[int, int, int, int, str, NoFit]] = []
    for index, (node, outcome) in enumerate(zip(nodes, outcomes, strict=False)):
        if not isinstance(outcome, NoFit) or not outcome.reasons:
            continue
        wanted, have = (outcome.reasons[0].facts.get(key) for key in ("wanted", "found"))
        there = outcome.reasons[0].facts.get("devices")
        if isinstance(wanted, int) and isinstance(have, int):
            misses.append((max(wanted - have, 0), -have, -there if isinstance(there, int) else 0, index, node, outcome))
    if not misses:
        return None
    lacking, have, _, _, node, outcome = min(misses, key=lambda miss: miss[:4])
    facts = outcome.reasons[0].facts
    at_least = "at least " if facts.get("found_at_least") else ""
    message = (
        f"nearest miss: node {node} has {at_least}{-have} of {facts.get('wanted')} devices for request "
        f"{facts.get('request')}"
    )
    return node, Reason(
        code="nearest-miss",
        message=message,
        facts={
            "node": node,
            "request": str(facts.get("request", "")),
            "wanted": -have + lacking,
            "found": -have,
            "lacking": lacking,
        },
    )


def would_fit(given: AllocationInput, search: Search) -> tuple[Reason, ...]:
    """Find changes with which the claim would fit on one node.

    Shapes: search — as `search.allocate`, with a small budget: it runs a dozen times or two.
    Order: devices that others would have to release; fewer devices; taints tolerated; a constraint
            less; a selector less.
    """
    reasons: list[Reason] = []
    for advise in (_when_freed, _fewer, _tolerant, _without_constraint, _without_selector):
        reasons.extend(advise(given, search))
        if len(reasons) >= _MOST:
            break
    return tuple(reasons[:_MOST])


def _when_freed(given: AllocationInput, search: Search) -> Iterator[Reason]:
    """Ignore all holders, then bring back those that do not prevent the fit."""
    if not given.usage.holders and not given.usage.consumed:
        return
    free = search(replace(given, usage=Usage(excluded=given.usage.excluded)))
    if not isinstance(free, Allocated):
        return
    # Keep each holder in turn as long as there is a fit. The holders that are left prevent it
    # whichever others release theirs.
    needed = sorted(set(given.usage.holders.values()))
    for holder in list(needed)[:8]:
        without = set(needed) - {holder}
        kept: dict[DeviceId, str] = {
            device: each_holder for device, each_holder in given.usage.holders.items() if each_holder not in without
        }
        if isinstance(outcome := search(replace(given, usage=replace(given.usage, holders=kept))), Allocated):
            needed, free = sorted(without), outcome
    parts = parts_in(given.pools or ())
    used = {
        DeviceId.of(granted) for result in free.results for granted in without_shapes(result, parts).devices.results
    }
    # One with CPUs is in use in place of its parts.
    holders = {**given.usage.holders, **in_parts(given.usage.holders, parts)}
    counts = {holder: count for holder in needed if (count := sum(holders.get(device) == holder for device in used))}
    if counts:
        owners = ", ".join(f"{holder} ({count} device{'s' if count != 1 else ''})" for holder, count in counts.items())
        yield _advice(given, f"when {owners} releases them", {"change": "free", "holders": tuple(counts)})


def _fewer(given: AllocationInput, search: Search) -> Iterator[Reason]:
    """Ask for less: the largest number of devices of one request that fits, with the other requests
    unchanged.
    """
    for place, request in _requests(given):
        exact = request.exactly
        if exact is None or exact.allocation_mode == _ALL or (exact.count or 1) < 2:
            continue
        low, high = 0, (exact.count or 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = isinstance(
                search(_changed(given, place, request, msgspec.structs.replace(exact, count=middle))), Allocated
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            text = f"with {low} device{'s' if low != 1 else ''} instead of {exact.count} for request {request.name}"
            yield _advice(given, text, {"change": "count", "request": request.name, "count": low})


def _tolerant(given: AllocationInput, search: Search) -> Iterator[Reason]:
    for place, request in _requests(given):
        exact = request.exactly
        if exact is None or _TOLERATE_ALL in exact.tolerations:
            continue
        changed = msgspec.structs.replace(exact, tolerations=(*exact.tolerations, _TOLERATE_ALL))
        if isinstance(search(_changed(given, place, request, changed)), Allocated):
            yield _advice(
                given,
                f"if request {request.name} tolerated the taints there",
                {"change": "tolerations", "request": request.name},
            )


def _without_constraint(given: AllocationInput, search: Search) -> Iterator[Reason]:
    for index, claim in enumerate(given.claims):
        for number, constraint in enumerate(claim.spec.devices.constraints):
            kept = tuple(
                each_constraint
                for other, each_constraint in enumerate(claim.spec.devices.constraints)
                if other != number
            )
            devices = msgspec.structs.replace(claim.spec.devices, constraints=kept)
            if isinstance(
                search(_with_claim(given, index, msgspec.structs.replace(claim.spec, devices=devices))), Allocated
            ):
                attribute = constraint.match_attribute or constraint.distinct_attribute or ""
                text = f"without constraint #{number} ({attribute})"
                yield _advice(given, text, {"change": "constraint", "constraint": number, "attribute": attribute})


def _without_selector(given: AllocationInput, search: Search) -> Iterator[Reason]:
    for place, request in _requests(given):
        exact = request.exactly
        for number in range(len(exact.selectors) if exact is not None else 0):
            assert exact is not None
            kept = tuple(selector for other, selector in enumerate(exact.selectors) if other != number)
            if isinstance(
                search(_changed(given, place, request, msgspec.structs.replace(exact, selectors=kept))), Allocated
            ):
                text = f"without selector #{number} of request {request.name}"
                yield _advice(given, text, {"change": "selector", "request": request.name, "selector": number})


def _requests(given: AllocationInput) -> Iterator[tuple[tuple[int, int], ClaimRequest]]:
    for index, claim in enumerate(given.claims):
        for number, request in enumerate(claim.spec.devices.requests):
            yield (index, number), request


def _changed(
    given: AllocationInput, place: tuple[int, int], request: ClaimRequest, exact: ExactRequest
) -> AllocationInput:
    index, number = place
    spec: ClaimSpec = given.claims[index].spec
    changed = msgspec.structs.replace(request, exactly=exact)
    requests = tuple(
        changed if other == number else claim_request for other, claim_request in enumerate(spec.devices.requests)
    )
    return _with_claim(
        given, index, msgspec.structs.replace(spec, devices=msgspec.structs.replace(spec.devices, requests=requests))
    )


def _with_claim(given: AllocationInput, index: int, spec: ClaimSpec) -> AllocationInput:
    claims: list[ClaimToAllocate] = list(given.claims)
    claims[index] = replace(claims[index], spec=spec)
    return replace(given, claims=tuple(claims))


def _advice(given: AllocationInput, text: str, facts: dict[str, Fact]) -> Reason:
    return Reason(
        code="would-fit",
        message=f"would fit on node {given.node.name} {text}",
        facts={"node": given.node.name, **facts},
    )
