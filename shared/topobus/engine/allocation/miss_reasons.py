"""Explains why a claim does not fit: the first failing check of each device, grouped by reason.

Order: the summary first, then the groups, largest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from topobus.engine.allocation.pools import Candidate, Pool, PoolState
from topobus.engine.allocation.requests import PreparedRequest
from topobus.engine.allocation.values import AllocationInput
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.values.outcome import Reason

__all__ = ["LIMIT", "OTHER_CLASS", "OUTSIDE", "UNCOUNTED", "Blocker", "Miss", "describe_miss", "lacking", "summarize"]

OTHER_CLASS = "other-class"
"""Code of a device that the class asked for does not select: of no interest to whoever asked."""
OUTSIDE = "outside"
"""Code of a device that is outside the place that is being tried: another place's miss reports
it."""

UNCOUNTED = 1 << 20
"""More devices than any claim may have: what is lacking in a reason that counts none."""

# A list of more names does not help a person, but the count does.
_SHOWN_DEVICES = 16
_NAMED_DEVICES = 4


class Blocker(Struct, frozen=True):
    """The first check that a device fails: a stable code and a description."""

    code: str
    detail: str


LIMIT = Blocker("limit", f"a claim may have {MAX_LIST} devices at most")
"""What blocks a device that is there, for a claim that is full."""


@dataclass(frozen=True)
class Miss:
    """What a request lacks on one node."""

    request: PreparedRequest
    found_count: int
    """The most of its devices that it can have at once, beside those that the requests before it
    have."""
    is_exact: bool
    """False: at least so many; whether there can be more was not found out."""
    blockers: tuple[tuple[Candidate, Blocker | None], ...]
    """One for each candidate; None for those that it can have at once."""


def describe_miss(given: AllocationInput, pools: Sequence[Pool], miss: Miss) -> tuple[Reason, ...]:
    """Group what prevented a fit on one node."""
    node, request, blockers = given.node.name, miss.request, miss.blockers
    wanted = (
        "all devices"
        if request.everything is not None
        else f"{request.count} device{'s' if request.count != 1 else ''}"
    )
    of_class = [
        (candidate, blocker) for candidate, blocker in blockers if blocker is None or blocker.code != OTHER_CLASS
    ]
    relevant = [(candidate, blocker) for candidate, blocker in of_class if blocker is None or blocker.code != OUTSIDE]
    have = _found(miss, of_class=len(of_class), relevant=len(relevant))
    reasons = [
        Reason(
            code="too-few-devices",
            message=f"node {node}: {request.where} wants {wanted} of class {request.class_name}, {have}",
            facts={
                "node": node,
                "claim": request.claim,
                "request": request.name,
                "device_class": request.class_name,
                "wanted": request.count,
                "found": miss.found_count,
                "devices": len(relevant),
                **({} if miss.is_exact else {"found_at_least": True}),
            },
        )
    ]
    groups: dict[Blocker, list[str]] = {}
    for candidate, blocker in relevant:
        if blocker is not None:
            groups.setdefault(blocker, []).append(candidate.id.device)
    for blocker, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0].code, item[0].detail)):
        reasons.append(
            Reason(
                code=f"device-{blocker.code}",
                message=f"{len(names)} device{'s' if len(names) != 1 else ''}{_named(blocker, names)}: "
                f"{blocker.detail}",
                facts={
                    "node": node,
                    "count": len(names),
                    "devices": tuple(names[:_SHOWN_DEVICES]),
                    "detail": blocker.detail,
                },
            )
        )
    for pool in pools:
        if pool.state is not PoolState.READY:
            message = f"pool {pool.id} is {pool.state}: {pool.why}"
            reasons.append(
                Reason(code=f"pool-{pool.state}", message=message, facts={"node": node, "pool": str(pool.id)})
            )
    return tuple(reasons)


def _found(miss: Miss, *, of_class: int, relevant: int) -> str:
    """Say how many devices there are, of so many of the class, and of those where they may lie."""
    if relevant:
        return f"found {'' if miss.is_exact else 'at least '}{miss.found_count} of {relevant}"
    if of_class:
        return "and none of that class lies there"
    if miss.blockers:
        return f"and none of the {len(miss.blockers)} devices here is of that class"
    return "and there is no device here"


def _named(blocker: Blocker, names: Sequence[str]) -> str:
    """Name the devices of which too little is left, or that lack counters. An amount, or who has what
    is lacking, is meaningful only for its own device.
    """
    if blocker.code not in ("capacity", "counters"):
        return ""
    return f" ({', '.join(names[:_NAMED_DEVICES])}{', ...' if len(names) > _NAMED_DEVICES else ''})"


def summarize(reasons: Sequence[Reason]) -> str:
    """Put reasons into one line: the summary, then the groups.

    >>> summarize([Reason(code="a", message="node n: found 0 of 3"), Reason(code="b", message="3 devices: in use")])
    'node n: found 0 of 3 (3 devices: in use)'
    """
    if not reasons:
        return ""
    rest = "; ".join(reason.message for reason in reasons[1:])
    return f"{reasons[0].message} ({rest})" if rest else reasons[0].message


def lacking(reasons: Sequence[Reason]) -> int:
    """Count the devices that are lacking, by the summary's facts: the lowest of several counts is
    the nearest miss.

    >>> lacking([Reason(code="too-few-devices", message="", facts={"wanted": 4, "found": 3})]), lacking([]) == UNCOUNTED
    (1, True)
    """
    facts = reasons[0].facts if reasons else {}
    count, wanted, granted = facts.get("lacking"), facts.get("wanted"), facts.get("found")
    if isinstance(count, int):
        return count
    return wanted - granted if isinstance(wanted, int) and isinstance(granted, int) else UNCOUNTED
