"""Access to parts of values: fields, items, the elements that a loop visits, and parts that may be
absent.

Source: cel-go interpreter/attributes.go, refQualify and applyQualifiers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.values import (
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
    """Use a whole number of another type as an index.

    Errors: raises EvaluationError for a number that is not whole.
    """
    if math.isfinite(place) and place == int(place):
        return int(place)
    raise EvaluationError(f"unsupported index value {place}")


def items_of(collection: object, *, has_two: bool) -> Iterator[tuple[object, object]]:
    """List the elements that a loop visits: items of a list, or keys of a map. With two variables
    index or key, and value.

    Errors: raises EvaluationError for a value that is neither list nor map.
    """
    if isinstance(collection, list | tuple):
        return iter(list(enumerate(collection))) if has_two else ((item, None) for item in list(collection))
    if isinstance(collection, dict):
        return iter([(from_key(key), value) for key, value in collection.items()])
    raise EvaluationError(f"got '{kind_of(collection)}', expected iterable type")


def field_of(value: object, field: str) -> object:
    """Return a field.

    Errors: raises EvaluationError where there is none.
    """
    if isinstance(value, dict):
        if field in value:
            return value[field]
        if isinstance(value, DomainMap):
            return {}
        raise EvaluationError(f"no such key: {field}")
    raise EvaluationError(f"no such overload: {kind_of(value)}.{field}")


def has_field(value: object, field: str) -> bool:
    """Say whether there is a field. A value of a type without fields has none.

    Errors: raises EvaluationError for a list.
    """
    if isinstance(value, OptionalValue):
        return value.is_present and has_field(value.value, field)
    if isinstance(value, dict):
        return field in value or isinstance(value, DomainMap)
    if isinstance(value, list | tuple):
        raise EvaluationError("unsupported index type 'string' in list")
    return False


def optional_item(optional_value: OptionalValue, key: object) -> OptionalValue:
    """Look into a value that may be absent. A value without fields or items has none of this name.

    Errors: raises EvaluationError for a list index that is no number.
    """
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


def taken_out(value: object) -> object:
    """Prepare an optional value for a look into it: upstream unwraps it to Go's own value, which a
    device's maps of domains and Kubernetes' types do not survive.

    Errors: raises EvaluationError for a value of a type of Kubernetes' own.
    """
    if not isinstance(value, OptionalValue) or not value.is_present:
        return value
    kind = kind_of(value.value)
    if kind in OPAQUE:
        raise EvaluationError(f"unsupported conversion to ref.Val: {kind}")
    return some(dict(value.value)) if isinstance(value.value, DomainMap) else value
