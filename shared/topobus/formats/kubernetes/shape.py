"""Tells typing errors from legal fields that Topobus does not use, by the names that are legal at
each place.

Takes plain dicts and lists as read from YAML or JSON and returns them without nulls, which
Kubernetes takes for absent. msgspec checks the types afterwards.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from topobus.formats.first_read import ready
from topobus.values.errors import ContractError

__all__ = ["Problem", "check_names", "did_you_mean", "only_fields", "problem_of", "read_as", "refuse_problems"]

S = TypeVar("S", bound=Struct)
# How msgspec ends a message: with the place of what it is about.
_AT = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?")


@dataclass(frozen=True)
class Problem:
    """One thing wrong in an object: where, and what was found and wanted."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def refuse_problems(problems: Sequence[Problem], where: str) -> None:
    """Refuse an object that has problems.

    Errors: raises ContractError with all of them.
    """
    if problems:
        raise ContractError(f"{where}: " + "; ".join(map(str, problems)))


def did_you_mean(wrong: str, legal: Sequence[str]) -> str:
    """Suggest the nearest legal name. Empty when none is near.

    >>> did_you_mean("reources", ["resources", "restartPolicy"])
    ', did you mean "resources"?'
    """
    near = get_close_matches(wrong, legal, n=1, cutoff=0.6)
    return f', did you mean "{near[0]}"?' if near else ""


def problem_of(err: msgspec.ValidationError, path: str) -> Problem:
    """Say what has a wrong type in the value at a path, and where.

    >>> try: msgspec.convert({"a": [1]}, dict[str, list[str]])
    ... except msgspec.ValidationError as err: print(problem_of(err, "metadata"))
    metadata[...][0]: wanted str, got int
    """
    match = _AT.fullmatch(str(err))
    message, inner = match.groups() if match else (str(err), None)
    joint = "" if not inner or not path or inner.startswith("[") else "."
    text = message.replace("`", "").replace("Expected", "wanted").replace("Object ", "")
    return Problem(path + joint + (inner or ""), text)


def check_names(
    value: object, wanted: object, path: str, ignored: Mapping[type, frozenset[str]], problems: list[Problem]
) -> object:
    """Walk `value` beside the annotation `wanted`.

    Return it without nulls and add a Problem for each unknown name.

    Shapes: ignored — struct to names that are legal there though the struct lacks them.
    """
    if not isinstance(value, _NESTED):
        return value
    structure, element, is_map = _shape(wanted)
    if structure is not None and isinstance(value, Mapping):
        fields = _fields(structure)
        legal = fields.keys() | ignored.get(structure, frozenset())
        kept: dict[str, object] = {}
        for key, inner in value.items():
            if key not in legal:
                problems.append(Problem(_inside(path, key), f"unknown field{did_you_mean(str(key), sorted(legal))}"))
            if inner is None:
                continue
            is_nested = key in fields and isinstance(inner, _NESTED)
            kept[key] = check_names(inner, fields[key], _inside(path, key), ignored, problems) if is_nested else inner
        return kept
    if element is not None and not is_map and isinstance(value, list | tuple):
        return [check_names(item, element, f"{path}[{index}]", ignored, problems) for index, item in enumerate(value)]
    if element is not None and is_map and isinstance(value, Mapping):
        return {
            key: check_names(item, element, f"{path}.{key}", ignored, problems)
            for key, item in value.items()
            if item is not None
        }
    return value


def only_fields(value: Any, wanted: object) -> Any:
    """Leave out what an annotation has no field for, at any depth."""
    structure, element, is_map = _shape(wanted)
    if isinstance(value, dict) and structure is not None:
        fields = _fields(structure)
        return {key: only_fields(inner, fields[key]) for key, inner in value.items() if key in fields}
    if isinstance(value, dict) and is_map:
        return {key: only_fields(inner, element) for key, inner in value.items()}
    return [only_fields(inner, element) for inner in value] if isinstance(value, list) else value


def read_as(value: object, wanted: type[S], *, where: str) -> S:
    """Read a stored dict as a struct: unknown names are ignored, nulls count as absent.

    Errors: raises ContractError with the path of the first field that has a wrong type.
    """
    try:
        # The walk beside the annotations costs five times the conversion, and
        # without a null it changes nothing.
        return msgspec.convert(
            check_names(value, wanted, "", {}, []) if _has_null(_known(value, wanted)) else value, type=ready(wanted)
        )
    except (msgspec.ValidationError, RecursionError) as err:
        raise ContractError(f"{where}: {err}") from err


def _known(value: object, wanted: type[S]) -> object:
    """Leave out the fields that the struct lacks. They are never read, and are most of a pod."""
    if type(value) is not dict:
        return value
    return [value[name] for name in wanted.__struct_encode_fields__ if name in value]


def _has_null(value: object) -> bool:
    """Say whether a null may occur anywhere below. True also for a value that is no plain dict or
    list.
    """
    inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else None
    if inner is None:
        return True
    return any(item is None or (type(item) not in _PLAIN and _has_null(item)) for item in inner)  # type: ignore[attr-defined]  # a dict's values or a list


_PLAIN = frozenset({str, int, bool, float})
# Nothing else has names in it; most values are texts and numbers.
_NESTED = (Mapping, list, tuple)


def _inside(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@cache
def _fields(structure: type[Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(structure)}


@cache
def _shape(wanted: object) -> tuple[type[Struct] | None, object | None, bool]:
    """Take an annotation apart: a struct, or the element of a list, or of a map."""
    if get_origin(wanted) in (Union, types.UnionType):
        for option in get_args(wanted):
            shape = _shape(option)
            if shape != (None, None, False):
                return shape
        return None, None, False
    if isinstance(wanted, type) and issubclass(wanted, Struct):
        return wanted, None, False
    if get_origin(wanted) is tuple:
        return None, get_args(wanted)[0], False
    if get_origin(wanted) is dict:
        return None, get_args(wanted)[1], True
    return None, None, False
