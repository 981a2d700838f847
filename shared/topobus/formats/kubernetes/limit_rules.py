"""The numbers that resource.k8s.io/v1 sets, and the rules that several of its objects share.

Each check takes a part of an object with its path, and yields one Problem for each rule that is
broken.
Source: k8s.io/api/resource/v1/types.go; k8s.io/kubernetes
pkg/apis/resource/validation/validation.go; k8s.io/apimachinery/pkg/util/validation, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.shape import Problem
from topobus.values.names import is_dns_label, is_dns_subdomain
from topobus.values.quantity import Quantity

__all__ = [
    "MAX_ALTERNATIVES",
    "MAX_ATTRIBUTES",
    "MAX_ATTRIBUTE_VALUES",
    "MAX_COMPLEX_DEVICES",
    "MAX_CONDITIONS",
    "MAX_CONSUMED_SETS",
    "MAX_COUNTERS",
    "MAX_COUNTER_SETS",
    "MAX_DEVICES",
    "MAX_DEVICE_STATUS_CONDITIONS",
    "MAX_DRIVER",
    "MAX_EXPRESSION_BYTES",
    "MAX_GRANTED_CONFIGURATIONS",
    "MAX_HARDWARE_ADDRESS",
    "MAX_INTERFACE_ADDRESSES",
    "MAX_INTERFACE_NAME",
    "MAX_LIST",
    "MAX_PARAMETER_BYTES",
    "MAX_POOL_NAME",
    "MAX_RESERVED_FOR",
    "MAX_TAINTS",
    "MAX_TEXT",
    "MAX_TOLERATIONS",
    "MAX_VALID_VALUES",
    "at_most",
    "check_binding",
    "check_driver",
    "check_label",
    "check_node_selector",
    "check_parameters",
    "check_pool_name",
    "check_taint",
    "check_toleration",
    "each",
    "is_label_name",
    "is_label_value",
    "is_qualified",
    "quantities",
    "unique",
]

MAX_LIST = 32  # requests, selectors, constraints, configurations and granted devices
MAX_ALTERNATIVES = 8
MAX_TOLERATIONS = 16
MAX_GRANTED_CONFIGURATIONS = 64
MAX_RESERVED_FOR = 256
MAX_EXPRESSION_BYTES = 10 * 1024
MAX_PARAMETER_BYTES = 10 * 1024
MAX_DEVICES = 128
# A device with taints, counters or list attributes makes a slice so large that only half
# as many fit into etcd's 1.5 MiB.
MAX_COMPLEX_DEVICES = 64
MAX_ATTRIBUTES = 32
MAX_ATTRIBUTE_VALUES = 48
MAX_TEXT = 64  # bytes of an attribute
MAX_TAINTS = 16
MAX_CONDITIONS = 4
MAX_COUNTER_SETS = 8
MAX_COUNTERS = 32
MAX_CONSUMED_SETS = 2
MAX_VALID_VALUES = 10
MAX_DRIVER = 63
MAX_POOL_NAME = 253
MAX_DEVICE_STATUS_CONDITIONS = 8
MAX_INTERFACE_NAME = 256
MAX_HARDWARE_ADDRESS = 128
MAX_INTERFACE_ADDRESSES = 16

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_EFFECTS = ("NoSchedule", "NoExecute", "None")
_OPERATORS = ("Exists", "Equal")
_NODE_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")

T = TypeVar("T")


def is_qualified(name: str, *, needs_domain: bool = False) -> bool:
    """Say whether a name is a C identifier of at most 32 characters, with a domain before '/' or,
    where it may, without.

    >>> is_qualified("model"), is_qualified("a.io/model"), is_qualified("model", needs_domain=True), is_qualified("a/b/c")
    (True, True, False, False)
    """  # noqa: E501
    domain, slash, identifier = name.rpartition("/")
    if slash and not (is_dns_subdomain(domain) and len(domain) <= MAX_DRIVER):
        return False
    return bool(_IDENTIFIER.fullmatch(identifier)) and (bool(slash) or not needs_domain)


def is_label_name(name: str) -> bool:
    """Say whether a name may be a label's: 63 characters at most, after an optional DNS name and
    '/'.
    """
    prefix, slash, last = name.rpartition("/")
    return bool(_LABEL_NAME.fullmatch(last)) and (not slash or is_dns_subdomain(prefix))


def is_label_value(text: str) -> bool:
    """Say whether a text may be the value of a label. It may be empty."""
    return not text or bool(_LABEL_NAME.fullmatch(text))


def at_most(values: Collection[object], limit: int, path: str) -> Iterator[Problem]:
    """Check the number of values."""
    if len(values) > limit:
        yield Problem(path, f"got {len(values)} entries, wanted at most {limit}")


def unique(names: Sequence[str], path: str, *, field: str = "name") -> Iterator[Problem]:
    """Check that no name occurs twice.

    Shapes: field — the field of an entry that holds the name; empty: the entries are the names.
    """
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Problem(f"{path}[{index}]{'.' + field if field else ''}", f"{name!r} is here twice")
        seen.add(name)


def each(values: Sequence[T], path: str, check: Callable[[T, str], Iterator[Problem]]) -> Iterator[Problem]:
    """Check every entry of a list."""
    for index, item in enumerate(values):
        yield from check(item, f"{path}[{index}]")


def quantities(values: Mapping[str, r.QuantityText], path: str) -> Iterator[Problem]:
    """Check that amounts are quantities."""
    for name, value in values.items():
        try:
            is_negative = Quantity.parse(value).nano < 0
        except ValueError as err:
            yield Problem(f"{path}.{name}", str(err))
            continue
        if is_negative:
            yield Problem(f"{path}.{name}", f"got {value}, wanted 0 or more")


def check_driver(name: str, path: str) -> Iterator[Problem]:
    """Check a driver's name."""
    if not is_dns_subdomain(name) or len(name) > MAX_DRIVER:
        yield Problem(path, f"got {name!r}, wanted a DNS name of at most {MAX_DRIVER} characters")


