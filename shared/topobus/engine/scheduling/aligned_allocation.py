"""Allocates claims that ask for policy or locality: searches one topology domain after the other,
and checks each result with the alignment engine.

The domains come from `topobus.engine.alignment.planning.locality_domains`, and each result is
checked by its `plan`, so the node answers the same as long as it has the same data. A claim is
aligned as one container. A shape counts as its parts: it lies in a domain when all of them do.
Claims without an alignment request do not reach this module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from topobus.engine.alignment.planning.demands import ContainerDemand, DeviceDemand
from topobus.engine.alignment.planning.locality_domains import Domain, tiers
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import cpu_of_name, without_owners
from topobus.engine.alignment.planning.placement import place, plan
from topobus.engine.allocation.matched_values import with_matches
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.pools import Candidate, Pool, gather_pools
from topobus.engine.allocation.search import DEFAULT_STEP_BUDGET, allocate
from topobus.engine.allocation.values import (
    AllocationInput,
    DeviceId,
    Fault,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.lifecycle import placement_request
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.place_misses import PlaceMiss, describe_place_misses, miss_of
from topobus.engine.scheduling.pod_alignment import groups_of, objection_of_pod
from topobus.engine.shapes.in_slices import parts_of
from topobus.engine.shapes.shape_parts import parts_in, without_shapes
from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.formats.kubernetes.alignment_request import PARAMETERS_KIND, AlignmentRequest, read_parameters
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    Configuration,
    DeviceClassSpec,
)
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, class_of_group, node_of_pool
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import ContainerKind, Locality, LocalityLevel, PodRequest, Policy
from topobus.values.view import NodeView

__all__ = ["AlignedClaims", "allocate_near", "read_alignment_request"]

# What the kind of our parameters begins with. No device service has a kind like it, so a misspelt one
# is refused here, where the claim's owner reads it, and not when a pod starts.
_KINDS = "Alignment"
# Places tried at most for all claims of a pod together: each may cost a whole search.
_MOST = 512


@dataclass(frozen=True)
class AlignedClaims:
    """A claim with its alignment request, or None when it has none."""

    claim: Claim
    wishes: AlignmentRequest | None


def read_alignment_request(
    spec: ClaimSpec, where: str, classes: Mapping[str, DeviceClassSpec] | None = None
) -> AlignmentRequest | None:
    """Read a claim's alignment request from its opaque configuration, else from the classes of its
    requests.

    None when neither has one.

    Errors: raises ContractError that names the path, what is there and what is wanted. Also where
            classes wish different things and the claim nothing.
    """
    own = _request_in(spec.devices.config, where, "spec.devices.config")
    if own is not None:
        return own if own != AlignmentRequest() else None
    agreed: tuple[str, AlignmentRequest] | None = None
    for name in dict.fromkeys(_class_names(spec)):
        device_class = (classes or {}).get(name)
        alignment_request = (
            _request_in(device_class.config, f"DeviceClass {name}", "spec.config") if device_class is not None else None
        )
        if alignment_request is None or alignment_request == AlignmentRequest():
            continue
        if agreed is not None and agreed[1] != alignment_request:
            raise ContractError(
                f"{where}: its classes {agreed[0]} and {name} wish different alignments",
                next_step="choose one in the claim's own config",
            )
        agreed = name, alignment_request
    return agreed[1] if agreed is not None else None


def _class_names(spec: ClaimSpec) -> list[str]:
    return [
        exactly.device_class_name
        for request in spec.devices.requests
        for exactly in (*((request.exactly,) if request.exactly is not None else ()), *request.first_available)
    ]


def _request_in(config: Sequence[Configuration], where: str, path: str) -> AlignmentRequest | None:
    request: tuple[str, AlignmentRequest] | None = None
    for index, configuration in enumerate(config):
        if configuration.opaque is None or not _is_ours(configuration.opaque.driver, configuration.opaque.parameters):
            continue
        place = f"{where}: {path}[{index}]"
        if request is not None:
            raise ContractError(
                f"{place} wishes for the claim again, wanted one such entry: {request[0]} is there already"
            )
        if configuration.requests:
            raise ContractError(
                f"{place}.requests is {', '.join(configuration.requests)}, wanted none: a claim is aligned as a whole"
            )
        if not isinstance(configuration.opaque.parameters, Mapping):
            raise ContractError(
                f"{place}.opaque.parameters is {configuration.opaque.parameters!r}, wanted an object of kind "
                f"{PARAMETERS_KIND}"
            )
        request = f"{path}[{index}]", read_parameters(configuration.opaque.parameters, f"{place}.opaque")
    return request[1] if request is not None else None


def allocate_near(
    given: AllocationInput,
    wished: Sequence[AlignedClaims],
    view: NodeView | None,
    compiler: SelectorCompiler,
    *,
    pod: PodRequest | None = None,
    step_budget: int = DEFAULT_STEP_BUDGET,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Find devices for all claims on one node within the domains that their alignment requests
    allow, or explain why there are none.

    Shapes: pod — the own request of a pod that wishes for its alignment, with its claims named: its
            wishes apply to all of them and to its CPUs and memory; wished — one for each claim of
            `given`; view — None when the node has published no machine; is_abandoned — asked before
            each place and every few steps.
    Order: the places of the most local tier by id or name, then those of the next. The first result
            that the engine admits wins.
    Cost: at most 512 searches of `step_budget` steps.
    """
    wishes = [aligned_claims.wishes for aligned_claims in wished]
    if pod is None and not any(wishes):
        return allocate(given, compiler, step_budget=step_budget, is_abandoned=is_abandoned)
    node = given.node.name
    if view is None:
        message = f"node {node}: what lies where is not known, for it has published no machine"
        return NoFit((Reason(code="locality-unknown", message=message, facts={"node": node}),), 0)
    try:
        pools = gather_pools(given.slices, given.node, given.gates) if given.pools is None else given.pools
    except ValueError as err:
        return Fault(Reason(code="malformed-slice", message=f"node {node}: {err}"), 0, is_local=True)
    keys = [aligned_claims.claim.owner.key for aligned_claims in wished]
    groups = groups_of(pod, keys, pod.scope or view.options.scope) if pod is not None else ()
    places = _all_places(view, pod, groups, given, wished)
    parts = parts_in(pools)
    outsides: dict[int, Mapping[DeviceId, str]] = {}
    misses: list[PlaceMiss] = []
    steps, has_given_up = 0, math.prod(len(domains) for domains in places) > _MOST
    for chosen in itertools.islice(itertools.product(*places), _MOST):
        if is_abandoned():
            return GaveUp(steps)
        claims = tuple(
            replace(claim, outside=_outside_of(index, groups, chosen, pools, view.node, outsides))
            for index, claim in enumerate(given.claims)
        )
        outcome = allocate(
            replace(given, claims=claims, pools=pools), compiler, step_budget=step_budget, is_abandoned=is_abandoned
        )
        steps += outcome.steps
        if isinstance(outcome, Fault):
            return replace(outcome, steps=steps)
        key = "; ".join(dict.fromkeys(domain.key for domain in chosen if domain is not None)) or "the whole node"
        if isinstance(outcome, GaveUp):
            has_given_up = True
            misses.append(PlaceMiss(key, f"gave up after {outcome.steps} steps"))
        elif isinstance(outcome, NoFit):
            misses.append(miss_of(node, key, outcome.reasons))
        else:
            whole = [without_shapes(result, parts) for result in outcome.results]
            objection = _objection(view, wished, whole)
            if objection is None and pod is not None:
                objection = objection_of_pod(view, pod, keys, whole)
            if objection is None:
                return replace(outcome, steps=steps, results=with_matches(view, outcome.results, groups, wishes, parts))
            misses.append(PlaceMiss(key, objection.removeprefix(f"node {node}: ")))
    if has_given_up:
        return GaveUp(steps)
    return NoFit(describe_place_misses(node, _join_wishes([*wishes, _request_of(pod)]), misses), steps)


