"""The checks of an API server on claims and on allocations, for both homes and for dry runs: made
before a search and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from topobus.engine.allocation.admission import admin_problem, costly_selector
from topobus.engine.allocation.values import Fault
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.objects import Claim
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.resource import AllocationResult, ClaimSpec
from topobus.values.outcome import Reason

__all__ = ["LabelsOf", "Wanted", "objection_to_claims", "objection_to_results"]

Wanted = tuple[Claim, ClaimSpec]
"""A claim, and what is asked for it: its spec."""


LabelsOf = Callable[[str], Mapping[str, str]]
"""The labels of a namespace; none for one that is not stored."""


def objection_to_claims(wanted: Sequence[Wanted], labels_of: LabelsOf, compiler: SelectorCompiler) -> Fault | None:
    """Find what an API server would have refused of these claims: admin access outside of a
    namespace for it, a selector that may cost too much.
    """
    for claim, spec in wanted:
        reason = admin_problem(spec, claim.owner.namespace, labels_of) or costly_selector(spec, claim.shown, compiler)
        if reason is not None:
            return Fault(reason, 0)
    return None


def objection_to_results(
    node: str, wanted: Sequence[Wanted], results: Sequence[AllocationResult], *, steps: int
) -> Fault | None:
    """Find the limit of the API that the results would break. None when they can be stored."""
    for (claim, spec), result in zip(wanted, results, strict=True):
        problems = limits.check_allocation(result, spec)
        if problems:
            return Fault(Reason(code="result-too-large", message=f"node {node}: {claim.shown}: {problems[0]}"), steps)
    return None
