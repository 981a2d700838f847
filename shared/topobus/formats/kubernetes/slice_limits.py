"""The limits of ResourceSlices and DeviceTaintRules: what a device may carry, and which nodes it
serves.

Source: k8s.io/kubernetes pkg/apis/resource/validation/validation.go, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.limit_rules import (
    MAX_ATTRIBUTE_VALUES,
    MAX_ATTRIBUTES,
    MAX_COMPLEX_DEVICES,
    MAX_CONSUMED_SETS,
    MAX_COUNTER_SETS,
    MAX_COUNTERS,
    MAX_DEVICES,
    MAX_TAINTS,
    MAX_TEXT,
    MAX_VALID_VALUES,
    at_most,
    check_binding,
    check_driver,
    check_label,
    check_node_selector,
    check_pool_name,
    check_taint,
    each,
    is_qualified,
    quantities,
    unique,
)
from topobus.formats.kubernetes.shape import Problem
from topobus.values.names import is_dns_subdomain
from topobus.values.quantity import Quantity

__all__ = ["check_device", "check_slice", "check_taint_rule", "is_version"]

_NUMBER = r"(0|[1-9]\d*)"
_PRE = r"(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)"
_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_PRE}(\.{_PRE})*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?", re.ASCII
)
_LARGEST = (1 << 63) - 1


def is_version(text: str) -> bool:
    """Say whether a text is a semantic version.

    >>> is_version("570.86.15"), is_version("570.86.05"), is_version("1.2.3-rc.1"), is_version("1.2.3-01")
    (True, False, True, False)
    """
    return _VERSION.fullmatch(text) is not None


def check_slice(spec: r.SliceSpec) -> list[Problem]:
    """Check the spec of a slice: what each device may carry, and that it names the nodes that it
    serves in exactly one way.
    """
    problems = [*check_driver(spec.driver, "spec.driver"), *check_pool_name(spec.pool.name, "spec.pool.name")]
    if spec.pool.resource_slice_count < 1 or spec.pool.generation < 0:
        problems.append(Problem("spec.pool", "wanted resourceSliceCount of at least 1 and generation of at least 0"))
    problems.extend(_check_place(spec, "spec"))
    is_complex = any(
        device.taints or device.consumes_counters or any(attribute.is_list for attribute in device.attributes.values())
        for device in spec.devices
    )
    problems.extend(at_most(spec.devices, MAX_COMPLEX_DEVICES if is_complex else MAX_DEVICES, "spec.devices"))
    problems.extend(unique([device.name for device in spec.devices], "spec.devices"))
    has_own_nodes = bool(spec.per_device_node_selection)
    for index, device in enumerate(spec.devices):
        problems.extend(_check_device(device, f"spec.devices[{index}]", has_own_nodes=has_own_nodes))
    if spec.devices and spec.shared_counters:
        problems.append(Problem("spec", "wanted either devices or sharedCounters, not both"))
    problems.extend(at_most(spec.shared_counters, MAX_COUNTER_SETS, "spec.sharedCounters"))
    problems.extend(unique([shared_counter.name for shared_counter in spec.shared_counters], "spec.sharedCounters"))
    for index, shared_counter in enumerate(spec.shared_counters):
        here = f"spec.sharedCounters[{index}]"
        problems.extend(check_label(shared_counter.name, f"{here}.name"))
        problems.extend(_check_counters(shared_counter.counters, f"{here}.counters"))
    return problems


def check_device(device: r.SliceDevice) -> list[Problem]:
    """Check one device of a slice of one node. Paths begin at the device."""
    return [
        Problem(problem.path.removeprefix("."), problem.message)
        for problem in _check_device(device, "", has_own_nodes=False)
    ]


def check_taint_rule(spec: r.TaintRuleSpec) -> list[Problem]:
    """Check the spec of a DeviceTaintRule."""
    problems = list(check_taint(spec.taint, "spec.taint"))
    selector = spec.device_selector
    if selector is not None:
        if selector.driver is not None:
            problems.extend(check_driver(selector.driver, "spec.deviceSelector.driver"))
        if selector.pool is not None:
            problems.extend(check_pool_name(selector.pool, "spec.deviceSelector.pool"))
        if selector.device is not None:
            problems.extend(check_label(selector.device, "spec.deviceSelector.device"))
    return problems


def _check_place(spec: r.SliceSpec, path: str) -> Iterator[Problem]:
    ways = [spec.node_name, spec.node_selector, spec.all_nodes, spec.per_device_node_selection]
    if sum(way is not None for way in ways) != 1:
        yield Problem(path, "wanted exactly one of nodeName, nodeSelector, allNodes and perDeviceNodeSelection")
    if spec.node_name is not None and not is_dns_subdomain(spec.node_name):
        yield Problem(f"{path}.nodeName", f"got {spec.node_name!r}, wanted the name of a node")
    for name, value in (("allNodes", spec.all_nodes), ("perDeviceNodeSelection", spec.per_device_node_selection)):
        if value is False:
            yield Problem(f"{path}.{name}", "wanted true, or nothing")
    if spec.node_selector is not None:
        yield from check_node_selector(spec.node_selector, f"{path}.nodeSelector")
        if len(spec.node_selector.node_selector_terms) != 1:
            yield Problem(
                f"{path}.nodeSelector", f"got {len(spec.node_selector.node_selector_terms)} terms, wanted exactly one"
            )


def _check_device(device: r.SliceDevice, path: str, *, has_own_nodes: bool) -> Iterator[Problem]:
    yield from check_label(device.name, f"{path}.name")
    if len(device.attributes) + len(device.capacity) > MAX_ATTRIBUTES:
        yield Problem(
            path,
            f"got {len(device.attributes) + len(device.capacity)} attributes and capacities, wanted at most "
            f"{MAX_ATTRIBUTES}",
        )
    values = sum(map(_count_values, device.attributes.values()))
    if values > MAX_ATTRIBUTE_VALUES:
        yield Problem(f"{path}.attributes", f"got {values} values, wanted at most {MAX_ATTRIBUTE_VALUES}")
    for name, attribute in device.attributes.items():
        yield from _check_attribute(name, attribute, f"{path}.attributes.{name}")
    yield from quantities({key: capacity.value for key, capacity in device.capacity.items()}, f"{path}.capacity")
    for name, capacity in device.capacity.items():
        here = f"{path}.capacity.{name}"
        if not is_qualified(name):
            yield Problem(here, "wanted a C identifier of at most 32 characters, with a domain before '/' or without")
        if capacity.request_policy is not None and not device.allow_multiple_allocations:
            yield Problem(f"{here}.requestPolicy", "wanted none without allowMultipleAllocations: true")
        elif capacity.request_policy is not None:
            yield from _check_policy(capacity, capacity.request_policy, f"{here}.requestPolicy")
    yield from at_most(device.consumes_counters, MAX_CONSUMED_SETS, f"{path}.consumesCounters")
    yield from unique(
        [counters.counter_set for counters in device.consumes_counters], f"{path}.consumesCounters", field="counterSet"
    )
    for index, consumption in enumerate(device.consumes_counters):
        here = f"{path}.consumesCounters[{index}]"
        yield from check_label(consumption.counter_set, f"{here}.counterSet")
        yield from _check_counters(consumption.counters, f"{here}.counters")
    yield from at_most(device.taints, MAX_TAINTS, f"{path}.taints")
    yield from each(device.taints, f"{path}.taints", check_taint)
    yield from check_binding(device.binding_conditions, device.binding_failure_conditions, path)
    yield from _check_own_nodes(device, path, has_own_nodes=has_own_nodes)


def _check_own_nodes(device: r.SliceDevice, path: str, *, has_own_nodes: bool) -> Iterator[Problem]:
    given = sum(way is not None for way in (device.node_name, device.node_selector, device.all_nodes))
    if not has_own_nodes and given:
        yield Problem(path, "wanted nodeName, nodeSelector and allNodes only with perDeviceNodeSelection in the slice")
    elif has_own_nodes and given != 1:
        yield Problem(
            path, "wanted exactly one of nodeName, nodeSelector and allNodes, for the slice has perDeviceNodeSelection"
        )
    if device.node_name is not None and not is_dns_subdomain(device.node_name):
        yield Problem(f"{path}.nodeName", f"got {device.node_name!r}, wanted the name of a node")
    if device.all_nodes is False:
        yield Problem(f"{path}.allNodes", "wanted true, or nothing")
    if device.node_selector is not None:
        yield from check_node_selector(device.node_selector, f"{path}.nodeSelector")


def _check_counters(counters: dict[str, r.Counter], path: str) -> Iterator[Problem]:
    if not counters:
        yield Problem(path, "wanted at least one counter")
    yield from at_most(counters, MAX_COUNTERS, path)
    for name in counters:
        yield from check_label(name, f"{path}.{name}")
    yield from quantities({key: counter.value for key, counter in counters.items()}, path)


def _check_attribute(name: str, attribute: r.Attribute, path: str) -> Iterator[Problem]:
    if not is_qualified(name):
        yield Problem(path, "wanted a C identifier of at most 32 characters, with a domain before '/' or without")
    values = (
        attribute.int_,
        attribute.bool_,
        attribute.string,
        attribute.version,
        attribute.ints,
        attribute.bools,
        attribute.strings,
        attribute.versions,
    )
    if sum(value is not None for value in values) != 1:
        yield Problem(path, "wanted exactly one of int, bool, string, version, ints, bools, strings and versions")
    if any(value == () for value in values):
        yield Problem(path, "wanted at least one value in a list")
    for text in (attribute.string, attribute.version, *(attribute.strings or ()), *(attribute.versions or ())):
        if text is not None and len(text.encode("utf-8", "replace")) > MAX_TEXT:
            yield Problem(path, f"got {len(text.encode('utf-8', 'replace'))} bytes, wanted at most {MAX_TEXT}")
    for version in (attribute.version, *(attribute.versions or ())):
        if version is not None and not is_version(version):
            yield Problem(path, f"got {version!r}, wanted a semantic version such as 1.2.3")


def _count_values(attribute: r.Attribute) -> int:
    return (
        sum(
            len(values) for values in (attribute.ints, attribute.bools, attribute.strings, attribute.versions) if values
        )
        or 1
    )


def _check_policy(capacity: r.Capacity, policy: r.RequestPolicy, path: str) -> Iterator[Problem]:
    """Check which amounts may be asked for. Amounts that are no quantities are reported first, and
    alone.
    """
    if policy.valid_values and policy.valid_range is not None:
        yield Problem(path, "wanted one of validValues and validRange, not both")
        return
    span = policy.valid_range
    amounts = {f"validValues[{index}]": value for index, value in enumerate(policy.valid_values)}
    named = {
        "default": policy.default,
        **({"min": span.min, "max": span.max, "step": span.step} if span is not None else {}),
    }
    wrong = list(quantities({**amounts, **{name: value for name, value in named.items() if value is not None}}, path))
    yield from wrong
    if wrong or next(quantities({"value": capacity.value}, path), None) is not None:
        return
    if not policy.valid_values and span is None:
        return
    if policy.default is None:
        yield Problem(f"{path}.default", "wanted one, for not every amount may be asked for")
        return
    default, whole = Quantity.parse(policy.default), Quantity.parse(capacity.value)
    if span is not None:
        yield from _check_range(span, default, whole, f"{path}.validRange")
    else:
        yield from _check_values(
            [Quantity.parse(valid_value) for valid_value in policy.valid_values], default, whole, f"{path}.validValues"
        )


def _check_values(values: list[Quantity], default: Quantity, whole: Quantity, path: str) -> Iterator[Problem]:
    yield from at_most(values, MAX_VALID_VALUES, path)
    yield from unique([str(quantity.units) for quantity in values], path, field="")
    for index, quantity in enumerate(values):
        if index and quantity < values[index - 1]:
            yield Problem(
                f"{path}[{index}]", f"got {quantity} after {values[index - 1]}, wanted them in ascending order"
            )
        if quantity > whole:
            yield Problem(f"{path}[{index}]", f"got {quantity}, wanted at most the capacity's value {whole}")
    if default not in values:
        yield Problem(path, f"wanted the default {default} among them")


def _check_range(span: r.ValidRange, default: Quantity, whole: Quantity, path: str) -> Iterator[Problem]:
    if span.min is None:
        yield Problem(f"{path}.min", "wanted one in a validRange")
        return
    low = Quantity.parse(span.min)
    high = Quantity.parse(span.max) if span.max is not None else whole
    if low > whole:
        yield Problem(f"{path}.min", f"got {low}, wanted at most the capacity's value {whole}")
    if high > whole:
        yield Problem(f"{path}.max", f"got {high}, wanted at most the capacity's value {whole}")
    if low > high:
        yield Problem(f"{path}.max", f"got {high}, wanted at least min {low}")
    if not low <= default <= high:
        yield Problem(f"{path}.default", f"got {default}, wanted {low} to {high}")
    if span.step is None:
        return
    step = Quantity.parse(span.step)
    if step.nano <= 0:
        yield Problem(f"{path}.step", f"got {step}, wanted more than 0")
        return
    if low + step > whole:
        yield Problem(f"{path}.step", f"got {step}: one step from min is more than the capacity's value {whole}")
    for name, quantity in (("default", default), *([("max", high)] if span.max is not None else [])):
        if quantity.units <= _LARGEST and (quantity.units - low.units) % step.units:
            yield Problem(f"{path}.step", f"{name} {quantity} is not min {low} and a whole number of steps of {step}")