def check_pool_name(name: str, path: str) -> Iterator[Problem]:
    """Check a pool's name."""
    if len(name) > MAX_POOL_NAME or not all(is_dns_subdomain(part) for part in name.split("/")):
        yield Problem(path, f"got {name!r}, wanted DNS names joined by '/', {MAX_POOL_NAME} characters at most")


def check_taint(taint: r.Taint, path: str) -> Iterator[Problem]:
    """Check a taint."""
    if not is_label_name(taint.key):
        yield Problem(f"{path}.key", f"got {taint.key!r}, wanted the name of a label, such as example.com/broken")
    if not is_label_value(taint.value):
        yield Problem(
            f"{path}.value",
            f"got {taint.value!r}, wanted the value of a label: 63 letters, digits, '-', '_' and '.' at most",
        )
    if taint.effect not in _EFFECTS:
        yield Problem(f"{path}.effect", f"got {taint.effect!r}, wanted one of {', '.join(_EFFECTS)}")


def check_toleration(toleration: r.Toleration, path: str) -> Iterator[Problem]:
    """Check a toleration."""
    if toleration.key and not is_label_name(toleration.key):
        yield Problem(f"{path}.key", f"got {toleration.key!r}, wanted the name of a label, such as example.com/broken")
    if toleration.operator not in ("", *_OPERATORS):
        yield Problem(f"{path}.operator", f"got {toleration.operator!r}, wanted Exists or Equal")
    if toleration.effect not in ("", *_EFFECTS):
        yield Problem(f"{path}.effect", f"got {toleration.effect!r}, wanted NoSchedule, NoExecute, None or none at all")
    if not toleration.key and toleration.operator != "Exists":
        yield Problem(f"{path}.operator", "wanted Exists when there is no key")
    if toleration.operator == "Exists" and toleration.value:
        yield Problem(f"{path}.value", f"got {toleration.value!r}, wanted none with operator Exists")
    elif not is_label_value(toleration.value):
        yield Problem(
            f"{path}.value",
            f"got {toleration.value!r}, wanted the value of a label: 63 letters, digits, '-', '_' and '.' at most",
        )


