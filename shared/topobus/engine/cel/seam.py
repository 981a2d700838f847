"""The interface between the allocation and CEL: the device facts that a selector reads, and its
verdicts.

It does not import the evaluator. A verdict is yes, no, or the error of the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.formats.kubernetes.resource import Attribute, SliceDevice
from topobus.values.quantity import Quantity

__all__ = [
    "DeviceFacts",
    "FactValue",
    "Reads",
    "Selector",
    "SelectorCompiler",
    "SelectorError",
    "Version",
    "facts_of",
    "seen",
    "unreadable",
]


@dataclass(frozen=True)
class Version:
    """A semantic version, distinguished from a plain text by its type."""

    text: str


FactValue = bool | int | str | Version | tuple[bool, ...] | tuple[int, ...] | tuple[str, ...] | tuple[Version, ...]


class DeviceFacts(NamedTuple):
    """What `device` is in an expression. Names without a domain are in the driver's."""

    driver: str
    attributes: Mapping[str, Mapping[str, FactValue]]
    capacity: Mapping[str, Mapping[str, Quantity]]
    allow_multiple_allocations: bool = False


@dataclass(frozen=True)
class SelectorError:
    """Why an expression could not be compiled or evaluated. Line and column count from 1.

    0 when there is no position.
    """

    message: str
    line: int = 0
    column: int = 0


class Reads(NamedTuple):
    """One place that an expression reads of a device."""

    part: str
    """`driver`, `allowMultipleAllocations`, `attributes` or `capacity`."""
    domain: str | None = None
    """None is the driver's own."""
    name: str | None = None
    """None asks only whether the domain is there."""


class Selector(Protocol):
    """A compiled expression."""

    @property
    def reads(self) -> tuple[Reads, ...] | None:
        """The places that it reads: devices that are equal there get the same verdict.

        None when they cannot be determined.
        """
        ...

    @property
    def objection(self) -> SelectorError | None:
        """Why an API server would refuse the expression, though it compiles."""
        ...

    @property
    def max_cost(self) -> int:
        """The most that one evaluation on a device can cost. A cost of a thousand takes about a
        millisecond.
        """
        ...

    def matches(self, device: DeviceFacts) -> bool | SelectorError:
        """Say whether the device is wanted. Cost: bounded, whatever the expression is."""
        ...


class SelectorCompiler(Protocol):
    """Compiles expressions, each once."""

    def compile(self, expression: str) -> Selector | SelectorError:
        """Compile an expression, or return where it is wrong."""
        ...


def seen(reads: Reads, device: DeviceFacts) -> object:
    """Return the value that an expression reads from a device at one place.

    Shapes: result — a scalar as it is; a list as (class, items with their classes), because in
            Python 1 == True and in CEL they differ; for a whole map, whether it exists; None for an
            absent value. Use it as a cache key: equal results mean equal results of the expression.
    """
    if reads.part == "driver":
        return device.driver
    if reads.part == "allowMultipleAllocations":
        return device.allow_multiple_allocations
    maps: Mapping[str, Mapping[str, object]] = device.attributes if reads.part == "attributes" else device.capacity
    found_map = maps.get(device.driver if reads.domain is None else reads.domain)
    if reads.name is None:
        return found_map is not None
    value = found_map.get(reads.name) if found_map is not None else None
    return value.__class__, tuple([(part.__class__, part) for part in value]) if isinstance(value, tuple) else value


def facts_of(driver: str, device: SliceDevice) -> DeviceFacts:
    """Convert a device to the facts that expressions read.

    Errors: raises ValueError for a capacity that is no quantity.
    """
    attributes: dict[str, dict[str, FactValue]] = {}
    for name, attribute in device.attributes.items():
        value = _value(attribute)
        if value is not None:
            domain, identifier = _qualify(name, driver)
            attributes.setdefault(domain, {})[identifier] = value
    capacity: dict[str, dict[str, Quantity]] = {}
    for name, amount in device.capacity.items():
        domain, identifier = _qualify(name, driver)
        capacity.setdefault(domain, {})[identifier] = Quantity.parse(amount.value)
    return DeviceFacts(driver, attributes, capacity, bool(device.allow_multiple_allocations))


def unreadable(device: SliceDevice, *, has_lists: bool) -> str:
    """Explain why no expression can be evaluated on a device, whatever it reads. Empty when any
    can.

    As upstream: a device is converted as a whole, so one attribute of no known type, a malformed
    version, or a list while lists are off fails all expressions.
    """
    for name, attribute in device.attributes.items():
        if not (attribute.is_scalar or (has_lists and attribute.is_list)):
            return f"attribute {name}: unsupported attribute value"
        for text in (attribute.version,) if attribute.version is not None else attribute.versions or ():
            problem = _version_problem(text)
            if problem:
                return f"attribute {name}: {problem}"
    return ""


@lru_cache(maxsize=4096)
def _version_problem(text: str) -> str:
    try:
        SemanticVersion.parse(text)
    except ValueError as err:
        return str(err)
    return ""


def _qualify(name: str, driver: str) -> tuple[str, str]:
    domain, slash, identifier = name.partition("/")
    return (domain, identifier) if slash else (driver, name)


def _value(attribute: Attribute) -> FactValue | None:
    if attribute.version is not None:
        return Version(attribute.version)
    if attribute.versions is not None:
        return tuple(Version(text) for text in attribute.versions)
    if attribute.string is not None:
        return attribute.string
    if attribute.int_ is not None:
        return attribute.int_
    if attribute.bool_ is not None:
        return attribute.bool_
    if attribute.strings is not None:
        return attribute.strings
    return attribute.ints if attribute.ints is not None else attribute.bools
