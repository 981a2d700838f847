"""The limits that resource.k8s.io/v1alpha2 puts on its objects, and the rules for our own
parameters.

Each check returns one Problem for each limit that is broken, in the order of the fields.
Source: k8s.io/api/resource/v1alpha2/types.go and pkg/apis/resource/validation/validation.go, 1.30.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topobus.formats.kubernetes.classic import classic as c
from topobus.formats.kubernetes.classic import classic_parameters as p
from topobus.formats.kubernetes.objects import CLAIM_PARAMETERS, CLASS_PARAMETERS
from topobus.formats.kubernetes.resource import NodeSelector
from topobus.formats.kubernetes.shape import Problem, did_you_mean, read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.names import is_dns_subdomain

__all__ = [
    "MAX_HANDLES",
    "MAX_HANDLE_BYTES",
    "MAX_NODES",
    "MAX_RESERVED",
    "check_classic",
    "check_context",
    "check_status",
]

MAX_NODES = 128
"""Potential nodes of a pod, and unsuitable nodes of a claim."""
MAX_HANDLES = 32
MAX_HANDLE_BYTES = 16 * 1024
MAX_RESERVED = 32
MAX_DRIVER_NAME = 63


def check_classic(api_object: ApiObject) -> list[Problem]:
    """Check the spec of any object of classic DRA, our own parameters included.

    Errors: raises ContractError when a field has a wrong type.
    """
    if api_object.kind == "ResourceClass":
        return _check_class(read_as(api_object.spec, c.ResourceClassSpec, where="spec"))
    if api_object.kind == "ResourceClaim":
        return _check_claim(read_as(api_object.spec, c.ClaimSpec, where="spec"), "spec")
    if api_object.kind == "ResourceClaimTemplate":
        return _check_claim(read_as(api_object.spec, c.ClaimTemplateSpec, where="spec").spec, "spec.spec")
    if api_object.kind == "PodSchedulingContext":
        return check_context(read_as(api_object.spec, c.PodSchedulingSpec, where="spec"))
    if p.device_class_of_group(api_object.api_version.partition("/")[0]):
        if api_object.kind == CLASS_PARAMETERS:
            return p.check_class_parameters(read_as(api_object.spec, p.DeviceClassParameters, where="spec"))
        if api_object.kind == CLAIM_PARAMETERS:
            return p.check_claim_parameters(read_as(api_object.spec, p.ClaimParameters, where="spec"))
    return []


def check_context(spec: c.PodSchedulingSpec) -> list[Problem]:
    """Check the nodes that a scheduler proposes for a pod."""
    return [*_check_nodes(spec.potential_nodes, "spec.potentialNodes")]


def check_status(status: c.ClaimStatus) -> list[Problem]:
    """Check the status of a classic claim before it is written.

    Order: of the fields. Errors: raises nothing. A sound status gives an empty list.
    Source: k8s.io/kubernetes pkg/apis/resource/validation/validation.go, 1.30.
    """
    problems: list[Problem] = []
    allocation = status.allocation
    if allocation is None:
        if status.reserved_for:
            problems.append(Problem("status.reservedFor", "wanted none without an allocation"))
        if status.deallocation_requested:
            problems.append(Problem("status.deallocationRequested", "wanted false without an allocation"))
        return problems
    if not status.driver_name:
        problems.append(Problem("status.driverName", "wanted the driver's name beside an allocation"))
    if len(allocation.resource_handles) > MAX_HANDLES:
        problems.append(
            Problem(
                "status.allocation.resourceHandles",
                f"got {len(allocation.resource_handles)}, wanted at most {MAX_HANDLES}",
            )
        )
    for index, handle in enumerate(allocation.resource_handles):
        if len(handle.data.encode()) > MAX_HANDLE_BYTES:
            got = len(handle.data.encode())
            problems.append(
                Problem(
                    f"status.allocation.resourceHandles[{index}].data",
                    f"got {got} bytes, wanted at most {MAX_HANDLE_BYTES}",
                )
            )
    most = MAX_RESERVED if allocation.shareable else 1
    if len(status.reserved_for) > most:
        problems.append(Problem("status.reservedFor", f"got {len(status.reserved_for)}, wanted at most {most}"))
    return problems


def _check_class(spec: c.ResourceClassSpec) -> list[Problem]:
    problems: list[Problem] = []
    if not is_dns_subdomain(spec.driver_name) or len(spec.driver_name) > MAX_DRIVER_NAME:
        problems.append(
            Problem(
                "driverName", f"got {spec.driver_name!r}, wanted a DNS name of at most {MAX_DRIVER_NAME} characters"
            )
        )
    if spec.parameters_ref is not None:
        problems.extend(_check_reference(spec.parameters_ref, "parametersRef"))
    if spec.suitable_nodes is not None:
        problems.extend(_check_selector(spec.suitable_nodes, "suitableNodes"))
    return problems


def _check_claim(spec: c.ClaimSpec, path: str) -> list[Problem]:
    problems: list[Problem] = []
    if not is_dns_subdomain(spec.resource_class_name):
        problems.append(
            Problem(
                f"{path}.resourceClassName", f"got {spec.resource_class_name!r}, wanted the name of a ResourceClass"
            )
        )
    if spec.parameters_ref is not None:
        problems.extend(_check_reference(spec.parameters_ref, f"{path}.parametersRef"))
    if spec.allocation_mode not in ("", *c.ALLOCATION_MODES):
        meant = did_you_mean(spec.allocation_mode, c.ALLOCATION_MODES)
        problems.append(
            Problem(
                f"{path}.allocationMode",
                f"got {spec.allocation_mode!r}, wanted one of {', '.join(c.ALLOCATION_MODES)}{meant}",
            )
        )
    return problems


def _check_reference(
    parameters_ref: c.ParametersReference | c.ClassParametersReference, path: str
) -> Iterator[Problem]:
    if parameters_ref.api_group and not is_dns_subdomain(parameters_ref.api_group):
        yield Problem(f"{path}.apiGroup", f"got {parameters_ref.api_group!r}, wanted a DNS name, without the version")
    for name, got in (("kind", parameters_ref.kind), ("name", parameters_ref.name)):
        if not got:
            yield Problem(f"{path}.{name}", "is missing")
    if parameters_ref.name and not is_dns_subdomain(parameters_ref.name):
        yield Problem(f"{path}.name", f"got {parameters_ref.name!r}, wanted a DNS name")


def _check_nodes(names: Sequence[str], path: str) -> Iterator[Problem]:
    if len(names) > MAX_NODES:
        yield Problem(path, f"got {len(names)} nodes, wanted at most {MAX_NODES}")
    for name in sorted({name for name in names if names.count(name) > 1}) if len(names) <= MAX_NODES else ():
        yield Problem(path, f"{name} is in the list twice")


def _check_selector(selector: NodeSelector, path: str) -> Iterator[Problem]:
    if not selector.node_selector_terms:
        yield Problem(f"{path}.nodeSelectorTerms", "wanted at least one term")
    for index, term in enumerate(selector.node_selector_terms):
        for key, requirements in (("matchExpressions", term.match_expressions), ("matchFields", term.match_fields)):
            for number, requirement in enumerate(requirements):
                here = f"{path}.nodeSelectorTerms[{index}].{key}[{number}]"
                legal = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
                if requirement.operator not in legal:
                    yield Problem(f"{here}.operator", f"got {requirement.operator!r}, wanted one of {', '.join(legal)}")
                elif requirement.operator in ("Exists", "DoesNotExist") and requirement.values:
                    yield Problem(f"{here}.values", f"wanted none with {requirement.operator}")
                elif requirement.operator in ("In", "NotIn") and not requirement.values:
                    yield Problem(f"{here}.values", f"wanted at least one with {requirement.operator}")
