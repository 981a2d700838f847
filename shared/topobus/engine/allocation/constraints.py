"""Constraints over the devices of a claim: equal or distinct attribute values.

A constraint can undo its last device, for backtracking. A constraint is monotone: a device that it
refuses now it also refuses after more devices were added, so the search may stop early. A list
attribute is a set of values, a scalar a set of one. An absent attribute never matches, not even
another absent one.
Source: docs/knowledge/dynamic-resource-allocation.md#constraints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.values import Gate, Mode
from topobus.formats.kubernetes.resource import Attribute, Constraint

__all__ = [
    "ActiveConstraint",
    "DistinctAttribute",
    "MatchAttribute",
    "attribute_values",
    "has_attribute",
    "make_constraint",
]

Values = frozenset[tuple[str, Hashable]]


class ActiveConstraint(ABC):
    """A constraint with the devices that the search holds at the moment."""

    def __init__(self, attribute: str, *, has_lists: bool, is_corrected: bool) -> None:
        self.attribute = attribute
        self._has_lists = has_lists
        self._is_corrected = is_corrected

    def _read(self, candidate: Candidate, *, is_first: bool) -> Values | None:
        """Read the values of a device. None when it lacks the attribute."""
        values = attribute_values(candidate, self.attribute, has_lists=self._has_lists)
        # Upstream does not look at the type of the first device's attribute while list attributes
        # are off.
        takes_unknown = is_first and not self._has_lists and not self._is_corrected
        return values if values or (takes_unknown and has_attribute(candidate, self.attribute)) else None

    @abstractmethod
    def add(self, candidate: Candidate, request: str) -> bool:
        """Take a device for a request, or return False when it breaks the constraint."""

    @abstractmethod
    def remove(self, request: str) -> None:
        """Remove the newest device of a request."""

    @property
    @abstractmethod
    def wanted(self) -> str:
        """Describe for people what a device must have."""

    @property
    @abstractmethod
    def state(self) -> Hashable:
        """Return a value that differs between states in which different devices would be taken."""


def make_constraint(constraint: Constraint, gates: frozenset[Gate], mode: Mode) -> ActiveConstraint | None:
    """Make a constraint ready for a search. None for an unknown kind."""
    has_lists, is_corrected = Gate.LIST_ATTRIBUTES in gates, mode is Mode.CORRECTED
    if constraint.match_attribute is not None:
        return MatchAttribute(constraint.match_attribute, has_lists=has_lists, is_corrected=is_corrected)
    if constraint.distinct_attribute is not None:
        return DistinctAttribute(constraint.distinct_attribute, has_lists=has_lists, is_corrected=is_corrected)
    return None


class MatchAttribute(ActiveConstraint):
    """All devices share a value."""

    def __init__(self, attribute: str, *, has_lists: bool, is_corrected: bool) -> None:
        super().__init__(attribute, has_lists=has_lists, is_corrected=is_corrected)
        self._common: list[Values] = []

    def add(self, candidate: Candidate, request: str) -> bool:
        """Take a device that shares a value with all others."""
        values = self._read(candidate, is_first=not self._common)
        if values is None:
            return False
        common = values & self._common[-1] if self._common else values
        if not common and self._common:
            return False
        self._common.append(common)
        return True

    def remove(self, request: str) -> None:
        """Remove the newest device."""
        narrowed = self._common.pop()
        if not self._is_corrected and self._common:
            # kubernetes/kubernetes#140300: upstream narrows the common values and does not widen
            # them again until no device is left.
            self._common[-1] = narrowed

    @property
    def wanted(self) -> str:
        """Describe which values are still possible."""
        if not self._common:
            return f"a value of {self.attribute}"
        return f"{self.attribute} = {' or '.join(sorted(str(value) for _, value in self._common[-1]))}"

    @property
    def state(self) -> Hashable:
        """The values still possible. None when any is."""
        return self._common[-1] if self._common else None


class DistinctAttribute(ActiveConstraint):
    """No two devices share a value."""

    def __init__(self, attribute: str, *, has_lists: bool, is_corrected: bool) -> None:
        super().__init__(attribute, has_lists=has_lists, is_corrected=is_corrected)
        self._taken: list[tuple[str, Values]] = []

    def add(self, candidate: Candidate, request: str) -> bool:
        """Take a device that shares no value with any other."""
        values = self._read(candidate, is_first=not self._taken)
        if values is None or any(values & taken_values for _, taken_values in self._compared()):
            return False
        self._taken.append((request, values))
        return True

    def remove(self, request: str) -> None:
        """Remove the newest device."""
        if self._is_corrected:
            self._taken.pop()
        else:
            self._taken = [taken for taken in self._taken if taken[0] != request]

    @property
    def wanted(self) -> str:
        """Describe which values are taken."""
        return (
            f"another {self.attribute} than "
            f"{', '.join(sorted({str(value) for _, taken_values in self._compared() for _, value in taken_values})) or 'none'}"  # noqa: E501
        )

    @property
    def state(self) -> Hashable:
        """The values that are taken."""
        return frozenset(value for _, taken_values in self._taken for value in taken_values)

    def _compared(self) -> list[tuple[str, Values]]:
        """List the devices that a new one is compared with.

        kubernetes/kubernetes#140438: upstream remembers one device per request, the newest, and
        forgets the request when one of its devices is released.
        """
        return (
            self._taken
            if self._is_corrected
            else list({request: (request, values) for request, values in self._taken}.values())
        )


def attribute_values(candidate: Candidate, name: str, *, has_lists: bool = True) -> Values:
    """List the values of an attribute.

    None when the device lacks it, or its type is unknown.
    """
    attribute = _look_up(candidate, name)
    return _as_set(attribute, has_lists=has_lists) if attribute is not None else frozenset()


def has_attribute(candidate: Candidate, name: str) -> bool:
    """Say whether the device has an attribute, whatever its type."""
    return _look_up(candidate, name) is not None


def _look_up(candidate: Candidate, name: str) -> Attribute | None:
    """Find an attribute by its full name, else without the domain when that is the driver's."""
    attributes = candidate.device.attributes
    attribute = attributes.get(name)
    if attribute is None:
        domain, _, identifier = name.partition("/")
        attribute = attributes.get(identifier) if domain == candidate.id.driver else None
    return attribute


def _as_set(attribute: Attribute, *, has_lists: bool) -> Values:
    scalars = (
        ("string", attribute.string),
        ("int", attribute.int_),
        ("bool", attribute.bool_),
        ("version", attribute.version),
    )
    for kind, scalar in scalars:
        if scalar is not None:
            return frozenset({(kind, scalar)})
    if has_lists:
        for kind, values in (
            ("string", attribute.strings),
            ("int", attribute.ints),
            ("bool", attribute.bools),
            ("version", attribute.versions),
        ):
            if values is not None:
                return frozenset((kind, value) for value in values)
    return frozenset()
