"""Looking into values: fields, items, what a loop runs over, and what may be absent.

Source: cel-go interpreter/attributes.go, refQualify and applyQualifiers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from topobus.cel.errors import EvaluationError
from topobus.cel.values import (
    OPAQUE,
    DomainMap,
    OptionalValue,
    as_key,
    from_key,
    kind_of,
    some,
)

__all__ = ["as_index", "field_of", "has_field", "items_of", "optional_item", "taken_out"]


def as_index(place: float) -> int:
    """Take a whole number of another type for an index."""
    if math.isfinite(place) and place == int(place):
        return int(place)
    raise EvaluationError(f"unsupported index value {place}")


def items_of(found: object, *, has_two: bool) -> Iterator[tuple[object, object]]:
    """List what a loop runs over: items, or keys; with two variables index or key, and value."""
    if isinstance(found, list | tuple):
        return iter(list(enumerate(found))) if has_two else ((one, None) for one in list(found))
    if isinstance(found, dict):
        return iter([(from_key(key), value) for key, value in found.items()])
    raise EvaluationError(f"got '{kind_of(found)}', expected iterable type")


def field_of(found: object, field: str) -> object:
    """Give a field.

    Errors: raises EvaluationError where there is none.
    """
    if isinstance(found, dict):
        if field in found:
            return found[field]
        if isinstance(found, DomainMap):
            return {}
        raise EvaluationError(f"no such key: {field}")
    raise EvaluationError(f"no such overload: {kind_of(found)}.{field}")


def has_field(found: object, field: str) -> bool:
    """Say whether there is a field; what has no fields has none.

    Errors: raises EvaluationError for a list.
    """
    if isinstance(found, OptionalValue):
        return found.is_present and has_field(found.value, field)
    if isinstance(found, dict):
        return field in found or isinstance(found, DomainMap)
    if isinstance(found, list | tuple):
        raise EvaluationError("unsupported index type 'string' in list")
    return False


def optional_item(optional_value: OptionalValue, key: object) -> OptionalValue:
    """Look into what may be absent; what has no fields or items has none of this name."""
    if not optional_value.is_present:
        return optional_value
    inside = optional_value.value
    if isinstance(inside, dict):
        if as_key(key) in inside:
            return some(inside[as_key(key)])
        return some({}) if isinstance(inside, DomainMap) else OptionalValue()
    if isinstance(inside, list | tuple):
        if isinstance(key, bool) or not isinstance(key, int | float):
            raise EvaluationError(f"unsupported index type '{kind_of(key)}' in list")
        place = as_index(key)
        return some(inside[place]) if 0 <= place < len(inside) else OptionalValue()
    return OptionalValue()


def taken_out(found: object) -> object:
    """Prepare an optional value for a look into it: upstream unwraps it to Go's own value, which a device's maps of domains and Kubernetes' types do not survive.

    Errors: raises EvaluationError for a value of a type of Kubernetes' own.
    """
    if not isinstance(found, OptionalValue) or not found.is_present:
        return found
    kind = kind_of(found.value)
    if kind in OPAQUE:
        raise EvaluationError(f"unsupported conversion to ref.Val: {kind}")
    return some(dict(found.value)) if isinstance(found.value, DomainMap) else found
