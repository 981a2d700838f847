"""Admission checks of a Kubernetes API server that the stand-alone API lacks: the cost of CEL
selectors, and the right to admin access.

The stand-alone API evaluates no CEL and has no namespace objects, so these checks run before a
search.
Source: k8s.io/kubernetes pkg/registry/resource/resourceclaim/strategy.go and
pkg/apis/resource/validation/validation.go, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from topobus.engine.cel.seam import SelectorCompiler, SelectorError
from topobus.formats.kubernetes.resource import ClaimSpec, Selector
from topobus.values.outcome import Reason

__all__ = ["ADMIN_LABEL", "admin_problem", "asks_admin", "costly_selector", "has_heavy_selector"]

ADMIN_LABEL = "resource.kubernetes.io/admin-access"
"""On a namespace, with value `true`: its claims may ask for admin access."""

# Some five milliseconds a device.
_HEAVY_COST = 5000


def asks_admin(spec: ClaimSpec) -> str:
    """Name the first request that asks for admin access. Empty when none does."""
    return next(
        (
            request.name
            for request in spec.devices.requests
            if request.exactly is not None and request.exactly.admin_access
        ),
        "",
    )


def admin_problem(spec: ClaimSpec, namespace: str, labels_of: Callable[[str], Mapping[str, str]]) -> Reason | None:
    """Explain why a claim may not have admin access. None when it does not ask, or may."""
    asking = asks_admin(spec)
    if not asking or labels_of(namespace).get(ADMIN_LABEL) == "true":
        return None
    message = (
        f"request {asking}: admin access is for namespaces with the label {ADMIN_LABEL}=true, which {namespace} has not"
    )
    return Reason(
        code="admin-access-forbidden",
        message=message,
        facts={"request": asking, "namespace": namespace, "label": ADMIN_LABEL},
    )


def costly_selector(spec: ClaimSpec, claim: str, compiler: SelectorCompiler) -> Reason | None:
    """Name the first selector of a claim whose evaluation may exceed the cost limit.

    A selector that does not compile is left to the search, which reports it.
    """
    for request, index, selector in _selectors(spec):
        selection = compiler.compile(selector.cel.expression) if selector.cel is not None else None
        if selection is None or isinstance(selection, SelectorError) or selection.objection is None:
            continue
        return Reason(
            code="selector-error",
            message=f"request {request}: selector #{index} {selection.objection.message}",
            facts={
                "claim": claim,
                "request": request,
                "owner": claim,
                "selector": index,
                "expression": selector.cel.expression if selector.cel is not None else "",
                "line": 0,
                "column": 0,
                "device": "",
            },
        )
    return None


def has_heavy_selector(spec: ClaimSpec, compiler: SelectorCompiler) -> bool:
    """Say whether evaluating a selector on one device may take so long that others should not wait
    for it.
    """
    for _, _, selector in _selectors(spec):
        selection = compiler.compile(selector.cel.expression) if selector.cel is not None else None
        if selection is not None and not isinstance(selection, SelectorError) and selection.max_cost > _HEAVY_COST:
            return True
    return False


def _selectors(spec: ClaimSpec) -> Iterator[tuple[str, int, Selector]]:
    for request in spec.devices.requests:
        if request.exactly is not None:
            yield from ((request.name, index, selector) for index, selector in enumerate(request.exactly.selectors))
        for sub in request.first_available:
            yield from ((f"{request.name}/{sub.name}", index, selector) for index, selector in enumerate(sub.selectors))
