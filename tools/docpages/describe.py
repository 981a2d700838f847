"""Read our own structs for the reference pages: field names, types in words, defaults, and the
docstrings that stand below fields.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from topobus.values.idset import IdSet
from topobus.values.pci import PciAddress

__all__ = ["FieldText", "describe_fields", "is_struct", "nested_structs", "summary", "type_text"]

_CONTAINERS = {tuple: "list", list: "list", set: "set", frozenset: "set"}


class FieldText(Struct, frozen=True, kw_only=True):
    """One field, in words."""

    name: str
    kind: str
    default: str
    """Empty when the field must be given."""
    doc: str
    hint: object


def is_struct(kind: object) -> typing.TypeGuard[type[Struct]]:
    """Say whether this is one of our structs."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def summary(kind: type) -> str:
    """Give the whole docstring as one paragraph."""
    return " ".join((inspect.getdoc(kind) or "").split())


def describe_fields(kind: type[Struct]) -> tuple[FieldText, ...]:
    """Describe each field in the order of definition, inherited ones first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    docs = _field_docs(kind)
    return tuple(
        FieldText(
            name=field.encode_name,
            kind=type_text(hints[field.name]),
            default=_default_text(field),
            doc=docs.get(field.name, ""),
            hint=hints[field.name],
        )
        for field in msgspec.structs.fields(kind)
    )


def type_text(hint: object) -> str:
    """Say a type in words that need no Python: `list of text`, `number, or none`."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *extras = typing.get_args(hint)
        limits = [
            f"{sign} {value}" for meta in extras if isinstance(meta, msgspec.Meta) for sign, value in _limits(meta)
        ]
        return f"{type_text(inner)} {' and '.join(limits)}".strip()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if argument is type(None) else type_text(argument) for argument in arguments)
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is dict:
        return f"map of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if origin in _CONTAINERS:
        inner_text = ", ".join(type_text(argument) for argument in arguments if argument is not Ellipsis)
        return f"{_CONTAINERS[origin]} of {inner_text}"
    if is_struct(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if isinstance(hint, type) and issubclass(hint, IdSet):
        return "id list (`0-3,8`)"
    if hint is PciAddress:
        return "PCI address (`0000:3b:00.0`)"
    plain: dict[object, str] = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        typing.Any: "anything",
    }
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def nested_structs(kind: object) -> Iterator[type[Struct]]:
    """Give the structs that a type hint names, from outside inwards, not those inside of them."""
    if is_struct(kind):
        yield kind
        return
    for argument in typing.get_args(kind):
        yield from nested_structs(argument)


def _limits(meta: msgspec.Meta) -> Iterator[tuple[str, object]]:
    for sign, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
        if value is not None:
            yield sign, value


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return ""
        value = field.default_factory()
    if isinstance(value, Struct):
        return "its own defaults"
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) or not isinstance(value, int | float):
        return f"`{value}`" if value else "empty"
    return f"{value}"


def _field_docs(kind: type[Struct]) -> dict[str, str]:
    """Collect the string that stands below each field; a subclass's words win over its parent's."""
    texts: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if not is_struct(ancestor) or ancestor is Struct:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(ancestor)))
        assert isinstance(tree.body[0], ast.ClassDef)
        body = tree.body[0].body
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                texts[statement.target.id] = " ".join(following.value.value.split())
    return texts
