"""The limits that resource.k8s.io/v1 puts on its objects, checked on the way in and on the way out.

Each check returns one Problem for each limit that is broken, in the order of the fields. The checks
of slices are in `slice_limits` and the numbers in `limit_rules`. Both can be imported from here.
Source: k8s.io/api/resource/v1/types.go and pkg/apis/resource/validation/validation.go, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.classic.classic_limits import check_classic
from topobus.formats.kubernetes.classic.classic_parameters import device_class_of_group
from topobus.formats.kubernetes.device_status_limits import check_device_statuses
from topobus.formats.kubernetes.limit_rules import (
    MAX_ALTERNATIVES,
    MAX_ATTRIBUTE_VALUES,
    MAX_ATTRIBUTES,
    MAX_DEVICES,
    MAX_EXPRESSION_BYTES,
    MAX_GRANTED_CONFIGURATIONS,
    MAX_LIST,
    MAX_RESERVED_FOR,
    MAX_TEXT,
    MAX_TOLERATIONS,
    at_most,
    check_binding,
    check_driver,
    check_label,
    check_node_selector,
    check_parameters,
    check_pool_name,
    check_toleration,
    each,
    is_qualified,
    quantities,
    unique,
)
from topobus.formats.kubernetes.objects import metadata_of
from topobus.formats.kubernetes.shape import Problem, did_you_mean, read_as
from topobus.formats.kubernetes.slice_limits import check_slice, check_taint_rule
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.names import is_dns_label, is_dns_subdomain, is_extended_resource_name

__all__ = [
    "MAX_ALTERNATIVES",
    "MAX_ATTRIBUTES",
    "MAX_ATTRIBUTE_VALUES",
    "MAX_DEVICES",
    "MAX_EXPRESSION_BYTES",
    "MAX_LIST",
    "MAX_TEXT",
    "check_allocation",
    "check_claim",
    "check_class",
    "check_object",
    "check_slice",
    "check_status",
    "check_taint_rule",
]

_MODES = ("ExactCount", "All")
_SOURCES = ("FromClass", "FromClaim")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALLOCATION = "status.allocation"


def check_object(api_object: ApiObject) -> list[Problem]:
    """Check name, namespace and spec of an object of any kind that Topobus knows, classic objects
    and parameters included.

    Of an unknown kind only name and namespace are checked. Order: name, namespace, then the fields
    of the spec. Errors: raises nothing. A spec with wrong types gives one Problem.
    Source: k8s.io/kubernetes pkg/apis/resource/validation/validation.go, 1.36.
    """
    metadata = metadata_of(api_object)
    problems: list[Problem] = []
    if not is_dns_subdomain(metadata.name):
        problems.append(
            Problem(
                "metadata.name", f"got {metadata.name!r}, wanted a DNS name: lower-case letters, digits, '-' and '.'"
            )
        )
    if metadata.namespace and not is_dns_label(metadata.namespace):
        problems.append(
            Problem(
                "metadata.namespace",
                f"got {metadata.namespace!r}, wanted a DNS label: lower-case letters, digits and '-'",
            )
        )
    try:
        if is_classic(api_object) or device_class_of_group(api_object.api_version.partition("/")[0]):
            problems.extend(check_classic(api_object))
        elif api_object.kind == "ResourceClaim":
            problems.extend(check_claim(read_as(api_object.spec, r.ClaimSpec, where="spec")))
        elif api_object.kind == "ResourceClaimTemplate":
            problems.extend(check_claim(read_as(api_object.spec, r.ClaimTemplateSpec, where="spec").spec, "spec.spec"))
        elif api_object.kind == "DeviceClass":
            problems.extend(check_class(read_as(api_object.spec, r.DeviceClassSpec, where="spec")))
        elif api_object.kind == "ResourceSlice":
            problems.extend(check_slice(read_as(api_object.spec, r.SliceSpec, where="spec")))
        elif api_object.kind == "DeviceTaintRule":
            problems.extend(check_taint_rule(read_as(api_object.spec, r.TaintRuleSpec, where="spec")))
    except ContractError as err:
        problems.append(Problem("", str(err)))
    return problems


def check_claim(spec: r.ClaimSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a claim."""
    path = f"{path}.devices"
    request_names = _request_names(spec)
    problems = [
        *at_most(spec.devices.requests, MAX_LIST, f"{path}.requests"),
        *unique([request.name for request in spec.devices.requests], f"{path}.requests"),
        *each(spec.devices.requests, f"{path}.requests", _check_request),
        *at_most(spec.devices.constraints, MAX_LIST, f"{path}.constraints"),
    ]
    for index, constraint in enumerate(spec.devices.constraints):
        here = f"{path}.constraints[{index}]"
        problems.extend(_references(constraint.requests, request_names, f"{here}.requests"))
        if (constraint.match_attribute is None) == (constraint.distinct_attribute is None):
            problems.append(Problem(here, "wanted exactly one of matchAttribute and distinctAttribute"))
        problems.extend(
            Problem(
                here, f"got the attribute {attribute!r}, wanted domain/name, such as resource.kubernetes.io/pcieRoot"
            )
            for attribute in (constraint.match_attribute, constraint.distinct_attribute)
            if attribute is not None and not is_qualified(attribute, needs_domain=True)
        )
    problems.extend(at_most(spec.devices.config, MAX_LIST, f"{path}.config"))
    for index, configuration in enumerate(spec.devices.config):
        problems.extend(_references(configuration.requests, request_names, f"{path}.config[{index}].requests"))
        problems.extend(_check_opaque(configuration.opaque, f"{path}.config[{index}]"))
    return problems