def check_binding(conditions: Sequence[str], failures: Sequence[str], path: str) -> Iterator[Problem]:
    """Check binding conditions: both kinds or neither, no name twice."""
    for name, values in (("bindingConditions", conditions), ("bindingFailureConditions", failures)):
        yield from at_most(values, MAX_CONDITIONS, f"{path}.{name}")
        yield from unique(values, f"{path}.{name}", field="")
        for index, value in enumerate(values):
            if not is_label_name(value):
                yield Problem(f"{path}.{name}[{index}]", f"got {value!r}, wanted the name of a label")
    for condition in sorted(set(conditions) & set(failures)):
        yield Problem(f"{path}.bindingFailureConditions", f"{condition!r} is also in bindingConditions")
    if bool(conditions) != bool(failures):
        missing = "bindingFailureConditions" if conditions else "bindingConditions"
        yield Problem(f"{path}.{missing}", "wanted at least one, for the other kind of conditions is there")


def check_node_selector(selector: r.NodeSelector, path: str) -> Iterator[Problem]:
    """Check the terms of a node selector."""
    if not selector.node_selector_terms:
        yield Problem(f"{path}.nodeSelectorTerms", "wanted at least one term")
    for index, term in enumerate(selector.node_selector_terms):
        here = f"{path}.nodeSelectorTerms[{index}]"
        yield from each(term.match_expressions, f"{here}.matchExpressions", _check_requirement)
        for number, match_field in enumerate(term.match_fields):
            if (
                match_field.key != "metadata.name"
                or match_field.operator not in ("In", "NotIn")
                or len(match_field.values) != 1
            ):
                yield Problem(
                    f"{here}.matchFields[{number}]", "wanted key metadata.name, operator In or NotIn, and one value"
                )


def _check_requirement(node_requirement: r.NodeRequirement, path: str) -> Iterator[Problem]:
    if not is_label_name(node_requirement.key):
        yield Problem(f"{path}.key", f"got {node_requirement.key!r}, wanted the name of a label")
    if node_requirement.operator not in _NODE_OPERATORS:
        yield Problem(
            f"{path}.operator", f"got {node_requirement.operator!r}, wanted one of {', '.join(_NODE_OPERATORS)}"
        )
    elif node_requirement.operator in ("In", "NotIn") and not node_requirement.values:
        yield Problem(f"{path}.values", f"wanted at least one with operator {node_requirement.operator}")
    elif node_requirement.operator in ("Exists", "DoesNotExist") and node_requirement.values:
        yield Problem(f"{path}.values", f"wanted none with operator {node_requirement.operator}")
    elif node_requirement.operator in ("Gt", "Lt") and not (
        len(node_requirement.values) == 1
        and node_requirement.values[0].isascii()
        and node_requirement.values[0].lstrip("-").isdecimal()
    ):
        yield Problem(f"{path}.values", f"wanted one whole number with operator {node_requirement.operator}")
    for index, value in enumerate(node_requirement.values):
        if node_requirement.operator in ("In", "NotIn") and not is_label_value(value):
            yield Problem(f"{path}.values[{index}]", f"got {value!r}, wanted the value of a label")


def check_parameters(parameters: object, path: str) -> Iterator[Problem]:
    """Check an opaque JSON object: a driver's configuration, or its data about a device."""
    if not isinstance(parameters, Mapping):
        yield Problem(
            path, f"got {type(parameters).__name__ if parameters is not None else 'nothing'}, wanted a JSON object"
        )
        return
    size = len(msgspec.json.encode(parameters))
    if size > MAX_PARAMETER_BYTES:
        yield Problem(path, f"got {size} bytes, wanted at most {MAX_PARAMETER_BYTES}")


def check_label(name: str, path: str) -> Iterator[Problem]:
    """Check a DNS label."""
    if not is_dns_label(name):
        yield Problem(path, f"got {name!r}, wanted a DNS label: lower-case letters, digits and '-', 63 at most")
