"""Chooses devices of a node for classic claims: all claims together, each with the number that it
asks for, by the search of structured claims.

A classic claim is one request of a structured one, for devices of the claim's ResourceClass. The
selectors of both are the CEL that migration makes of them. A classic claim holds whole devices and
counts nothing, so devices that are shared, or that exclude each other by counters, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from topobus.engine.allocation.capacity import rivals
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, NoFit
from topobus.engine.cel.seam import SelectorCompiler
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.classic.classic_cel import selector_expression
from topobus.formats.kubernetes.classic.classic_parameters import DeviceSelector
from topobus.formats.kubernetes.resource import (
    CelSelector,
    ClaimRequest,
    ClaimSpec,
    DeviceClaim,
    DeviceClassSpec,
    ExactRequest,
    Selector,
)
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.outcome import Reason, Refusal

__all__ = ["LONGEST_EXPRESSION", "choose", "structured_claim", "structured_class"]

LONGEST_EXPRESSION = 128 * 1024
"""Bytes of the CEL of a classic selector: 64 conditions on texts of 128 characters, all of them
escaped, are 90 KiB. What an API server takes is no limit, for none sees it."""
# Some tenths of a second on one node.
_STEPS = 20_000
# Effects of a taint that the search knows. A device with another one must not be allocated.
_EFFECTS = ("None", "NoSchedule", "NoExecute")


def structured_class(device_class: str, selector: DeviceSelector) -> DeviceClassSpec:
    """Make the DeviceClass of a ResourceClass: the devices of a device class that its parameters
    select.
    """
    return DeviceClassSpec(selectors=_selectors(class_selector(device_class), selector_expression(selector, DRIVER)))


def structured_claim(class_name: str, count: int, selector: DeviceSelector) -> ClaimSpec:
    """Make the spec of a structured claim that wants what a classic one does."""
    request = ExactRequest(
        device_class_name=class_name, count=count, selectors=_selectors(selector_expression(selector, DRIVER))
    )
    return ClaimSpec(devices=DeviceClaim(requests=(ClaimRequest(name="devices", exactly=request),)))


def choose(
    given: AllocationInput, device_class: str, classes: Mapping[str, DeviceClassSpec], compiler: SelectorCompiler
) -> tuple[tuple[str, ...], ...] | Refusal:
    """Choose devices for all claims at once.

    Shapes: given — claims as `structured_claim` makes them; device_class — of the driver; classes —
            `structured_class` of each ResourceClass that they name; compiler — takes
            `LONGEST_EXPRESSION`; result — the names for each claim, sorted.
    Errors: raises nothing. Refuses as a search for structured claims does.
    """
    pool_name = pool_of_class(given.node.name, device_class)
    unusable = {
        candidate.id: why
        for pool in given.pools or ()
        if pool.id.pool == pool_name
        for rivals_of_pool in (rivals(pool),)
        for candidate in pool.candidates
        if (why := _why_unusable(candidate, excludes_others=candidate.id in rivals_of_pool))
    }
    usage = replace(given.usage, excluded={**unusable, **given.usage.excluded})
    outcome = allocate(replace(given, classes=classes, usage=usage), compiler, step_budget=_STEPS)
    if isinstance(outcome, Allocated):
        return tuple(tuple(sorted(granted.device for granted in result.devices.results)) for result in outcome.results)
    if isinstance(outcome, NoFit):
        # No user wrote the CEL.
        return Refusal(reasons=tuple(map(_without_expression, outcome.reasons)))
    return Refusal(reasons=explain_nodes((given.node.name,), (outcome,))[1])


def _selectors(*expressions: str) -> tuple[Selector, ...]:
    return tuple(Selector(cel=CelSelector(expression=expression)) for expression in expressions if expression)


def _why_unusable(candidate: Candidate, *, excludes_others: bool) -> str:
    device = candidate.device
    if device.allow_multiple_allocations:
        return "shared by claims with structured parameters"
    if excludes_others:
        return "taken by what takes from the same counters"
    taint = next((taint for taint in device.taints if taint.effect not in _EFFECTS), None)
    return f"tainted {taint.key}={taint.value}:{taint.effect}" if taint is not None else ""


def _without_expression(reason: Reason) -> Reason:
    if reason.code != "device-selector":
        return reason
    return structs.replace(reason, message=f"{reason.facts['count']} not selected")
