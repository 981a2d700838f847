"""Builds the result of an allocation for a claim's status: devices, configurations, node selector.

Source: docs/knowledge/dynamic-resource-allocation.md#results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.requests import Alternatives, FaultError, PreparedRequest
from topobus.engine.allocation.values import (
    AllocationInput,
    ClaimToAllocate,
    Gate,
    Mode,
)
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    DevicesAllocated,
    GrantedConfiguration,
    GrantedDevice,
    NodeRequirement,
    NodeSelector,
    NodeSelectorTerm,
)
from topobus.values.outcome import Reason
from topobus.values.quantity import Quantity

__all__ = ["SHARE_PREFIX", "Grant", "assemble"]

SHARE_PREFIX = "SHARE-"
"""A share id before the shell replaces it by a UUID."""


class Grant(NamedTuple):
    """One device granted to one request."""

    request: PreparedRequest
    candidate: Candidate
    amounts: Mapping[str, Quantity]
    is_shared: bool


def assemble(
    given: AllocationInput,
    requests: Sequence[Sequence[Alternatives]],
    chosen: Mapping[tuple[int, int], int],
    grants: Sequence[Sequence[Grant]],
) -> tuple[AllocationResult, ...]:
    """Write one result for each claim.

    Errors: raises FaultError for a slice whose node selector has more than one term.
    """
    results: list[AllocationResult] = []
    shares = 0
    for index, claim in enumerate(given.claims):
        devices: list[GrantedDevice] = []
        for grant in grants[index]:
            devices.append(_device(grant, f"{SHARE_PREFIX}{shares}", given.gates))
            shares += grant.is_shared
        ways = tuple(
            alternatives[chosen.get((index, number), 0)] for number, alternatives in enumerate(requests[index])
        )
        results.append(
            AllocationResult(
                devices=DevicesAllocated(results=tuple(devices), config=_configurations(claim, ways, given.mode)),
                node_selector=_node_selector(grants[index], given.node.name, claim.name),
            )
        )
    return tuple(results)


def _device(grant: Grant, share_id: str, gates: frozenset[Gate]) -> GrantedDevice:
    candidate, has_binding = grant.candidate, Gate.BINDING_CONDITIONS in gates
    return GrantedDevice(
        request=grant.request.name,
        driver=candidate.id.driver,
        pool=candidate.id.pool,
        device=candidate.id.device,
        admin_access=True if grant.request.is_admin else None,
        tolerations=grant.request.tolerations,
        binding_conditions=candidate.device.binding_conditions if has_binding else (),
        binding_failure_conditions=candidate.device.binding_failure_conditions if has_binding else (),
        share_id=share_id if grant.is_shared else None,
        consumed_capacity={name: str(amount) for name, amount in grant.amounts.items()},
    )


def _configurations(
    claim: ClaimToAllocate, ways: Sequence[PreparedRequest], mode: Mode
) -> tuple[GrantedConfiguration, ...]:
    """Collect the classes' configurations, each class once, then the claim's.

    Order: a driver applies the later one over the earlier.
    """
    granted_configurations: list[GrantedConfiguration] = []
    for name in dict.fromkeys(way.class_name for way in ways):
        users = tuple(way.name for way in ways if way.class_name == name)
        spec = next(way.device_class for way in ways if way.class_name == name)
        granted_configurations.extend(
            GrantedConfiguration(source="FromClass", requests=users, opaque=configuration.opaque)
            for configuration in spec.config
        )
    for configuration in claim.spec.devices.config:
        copies = (
            sum(not {way.base, way.name}.isdisjoint(configuration.requests) for way in ways)
            if configuration.requests
            else 1
        )
        copied = GrantedConfiguration(source="FromClaim", requests=configuration.requests, opaque=configuration.opaque)
        # Upstream copies a configuration once for each request that it names. Once is enough,
        # because it lists its requests itself.
        granted_configurations.extend([copied] * (min(copies, 1) if mode is Mode.CORRECTED else copies))
    return tuple(granted_configurations)


def _node_selector(grants: Sequence[Grant], node: str, claim: str) -> NodeSelector | None:
    """Find on which nodes the devices can be used: this one, those of the slices' selectors, or any
    (None).
    """
    expressions: list[NodeRequirement] = []
    fields: list[NodeRequirement] = []
    for grant in grants:
        device, spec = grant.candidate.device, grant.candidate.slice
        name, selector = (
            (device.node_name, device.node_selector)
            if spec.per_device_node_selection
            else (spec.node_name, spec.node_selector)
        )
        if name or device.binds_to_node:
            only = NodeRequirement(key="metadata.name", operator="In", values=(node,))
            return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(only,)),))
        terms = selector.node_selector_terms if selector is not None else ()
        if len(terms) > 1:
            raise FaultError(
                Reason(
                    code="node-selector",
                    message=f"claim {claim}: the node selector of {grant.candidate.id} has {len(terms)} terms, wanted "
                    "one",
                )
            )
        for term in terms:
            _add_new(fields, term.match_fields)
            _add_new(expressions, term.match_expressions)
    if not expressions and not fields:
        return None
    return NodeSelector(
        node_selector_terms=(NodeSelectorTerm(match_expressions=tuple(expressions), match_fields=tuple(fields)),)
    )


def _add_new(node_requirements: list[NodeRequirement], more: Sequence[NodeRequirement]) -> None:
    for node_requirement in more:
        if not any(
            (node_requirement.key, node_requirement.operator, set(node_requirement.values))
            == (old.key, old.operator, set(old.values))
            for old in node_requirements
        ):
            node_requirements.append(node_requirement)
