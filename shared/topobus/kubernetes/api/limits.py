"""The limits that resource.k8s.io/v1 puts on its objects, checked on the way in and on the way out.

Flows in: an object whose fields have the right types. Flows out: one Problem for each limit that is broken, in the order of the fields. Slices stand in
`slice_limits`, the numbers in `limit_rules`; both are found here, too.
Source: k8s.io/api/resource/v1/types.go and pkg/apis/resource/validation/validation.go, 1.36.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from topobus.contracts.messages import ApiObject
from topobus.domain.errors import ContractError
from topobus.domain.names import is_dns_label, is_dns_subdomain, is_extended_resource_name
from topobus.kubernetes.api import resource as r
from topobus.kubernetes.api.classic import is_classic
from topobus.kubernetes.api.classic_limits import check_classic
from topobus.kubernetes.api.classic_parameters import device_class_of_group
from topobus.kubernetes.api.limit_rules import (
    MAX_ALTERNATIVES,
    MAX_ATTRIBUTE_VALUES,
    MAX_ATTRIBUTES,
    MAX_DEVICE_STATUS_CONDITIONS,
    MAX_DEVICES,
    MAX_EXPRESSION_BYTES,
    MAX_GRANTED_CONFIGURATIONS,
    MAX_HARDWARE_ADDRESS,
    MAX_INTERFACE_ADDRESSES,
    MAX_INTERFACE_NAME,
    MAX_LIST,
    MAX_PARAMETER_BYTES,
    MAX_RESERVED_FOR,
    MAX_TEXT,
    MAX_TOLERATIONS,
    at_most,
    check_binding,
    check_driver,
    check_label,
    check_node_selector,
    check_pool_name,
    check_toleration,
    each,
    is_qualified,
    quantities,
    unique,
)
from topobus.kubernetes.api.objects import metadata_of
from topobus.kubernetes.api.shape import Problem, did_you_mean, read_as
from topobus.kubernetes.api.slice_limits import check_slice, check_taint_rule

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


def check_object(one: ApiObject) -> list[Problem]:
    """Check name and spec of any object that we know; of a claim, its status too."""
    metadata = metadata_of(one)
    found: list[Problem] = []
    if not is_dns_subdomain(metadata.name):
        found.append(Problem("metadata.name", f"got {metadata.name!r}, wanted a DNS name: lower-case letters, digits, '-' and '.'"))
    if metadata.namespace and not is_dns_label(metadata.namespace):
        found.append(Problem("metadata.namespace", f"got {metadata.namespace!r}, wanted a DNS label: lower-case letters, digits and '-'"))
    try:
        if is_classic(one) or device_class_of_group(one.api_version.partition("/")[0]):
            found.extend(check_classic(one))
        elif one.kind == "ResourceClaim":
            found.extend(check_claim(read_as(one.spec, r.ClaimSpec, where="spec")))
        elif one.kind == "ResourceClaimTemplate":
            found.extend(check_claim(read_as(one.spec, r.ClaimTemplateSpec, where="spec").spec, "spec.spec"))
        elif one.kind == "DeviceClass":
            found.extend(check_class(read_as(one.spec, r.DeviceClassSpec, where="spec")))
        elif one.kind == "ResourceSlice":
            found.extend(check_slice(read_as(one.spec, r.SliceSpec, where="spec")))
        elif one.kind == "DeviceTaintRule":
            found.extend(check_taint_rule(read_as(one.spec, r.TaintRuleSpec, where="spec")))
    except ContractError as err:
        found.append(Problem("", str(err)))
    return found


def check_claim(spec: r.ClaimSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a claim."""
    path = f"{path}.devices"
    known = _request_names(spec)
    found = [
        *at_most(spec.devices.requests, MAX_LIST, f"{path}.requests"),
        *unique([one.name for one in spec.devices.requests], f"{path}.requests"),
        *each(spec.devices.requests, f"{path}.requests", _check_request),
        *at_most(spec.devices.constraints, MAX_LIST, f"{path}.constraints"),
    ]
    for index, constraint in enumerate(spec.devices.constraints):
        here = f"{path}.constraints[{index}]"
        found.extend(_references(constraint.requests, known, f"{here}.requests"))
        if (constraint.match_attribute is None) == (constraint.distinct_attribute is None):
            found.append(Problem(here, "wanted exactly one of matchAttribute and distinctAttribute"))
        found.extend(
            Problem(here, f"got the attribute {attribute!r}, wanted domain/name, such as resource.kubernetes.io/pcieRoot")
            for attribute in (constraint.match_attribute, constraint.distinct_attribute)
            if attribute is not None and not is_qualified(attribute, needs_domain=True)
        )
    found.extend(at_most(spec.devices.config, MAX_LIST, f"{path}.config"))
    for index, configuration in enumerate(spec.devices.config):
        found.extend(_references(configuration.requests, known, f"{path}.config[{index}].requests"))
        found.extend(_check_opaque(configuration.opaque, f"{path}.config[{index}]"))
    return found