def _is_ours(driver: str, parameters: Any) -> bool:
    """Say whether parameters are an alignment request, or cannot be anything else of ours. Other kinds
    of parameters are for device services.
    """
    return driver == DRIVER and (not isinstance(parameters, Mapping) or str(parameters.get("kind")).startswith(_KINDS))


def _request_of(pod: PodRequest | None) -> AlignmentRequest | None:
    return AlignmentRequest(policy=pod.policy, scope=pod.scope, locality=pod.locality) if pod is not None else None


def _outside_of(
    index: int,
    groups: Sequence[frozenset[int]],
    chosen: Sequence[Domain | None],
    pools: Sequence[Pool],
    node: str,
    outsides: dict[int, Mapping[DeviceId, str]],
) -> Mapping[DeviceId, str]:
    """List the devices that a claim must not get: those outside of its own place, and those outside
    of its group's.
    """
    domains = [chosen[number] for number, group in enumerate(groups) if index in group] + [chosen[len(groups) + index]]
    reasons = [_outside(pools, node, domain, outsides) for domain in domains if domain is not None]
    return (
        reasons[0]
        if len(reasons) == 1
        else {device: why for reasons_of_domain in reasons for device, why in reasons_of_domain.items()}
    )


def _all_places(
    view: NodeView,
    pod: PodRequest | None,
    groups: Sequence[frozenset[int]],
    given: AllocationInput,
    wished: Sequence[AlignedClaims],
) -> list[list[Domain | None]]:
    """List where to look for each group of claims that the pod wants together, then for each claim."""
    together = [
        _places(view, _request_of(pod), [given.claims[index].spec for index in sorted(group)]) for group in groups
    ]
    alone = [
        _places(view, aligned_claims.wishes, [spec.spec])
        for aligned_claims, spec in zip(wished, given.claims, strict=True)
    ]
    return [*together, *alone]


