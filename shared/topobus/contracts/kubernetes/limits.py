"""The limits that resource.k8s.io/v1 puts on its objects, checked on the way in and on the way out.

Flows in: an object whose fields have the right types. Flows out: one Problem for each limit that is broken, in the order of the fields.
Source: k8s.io/api/resource/v1/types.go and pkg/apis/resource/validation/validation.go, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import msgspec

from topobus.contracts.kubernetes import resource as r
from topobus.contracts.kubernetes.classic import is_classic
from topobus.contracts.kubernetes.classic_limits import check_classic
from topobus.contracts.kubernetes.classic_parameters import device_class_of_group
from topobus.contracts.kubernetes.objects import metadata_of
from topobus.contracts.kubernetes.shape import Problem, did_you_mean, read_as
from topobus.contracts.messages import ApiObject
from topobus.domain.errors import ContractError
from topobus.domain.names import is_dns_label, is_dns_subdomain
from topobus.domain.quantity import Quantity

__all__ = ["check_allocation", "check_claim", "check_class", "check_object", "check_slice"]

MAX_LIST = 32  # requests, selectors, constraints, configurations and granted devices
MAX_ALTERNATIVES = 8
MAX_TOLERATIONS = 16
MAX_GRANTED_CONFIGURATIONS = 64
MAX_EXPRESSION_BYTES = 10 * 1024
MAX_PARAMETER_BYTES = 10 * 1024
MAX_DEVICES = 128
# A device with taints, counters or list attributes makes a slice so large that only half as many fit into etcd's 1.5 MiB.
MAX_COMPLEX_DEVICES = 64
MAX_ATTRIBUTES = 32
MAX_ATTRIBUTE_VALUES = 48
MAX_TEXT = 64
MAX_TAINTS = 16
MAX_CONDITIONS = 4
MAX_COUNTER_SETS = 8
MAX_COUNTERS = 32
MAX_CONSUMED_SETS = 2
MAX_VALID_VALUES = 10

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_EFFECTS = ("NoSchedule", "NoExecute", "None")
_TOLERATED = ("NoSchedule", "NoExecute", "")
_MODES = ("ExactCount", "All")
_OPERATORS = ("Exists", "Equal")

T = TypeVar("T")


def check_object(one: ApiObject) -> list[Problem]:
    """Check name and spec of any object that we know."""
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
    except ContractError as err:
        found.append(Problem("", str(err)))
    return found


def check_claim(spec: r.ClaimSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a claim."""
    path = f"{path}.devices"
    found = [
        *_at_most(spec.devices.requests, MAX_LIST, f"{path}.requests"),
        *_unique([one.name for one in spec.devices.requests], f"{path}.requests"),
        *_each(spec.devices.requests, f"{path}.requests", _check_request),
        *_at_most(spec.devices.constraints, MAX_LIST, f"{path}.constraints"),
        *_at_most(spec.devices.config, MAX_LIST, f"{path}.config"),
        *_each(spec.devices.config, f"{path}.config", _check_configuration),
    ]
    known = [name for one in spec.devices.requests for name in (one.name, *(f"{one.name}/{sub.name}" for sub in one.first_available))]
    for index, constraint in enumerate(spec.devices.constraints):
        here = f"{path}.constraints[{index}]"
        found.extend(_known(constraint.requests, known, f"{here}.requests"))
        if (constraint.match_attribute is None) == (constraint.distinct_attribute is None):
            found.append(Problem(here, "wanted exactly one of matchAttribute and distinctAttribute"))
        attribute = constraint.match_attribute or constraint.distinct_attribute or ""
        if attribute and not _is_qualified(attribute, needs_domain=True):
            found.append(Problem(here, f"got the attribute {attribute!r}, wanted domain/name, such as resource.kubernetes.io/pcieRoot"))
    for index, configuration in enumerate(spec.devices.config):
        found.extend(_known(configuration.requests, known, f"{path}.config[{index}].requests"))
    return found