def check_class(spec: r.DeviceClassSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a device class."""
    found = [*_check_selectors(spec.selectors, f"{path}.selectors"), *at_most(spec.config, MAX_LIST, f"{path}.config")]
    for index, one in enumerate(spec.config):
        found.extend(_check_opaque(one.opaque, f"{path}.config[{index}]"))
    name = spec.extended_resource_name
    if name is not None and not is_extended_resource_name(name):
        found.append(Problem(f"{path}.extendedResourceName", f"got {name!r}, wanted an extended resource such as example.com/gpu"))
    return found


def check_allocation(result: r.AllocationResult, spec: r.ClaimSpec | None = None) -> list[Problem]:
    """Check an allocation before it is written; with the claim's spec, also whether the requests that it names are there."""
    known = _request_names(spec) if spec is not None else None
    found = list(at_most(result.devices.results, MAX_LIST, f"{_ALLOCATION}.devices.results"))
    for index, granted in enumerate(result.devices.results):
        here = f"{_ALLOCATION}.devices.results[{index}]"
        if known is not None:
            found.extend(_references((granted.request,), known, f"{here}.request"))
        found.extend(_check_device_id(granted.driver, granted.pool, granted.device, here))
        found.extend(at_most(granted.tolerations, MAX_TOLERATIONS, f"{here}.tolerations"))
        found.extend(each(granted.tolerations, f"{here}.tolerations", check_toleration))
        found.extend(check_binding(granted.binding_conditions, granted.binding_failure_conditions, here))
        found.extend(quantities(granted.consumed_capacity, f"{here}.consumedCapacity"))
    found.extend(at_most(result.devices.config, MAX_GRANTED_CONFIGURATIONS, f"{_ALLOCATION}.devices.config"))
    for index, one in enumerate(result.devices.config):
        here = f"{_ALLOCATION}.devices.config[{index}]"
        if one.source not in _SOURCES:
            found.append(Problem(f"{here}.source", f"got {one.source!r}, wanted one of {', '.join(_SOURCES)}"))
        found.extend(_references(one.requests, known if known is not None else list(one.requests), f"{here}.requests"))
        found.extend(_check_opaque(one.opaque, here))
    if result.node_selector is not None:
        found.extend(check_node_selector(result.node_selector, f"{_ALLOCATION}.nodeSelector"))
    return found


def check_status(status: r.ClaimStatus, spec: r.ClaimSpec | None = None) -> list[Problem]:
    """Check the whole status of a claim before it is written."""
    found = list(check_allocation(status.allocation, spec)) if status.allocation is not None else []
    if status.allocation is not None:
        for index, one in enumerate(status.allocation.devices.results):
            if one.share_id is not None and not _UUID.fullmatch(one.share_id):
                path = f"{_ALLOCATION}.devices.results[{index}].shareID"
                found.append(Problem(path, f"got {one.share_id!r}, wanted a UUID in lower case"))
    found.extend(at_most(status.reserved_for, MAX_RESERVED_FOR, "status.reservedFor"))
    found.extend(unique([str(one.get("uid")) for one in status.reserved_for], "status.reservedFor", field="uid"))
    for index, user in enumerate(status.reserved_for):
        missing = [name for name in ("resource", "name", "uid") if not user.get(name)]
        if missing:
            found.append(Problem(f"status.reservedFor[{index}]", f"wanted {', '.join(missing)}"))
    if status.reserved_for and status.allocation is None:
        found.append(Problem("status.reservedFor", "wanted none without an allocation"))
    found.extend(_check_devices(status))
    return found


def _check_devices(status: r.ClaimStatus) -> Iterator[Problem]:
    """Check what drivers say about the devices of a claim."""
    results = status.allocation.devices.results if status.allocation is not None else ()
    granted = {(one.driver, one.pool, one.device, one.share_id) for one in results}
    ids = [(one.get("driver"), one.get("pool"), one.get("device"), one.get("shareID")) for one in status.devices]
    yield from unique([str(one) for one in ids], "status.devices", field="device")
    for index, one in enumerate(status.devices):
        path = f"status.devices[{index}]"
        if ids[index] not in granted:
            yield Problem(path, "wanted a device that the claim was allocated")
        yield from at_most(one.get("conditions") or (), MAX_DEVICE_STATUS_CONDITIONS, f"{path}.conditions")
        if one.get("data") is not None:
            yield from _check_parameters(one["data"], f"{path}.data")
        network = one.get("networkData")
        if isinstance(network, Mapping):
            yield from _check_network(network, f"{path}.networkData")


def _check_network(network: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, limit in (("interfaceName", MAX_INTERFACE_NAME), ("hardwareAddress", MAX_HARDWARE_ADDRESS)):
        if len(str(network.get(name) or "").encode()) > limit:
            yield Problem(f"{path}.{name}", f"wanted at most {limit} bytes")
    addresses = [str(one) for one in network.get("ips") or ()]
    yield from at_most(addresses, MAX_INTERFACE_ADDRESSES, f"{path}.ips")
    yield from unique(addresses, f"{path}.ips", field="")
    for index, one in enumerate(addresses):
        try:
            is_address = "/" in one and str(ipaddress.ip_interface(one)) == one
        except ValueError:
            is_address = False
        if not is_address:
            yield Problem(f"{path}.ips[{index}]", f"got {one!r}, wanted an address with its prefix, such as 192.0.2.5/24")


def _check_device_id(driver: str, pool: str, device: str, path: str) -> Iterator[Problem]:
    yield from check_driver(driver, f"{path}.driver")
    yield from check_pool_name(pool, f"{path}.pool")
    yield from check_label(device, f"{path}.device")


def _check_request(one: r.ClaimRequest, path: str) -> Iterator[Problem]:
    yield from check_label(one.name, f"{path}.name")
    if (one.exactly is None) == (not one.first_available):
        yield Problem(path, "wanted exactly one of exactly and firstAvailable")
    if one.exactly is not None:
        yield from _check_exact(one.exactly, f"{path}.exactly")
    yield from at_most(one.first_available, MAX_ALTERNATIVES, f"{path}.firstAvailable")
    yield from unique([sub.name for sub in one.first_available], f"{path}.firstAvailable")
    for index, sub in enumerate(one.first_available):
        yield from check_label(sub.name, f"{path}.firstAvailable[{index}].name")
        yield from _check_exact(sub, f"{path}.firstAvailable[{index}]")


def _check_exact(one: r.ExactRequest | r.SubRequest, path: str) -> Iterator[Problem]:
    if not is_dns_subdomain(one.device_class_name):
        yield Problem(f"{path}.deviceClassName", f"got {one.device_class_name!r}, wanted the name of a DeviceClass")
    if one.allocation_mode not in ("", *_MODES):
        yield Problem(
            f"{path}.allocationMode", f"got {one.allocation_mode!r}, wanted ExactCount or All{did_you_mean(one.allocation_mode, _MODES)}"
        )
    if one.allocation_mode == "All" and one.count:
        yield Problem(f"{path}.count", "wanted none with allocationMode All")
    if one.allocation_mode != "All" and one.count is not None and one.count < 1:
        yield Problem(f"{path}.count", f"got {one.count}, wanted at least 1")
    yield from _check_selectors(one.selectors, f"{path}.selectors")
    yield from at_most(one.tolerations, MAX_TOLERATIONS, f"{path}.tolerations")
    yield from each(one.tolerations, f"{path}.tolerations", check_toleration)
    if one.capacity is not None:
        yield from quantities(one.capacity.requests, f"{path}.capacity.requests")
        for name in one.capacity.requests:
            if not is_qualified(name):
                yield Problem(
                    f"{path}.capacity.requests.{name}", "wanted a C identifier of at most 32 characters, after a domain or without"
                )


def _check_selectors(selectors: Sequence[r.Selector], path: str) -> Iterator[Problem]:
    yield from at_most(selectors, MAX_LIST, path)
    for index, one in enumerate(selectors):
        if one.cel is None:
            yield Problem(f"{path}[{index}]", "wanted cel, the only kind of selector")
            continue
        size = len(one.cel.expression.encode("utf-8", "replace"))
        if not 1 <= size <= MAX_EXPRESSION_BYTES:
            yield Problem(f"{path}[{index}].cel.expression", f"got {size} bytes, wanted 1 to {MAX_EXPRESSION_BYTES} bytes")


def _check_opaque(opaque: r.OpaqueConfiguration | None, path: str) -> Iterator[Problem]:
    if opaque is None:
        yield Problem(path, "wanted opaque, the only kind of configuration")
        return
    yield from check_driver(opaque.driver, f"{path}.opaque.driver")
    yield from _check_parameters(opaque.parameters, f"{path}.opaque.parameters")


def _check_parameters(parameters: object, path: str) -> Iterator[Problem]:
    if not isinstance(parameters, Mapping):
        yield Problem(path, f"got {type(parameters).__name__ if parameters is not None else 'nothing'}, wanted a JSON object")
        return
    size = len(msgspec.json.encode(parameters))
    if size > MAX_PARAMETER_BYTES:
        yield Problem(path, f"got {size} bytes, wanted at most {MAX_PARAMETER_BYTES}")


def _request_names(spec: r.ClaimSpec) -> list[str]:
    return [name for one in spec.devices.requests for name in (one.name, *(f"{one.name}/{sub.name}" for sub in one.first_available))]


def _references(names: Sequence[str], known: Sequence[str], path: str) -> Iterator[Problem]:
    """Check names of requests: each is one, and none stands twice."""
    if len(names) > MAX_LIST:
        yield from at_most(names, MAX_LIST, path)
        return
    yield from unique(names, path, field="")
    for index, name in enumerate(names):
        if name not in known:
            yield Problem(f"{path}[{index}]", f"there is no request {name!r}{did_you_mean(name, known)}")