def _places(view: NodeView, wishes: AlignmentRequest | None, specs: Sequence[ClaimSpec]) -> list[Domain | None]:
    """List the places to search, the most local first. None is the whole node."""
    localities = _localities(wishes) if wishes is not None else ()
    room = NodeAvailability(view)
    return [domain for tier in tiers(room.locality(), _want(view, specs), localities) for domain in tier]


def _localities(wishes: AlignmentRequest) -> tuple[Locality, ...]:
    """Express a policy as a locality as well: one NUMA node in any case, or where that is
    possible.
    """
    if wishes.policy in (None, Policy.NONE):
        return wishes.locality
    is_hard = wishes.policy is Policy.SINGLE_NUMA_NODE or Locality(level=LocalityLevel.NUMA) in wishes.locality
    others = tuple(locality for locality in wishes.locality if locality.level is not LocalityLevel.NUMA)
    return (Locality(level=LocalityLevel.NUMA, is_hard=is_hard), *others)


def _want(view: NodeView, specs: Sequence[ClaimSpec]) -> ContainerDemand:
    """Find the classes that the claims are about, which matters for links: those that their
    requests name, or all when a class that another program defined is among them.
    """
    requests = [request for spec in specs for request in spec.devices.requests]
    exact = [
        alternative
        for request in requests
        for alternative in (request.exactly, *request.first_available)
        if alternative is not None
    ]
    named = {class_of_group(request.device_class_name) for request in exact}
    known_classes = {*view.devices, CPU_CLASS}
    classes = (
        {device_class for device_class in named if device_class is not None}
        if named <= known_classes
        else known_classes
    )
    return ContainerDemand(
        name="",
        place=0,
        kind=ContainerKind.APP,
        cpus=int(CPU_CLASS in classes),
        devices=tuple(
            DeviceDemand(device_class=device_class, any_count=1) for device_class in sorted(classes - {CPU_CLASS})
        ),
    )


def _outside(
    pools: Sequence[Pool], node: str, domain: Domain, outsides: dict[int, Mapping[DeviceId, str]]
) -> Mapping[DeviceId, str]:
    """List the devices that do not lie within a domain, with the reason.

    Each domain is computed once.
    """
    if id(domain) not in outsides:
        why = f"outside {domain.key}"
        outsides[id(domain)] = {
            candidate.id: why
            for pool in pools
            for candidate in pool.candidates
            if not _is_within(candidate, node, domain)
        }
    return outsides[id(domain)]


def _is_within(candidate: Candidate, node: str, domain: Domain) -> bool:
    """Say whether a device lies within a domain.

    A device whose place is unknown, such as another vendor's, lies in none.
    """
    device_class = class_of_device(candidate.id.driver, candidate.id.device)
    if device_class is None or node_of_pool(candidate.id.pool) != node:
        return False
    if device_class == CPU_CLASS:
        return domain.cpus is None or cpu_of_name(candidate.id.device) in domain.cpus
    names = parts_of(candidate.device) if device_class == SHAPE_CLASS else (candidate.id.device,)
    return all(
        part_class not in domain.devices or name in domain.devices[part_class]
        for name in names
        for part_class in [class_of_device(DRIVER, name) or ""]
    )


def _objection(view: NodeView, wished: Sequence[AlignedClaims], results: Sequence[AllocationResult]) -> str | None:
    """Return the engine's objection to an allocation. None when it admits it."""
    for aligned_claims, result in zip(wished, results, strict=True):
        if aligned_claims.wishes is None:
            continue
        request = placement_request(aligned_claims.claim.object, result, view.node, aligned_claims.wishes)
        if request is None:
            continue
        node_view = without_owners(view, frozenset({aligned_claims.claim.owner.key}))
        if isinstance(plan(node_view, request), Placement):
            continue
        judged = place(node_view, request)  # the same, with its reasons
        if isinstance(judged, Refusal):
            return summarize(judged.reasons)
    return None


def _join_wishes(wishes: Sequence[AlignmentRequest | None]) -> str:
    """Name the wishes, each once."""
    return ", ".join(
        dict.fromkeys(
            text
            for alignment_request in wishes
            if alignment_request is not None
            for text in _wish_texts(alignment_request)
        )
    )


def _wish_texts(wishes: AlignmentRequest) -> tuple[str, ...]:
    policy = () if wishes.policy in (None, Policy.NONE) else (f"policy {wishes.policy}",)
    return (*policy, *(str(locality) for locality in wishes.locality))