def check_class(spec: r.DeviceClassSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a device class."""
    return [
        *_check_selectors(spec.selectors, f"{path}.selectors"),
        *_at_most(spec.config, MAX_LIST, f"{path}.config"),
        *_each(spec.config, f"{path}.config", _check_configuration),
    ]


def check_slice(spec: r.SliceSpec, path: str = "spec") -> list[Problem]:
    """Check the spec of a slice: what each device may carry, and that exactly one way says which nodes it serves."""
    found: list[Problem] = []
    if not is_dns_subdomain(spec.driver) or len(spec.driver) > 63:
        found.append(Problem(f"{path}.driver", f"got {spec.driver!r}, wanted a DNS name of at most 63 characters"))
    if not all(is_dns_subdomain(part) for part in spec.pool.name.split("/")) or len(spec.pool.name) > 253:
        found.append(Problem(f"{path}.pool.name", f"got {spec.pool.name!r}, wanted DNS names joined by '/', 253 characters at most"))
    if spec.pool.resource_slice_count < 1 or spec.pool.generation < 0:
        found.append(Problem(f"{path}.pool", "wanted resourceSliceCount of at least 1 and generation of at least 0"))
    ways = [spec.node_name, spec.node_selector, spec.all_nodes or None, spec.per_device_node_selection or None]
    if sum(one is not None for one in ways) != 1:
        found.append(Problem(path, "wanted exactly one of nodeName, nodeSelector, allNodes and perDeviceNodeSelection"))
    if spec.node_selector is not None and len(spec.node_selector.node_selector_terms) != 1:
        found.append(Problem(f"{path}.nodeSelector", f"got {len(spec.node_selector.node_selector_terms)} terms, wanted exactly one"))
    is_complex = any(one.taints or one.consumes_counters or _list_values(one) for one in spec.devices)
    found.extend(_at_most(spec.devices, MAX_COMPLEX_DEVICES if is_complex else MAX_DEVICES, f"{path}.devices"))
    found.extend(_unique([one.name for one in spec.devices], f"{path}.devices"))
    found.extend(_each(spec.devices, f"{path}.devices", _check_device))
    if spec.devices and spec.shared_counters:
        found.append(Problem(path, "wanted either devices or sharedCounters, not both"))
    found.extend(_at_most(spec.shared_counters, MAX_COUNTER_SETS, f"{path}.sharedCounters"))
    for index, one in enumerate(spec.shared_counters):
        found.extend(_at_most(one.counters, MAX_COUNTERS, f"{path}.sharedCounters[{index}].counters"))
        found.extend(_quantities({key: counter.value for key, counter in one.counters.items()}, f"{path}.sharedCounters[{index}].counters"))
    return found


def check_allocation(result: r.AllocationResult) -> list[Problem]:
    """Check an allocation before it is written."""
    return [
        *_at_most(result.devices.results, MAX_LIST, "status.allocation.devices.results"),
        *_at_most(result.devices.config, MAX_GRANTED_CONFIGURATIONS, "status.allocation.devices.config"),
    ]


def _check_request(one: r.ClaimRequest, path: str) -> Iterator[Problem]:
    if not is_dns_label(one.name):
        yield Problem(f"{path}.name", f"got {one.name!r}, wanted a DNS label")
    if (one.exactly is None) == (not one.first_available):
        yield Problem(path, "wanted exactly one of exactly and firstAvailable")
    if one.exactly is not None:
        yield from _check_exact(one.exactly, f"{path}.exactly")
    yield from _at_most(one.first_available, MAX_ALTERNATIVES, f"{path}.firstAvailable")
    yield from _unique([sub.name for sub in one.first_available], f"{path}.firstAvailable")
    for index, sub in enumerate(one.first_available):
        if not is_dns_label(sub.name):
            yield Problem(f"{path}.firstAvailable[{index}].name", f"got {sub.name!r}, wanted a DNS label")
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
    yield from _at_most(one.tolerations, MAX_TOLERATIONS, f"{path}.tolerations")
    for index, toleration in enumerate(one.tolerations):
        here = f"{path}.tolerations[{index}]"
        if toleration.operator not in ("", *_OPERATORS):
            yield Problem(f"{here}.operator", f"got {toleration.operator!r}, wanted Exists or Equal")
        if toleration.effect not in _TOLERATED:
            yield Problem(f"{here}.effect", f"got {toleration.effect!r}, wanted NoSchedule, NoExecute or none")
        if not toleration.key and toleration.operator != "Exists":
            yield Problem(f"{here}.operator", "wanted Exists when there is no key")
    if one.capacity is not None:
        yield from _quantities(one.capacity.requests, f"{path}.capacity.requests")


def _check_selectors(selectors: Sequence[r.Selector], path: str) -> Iterator[Problem]:
    yield from _at_most(selectors, MAX_LIST, path)
    for index, one in enumerate(selectors):
        if one.cel is None:
            yield Problem(f"{path}[{index}]", "wanted cel, the only kind of selector")
        elif not one.cel.expression or len(one.cel.expression.encode()) > MAX_EXPRESSION_BYTES:
            yield Problem(
                f"{path}[{index}].cel.expression", f"wanted 1 to {MAX_EXPRESSION_BYTES} bytes, got {len(one.cel.expression.encode())}"
            )


def _check_configuration(one: r.Configuration, path: str) -> Iterator[Problem]:
    if one.opaque is None:
        yield Problem(path, "wanted opaque, the only kind of configuration")
    elif not is_dns_subdomain(one.opaque.driver):
        yield Problem(f"{path}.opaque.driver", f"got {one.opaque.driver!r}, wanted the name of a driver")
    elif len(msgspec.json.encode(one.opaque.parameters)) > MAX_PARAMETER_BYTES:
        yield Problem(f"{path}.opaque.parameters", f"wanted at most {MAX_PARAMETER_BYTES} bytes")


def _check_device(one: r.SliceDevice, path: str) -> Iterator[Problem]:
    if not is_dns_label(one.name):
        yield Problem(f"{path}.name", f"got {one.name!r}, wanted a DNS label")
    if len(one.attributes) + len(one.capacity) > MAX_ATTRIBUTES:
        yield Problem(path, f"got {len(one.attributes) + len(one.capacity)} attributes and capacities, wanted at most {MAX_ATTRIBUTES}")
    if len(one.attributes) + _list_values(one) > MAX_ATTRIBUTE_VALUES:
        yield Problem(f"{path}.attributes", f"wanted at most {MAX_ATTRIBUTE_VALUES} values")
    for name, attribute in one.attributes.items():
        yield from _check_attribute(name, attribute, f"{path}.attributes.{name}")
    yield from _quantities({key: capacity.value for key, capacity in one.capacity.items()}, f"{path}.capacity")
    for name, capacity in one.capacity.items():
        if not _is_qualified(name):
            yield Problem(f"{path}.capacity.{name}", "wanted a C identifier of at most 32 characters, with a domain before '/' or without")
        if capacity.request_policy is not None:
            yield from _at_most(capacity.request_policy.valid_values, MAX_VALID_VALUES, f"{path}.capacity.{name}.requestPolicy.validValues")
    yield from _at_most(one.consumes_counters, MAX_CONSUMED_SETS, f"{path}.consumesCounters")
    yield from _at_most(one.taints, MAX_TAINTS, f"{path}.taints")
    for index, taint in enumerate(one.taints):
        if taint.effect not in _EFFECTS:
            yield Problem(f"{path}.taints[{index}].effect", f"got {taint.effect!r}, wanted one of {', '.join(_EFFECTS)}")
    yield from _at_most(one.binding_conditions, MAX_CONDITIONS, f"{path}.bindingConditions")
    yield from _at_most(one.binding_failure_conditions, MAX_CONDITIONS, f"{path}.bindingFailureConditions")


def _check_attribute(name: str, one: r.Attribute, path: str) -> Iterator[Problem]:
    if not _is_qualified(name):
        yield Problem(path, "wanted a C identifier of at most 32 characters, with a domain before '/' or without")
    values = (one.int_, one.bool_, one.string, one.version, one.ints, one.bools, one.strings, one.versions)
    if sum(value is not None for value in values) != 1:
        yield Problem(path, "wanted exactly one of int, bool, string, version, ints, bools, strings and versions")
    for text in (one.string, one.version, *(one.strings or ()), *(one.versions or ())):
        if text is not None and len(text) > MAX_TEXT:
            yield Problem(path, f"got {len(text)} characters, wanted at most {MAX_TEXT}")
    for version in (one.version, *(one.versions or ())):
        if version is not None and not _VERSION.fullmatch(version):
            yield Problem(path, f"got {version!r}, wanted a semantic version such as 1.2.3")


def _list_values(one: r.SliceDevice) -> int:
    return sum(len(values) for a in one.attributes.values() for values in (a.ints, a.bools, a.strings, a.versions) if values)


def _is_qualified(name: str, *, needs_domain: bool = False) -> bool:
    domain, slash, identifier = name.rpartition("/")
    if slash and not (is_dns_subdomain(domain) and len(domain) <= 63):
        return False
    return bool(_IDENTIFIER.fullmatch(identifier)) and (bool(slash) or not needs_domain)


def _quantities(values: dict[str, r.QuantityText], path: str) -> Iterator[Problem]:
    for name, value in values.items():
        try:
            is_negative = Quantity.parse(value).nano < 0
        except ValueError as err:
            yield Problem(f"{path}.{name}", str(err))
            continue
        if is_negative:
            yield Problem(f"{path}.{name}", f"got {value}, wanted 0 or more")


def _known(names: Sequence[str], known: list[str], path: str) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name not in known:
            yield Problem(f"{path}[{index}]", f"there is no request {name!r}{did_you_mean(name, known)}")


def _unique(names: list[str], path: str) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"{path}[{index}].name", f"{name!r} stands here twice")


def _at_most(values: Collection[object], limit: int, path: str) -> Iterator[Problem]:
    if len(values) > limit:
        yield Problem(path, f"got {len(values)} entries, wanted at most {limit}")


def _each(values: Sequence[T], path: str, check: Callable[[T, str], Iterator[Problem]]) -> Iterator[Problem]:
    for index, one in enumerate(values):
        yield from check(one, f"{path}[{index}]")
