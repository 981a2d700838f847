"""The one maker of a search's input: what an allocation of claims on one node depends on, whoever keeps the copies.

Flows in: a node, claims, classes, what is free where. Flows out: an AllocationInput. The stand-alone home, the cluster home and dry runs all search what this gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from topobus.cel.seam import SelectorCompiler
from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.admission import admin_problem, costly_selector
from topobus.controller.allocation.values import (
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Fault,
    Mode,
    Node,
)
from topobus.controller.claims.lifecycle import owner_of
from topobus.controller.state.free_devices import FreeDevices
from topobus.domain.outcome import Reason
from topobus.kubernetes.api import limits
from topobus.kubernetes.api.objects import name_of
from topobus.kubernetes.api.resource import AllocationResult, ClaimSpec, DeviceClassSpec

__all__ = ["LabelsOf", "Wanted", "allocation_input", "objection_to_claims", "objection_to_results"]

Wanted = tuple[ApiObject, ClaimSpec]
"""A claim as stored, and its spec."""


LabelsOf = Callable[[str], Mapping[str, str]]
"""The labels of a namespace; none for one that nobody stored."""


def allocation_input(
    node: Node,
    wanted: Sequence[Wanted],
    *,
    classes: Mapping[str, DeviceClassSpec],
    supply: FreeDevices,
    mode: Mode,
    excluded: Mapping[DeviceId, str] | None = None,
    ignoring: Collection[str] = (),
) -> AllocationInput:
    """Collect what an allocation of these claims on one node depends on.

    Shapes: wanted — one claim, or several of one pod; excluded — devices that they must not get now, and why; ignoring — uids of claims whose intents count for
            nothing here.
    """
    owners = [owner_of(claim) for claim, _ in wanted]
    return AllocationInput(
        node=node,
        claims=tuple(
            ClaimToAllocate(f"{owner.namespace}/{owner.name}", spec, len(owners) > 1)
            for owner, (_, spec) in zip(owners, wanted, strict=True)
        ),
        classes=classes,
        pools=supply.table_of(node.name).pools,
        usage=supply.usage_for(node.name, owners, excluded or {}, ignoring=ignoring),
        mode=mode,
    )


def objection_to_claims(wanted: Sequence[Wanted], labels_of: LabelsOf, compiler: SelectorCompiler) -> Fault | None:
    """Say what an API server would have refused of these claims: admin access outside of a namespace for it, a selector that may cost too much."""
    for claim, spec in wanted:
        reason = admin_problem(spec, owner_of(claim).namespace, labels_of) or costly_selector(spec, name_of(claim), compiler)
        if reason is not None:
            return Fault(reason, 0)
    return None


def objection_to_results(node: str, wanted: Sequence[Wanted], results: Sequence[AllocationResult], *, steps: int = 0) -> Fault | None:
    """Say which limit of the API what was found would break; None when it can be stored."""
    for (claim, spec), result in zip(wanted, results, strict=True):
        problems = limits.check_allocation(result, spec)
        if problems:
            return Fault(Reason(code="result-too-large", message=f"node {node}: {name_of(claim)}: {problems[0]}"), steps)
    return None