def check_class(spec: r.DeviceClassSpec) -> list[Problem]:
    """Check the spec of a device class."""
    problems = [
        *_check_selectors(spec.selectors, "spec.selectors"),
        *at_most(spec.config, MAX_LIST, "spec.config"),
    ]
    for index, configuration in enumerate(spec.config):
        problems.extend(_check_opaque(configuration.opaque, f"spec.config[{index}]"))
    name = spec.extended_resource_name
    if name is not None and not is_extended_resource_name(name):
        problems.append(
            Problem("spec.extendedResourceName", f"got {name!r}, wanted an extended resource such as example.com/gpu")
        )
    return problems


def check_allocation(result: r.AllocationResult, spec: r.ClaimSpec | None = None) -> list[Problem]:
    """Check an allocation before it is written.

    Shapes: spec — the claim's; with it, also check that the requests that the allocation names
            exist.
    """
    request_names = _request_names(spec) if spec is not None else None
    problems = list(at_most(result.devices.results, MAX_LIST, f"{_ALLOCATION}.devices.results"))
    for index, granted in enumerate(result.devices.results):
        here = f"{_ALLOCATION}.devices.results[{index}]"
        if request_names is not None:
            problems.extend(_references((granted.request,), request_names, f"{here}.request"))
        problems.extend(_check_device_id(granted.driver, granted.pool, granted.device, here))
        problems.extend(at_most(granted.tolerations, MAX_TOLERATIONS, f"{here}.tolerations"))
        problems.extend(each(granted.tolerations, f"{here}.tolerations", check_toleration))
        problems.extend(check_binding(granted.binding_conditions, granted.binding_failure_conditions, here))
        problems.extend(quantities(granted.consumed_capacity, f"{here}.consumedCapacity"))
    problems.extend(at_most(result.devices.config, MAX_GRANTED_CONFIGURATIONS, f"{_ALLOCATION}.devices.config"))
    for index, granted_configuration in enumerate(result.devices.config):
        here = f"{_ALLOCATION}.devices.config[{index}]"
        if granted_configuration.source not in _SOURCES:
            problems.append(
                Problem(f"{here}.source", f"got {granted_configuration.source!r}, wanted one of {', '.join(_SOURCES)}")
            )
        problems.extend(
            _references(
                granted_configuration.requests,
                request_names if request_names is not None else list(granted_configuration.requests),
                f"{here}.requests",
            )
        )
        problems.extend(_check_opaque(granted_configuration.opaque, here))
    if result.node_selector is not None:
        problems.extend(check_node_selector(result.node_selector, f"{_ALLOCATION}.nodeSelector"))
    return problems


def check_status(status: r.ClaimStatus, spec: r.ClaimSpec | None = None) -> list[Problem]:
    """Check the whole status of a claim before it is written."""
    problems = list(check_allocation(status.allocation, spec)) if status.allocation is not None else []
    if status.allocation is not None:
        for index, granted_device in enumerate(status.allocation.devices.results):
            if granted_device.share_id is not None and not _UUID.fullmatch(granted_device.share_id):
                path = f"{_ALLOCATION}.devices.results[{index}].shareID"
                problems.append(Problem(path, f"got {granted_device.share_id!r}, wanted a UUID in lower case"))
    problems.extend(at_most(status.reserved_for, MAX_RESERVED_FOR, "status.reservedFor"))
    problems.extend(unique([str(user.get("uid")) for user in status.reserved_for], "status.reservedFor", field="uid"))
    for index, user in enumerate(status.reserved_for):
        missing = [name for name in ("resource", "name", "uid") if not user.get(name)]
        if missing:
            problems.append(Problem(f"status.reservedFor[{index}]", f"wanted {', '.join(missing)}"))
    if status.reserved_for and status.allocation is None:
        problems.append(Problem("status.reservedFor", "wanted none without an allocation"))
    problems.extend(check_device_statuses(status))
    return problems


def _check_device_id(driver: str, pool: str, device: str, path: str) -> Iterator[Problem]:
    yield from check_driver(driver, f"{path}.driver")
    yield from check_pool_name(pool, f"{path}.pool")
    yield from check_label(device, f"{path}.device")


def _check_request(claim_request: r.ClaimRequest, path: str) -> Iterator[Problem]:
    yield from check_label(claim_request.name, f"{path}.name")
    if (claim_request.exactly is None) == (not claim_request.first_available):
        yield Problem(path, "wanted exactly one of exactly and firstAvailable")
    if claim_request.exactly is not None:
        yield from _check_exact(claim_request.exactly, f"{path}.exactly")
    yield from at_most(claim_request.first_available, MAX_ALTERNATIVES, f"{path}.firstAvailable")
    yield from unique([sub.name for sub in claim_request.first_available], f"{path}.firstAvailable")
    for index, sub in enumerate(claim_request.first_available):
        yield from check_label(sub.name, f"{path}.firstAvailable[{index}].name")
        yield from _check_exact(sub, f"{path}.firstAvailable[{index}]")


def _check_exact(request: r.ExactRequest | r.SubRequest, path: str) -> Iterator[Problem]:
    if not is_dns_subdomain(request.device_class_name):
        yield Problem(f"{path}.deviceClassName", f"got {request.device_class_name!r}, wanted the name of a DeviceClass")
    if request.allocation_mode not in ("", *_MODES):
        yield Problem(
            f"{path}.allocationMode",
            f"got {request.allocation_mode!r}, wanted ExactCount or All{did_you_mean(request.allocation_mode, _MODES)}",
        )
    if request.allocation_mode == "All" and request.count:
        yield Problem(f"{path}.count", "wanted none with allocationMode All")
    if request.allocation_mode != "All" and request.count is not None and request.count < 1:
        yield Problem(f"{path}.count", f"got {request.count}, wanted at least 1")
    yield from _check_selectors(request.selectors, f"{path}.selectors")
    yield from at_most(request.tolerations, MAX_TOLERATIONS, f"{path}.tolerations")
    yield from each(request.tolerations, f"{path}.tolerations", check_toleration)
    if request.capacity is not None:
        yield from quantities(request.capacity.requests, f"{path}.capacity.requests")
        for name in request.capacity.requests:
            if not is_qualified(name):
                yield Problem(
                    f"{path}.capacity.requests.{name}",
                    "wanted a C identifier of at most 32 characters, after a domain or without",
                )


def _check_selectors(selectors: Sequence[r.Selector], path: str) -> Iterator[Problem]:
    yield from at_most(selectors, MAX_LIST, path)
    for index, selector in enumerate(selectors):
        if selector.cel is None:
            yield Problem(f"{path}[{index}]", "wanted cel, the only kind of selector")
            continue
        size = len(selector.cel.expression.encode("utf-8", "replace"))
        if not 1 <= size <= MAX_EXPRESSION_BYTES:
            yield Problem(
                f"{path}[{index}].cel.expression", f"got {size} bytes, wanted 1 to {MAX_EXPRESSION_BYTES} bytes"
            )


def _check_opaque(opaque: r.OpaqueConfiguration | None, path: str) -> Iterator[Problem]:
    if opaque is None:
        yield Problem(path, "wanted opaque, the only kind of configuration")
        return
    yield from check_driver(opaque.driver, f"{path}.opaque.driver")
    yield from check_parameters(opaque.parameters, f"{path}.opaque.parameters")


def _request_names(spec: r.ClaimSpec) -> list[str]:
    return [
        name
        for request in spec.devices.requests
        for name in (request.name, *(f"{request.name}/{sub.name}" for sub in request.first_available))
    ]


def _references(names: Sequence[str], declared: Sequence[str], path: str) -> Iterator[Problem]:
    """Check that each name is a declared request's, and that none occurs twice."""
    if len(names) > MAX_LIST:
        yield from at_most(names, MAX_LIST, path)
        return
    yield from unique(names, path, field="")
    for index, name in enumerate(names):
        if name not in declared:
            yield Problem(f"{path}[{index}]", f"there is no request {name!r}{did_you_mean(name, declared)}")
