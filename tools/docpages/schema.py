"""JSON Schema (2020-12) of our structs, with the docstrings below their fields as descriptions.

msgspec's own generator stops at a default of one of the domain's own types (an empty CpuSet),
and knows no field docstrings.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from docpages.describe import (
    describe_fields,
    is_struct,
    nested_structs,
    summary,
)
from topobus.formats.messages.codec import to_builtins
from topobus.values.errors import InvariantError
from topobus.values.idset import IdSet
from topobus.values.pci import PciAddress

__all__ = ["render_schemas"]

Schema = dict[str, Any]

_PLAIN: dict[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    typing.Any: {},
}


def render_schemas(kinds: Iterable[type[Struct]]) -> dict[str, Schema]:
    """Give the schemas of these structs and of all inside them, by name, sorted."""
    schemas: dict[str, Schema] = {}
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if kind.__name__ in schemas:
            continue
        schemas[kind.__name__] = _struct(kind)
        todo.extend(inner for field in describe_fields(kind) for inner in nested_structs(field.hint))
    return dict(sorted(schemas.items()))


def _struct(kind: type[Struct]) -> Schema:
    config = kind.__struct_config__
    described = describe_fields(kind)
    fields = msgspec.structs.fields(kind)
    properties: dict[str, Schema] = {}
    for text, field in zip(described, fields, strict=True):
        schema = dict(_schema(text.hint))
        if text.doc:
            schema["description"] = text.doc
        if field.default is not msgspec.NODEFAULT:
            schema["default"] = to_builtins(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            schema["default"] = to_builtins(field.default_factory())
        properties[text.name] = schema
    required = [text.name for text in described if not text.default]
    if config.array_like:
        items = list(properties.values())
        return {"type": "array", "description": summary(kind), "prefixItems": items, "minItems": len(required)}
    if config.tag is not None and config.tag_field:
        properties = {config.tag_field: {"const": config.tag}, **properties}
        required = [config.tag_field, *required]
    made: Schema = {"title": kind.__name__, "description": summary(kind), "type": "object", "properties": properties}
    return {**made, "required": required} if required else made


def _schema(hint: object) -> Schema:
    if typing.get_origin(hint) is typing.Annotated:
        return _schema(typing.get_args(hint)[0])
    if is_struct(hint):
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if origin in (tuple, list, frozenset):
        if origin is tuple and Ellipsis not in arguments:
            return {
                "type": "array",
                "prefixItems": [_schema(argument) for argument in arguments],
                "minItems": len(arguments),
                "maxItems": len(arguments),
            }
        return {"type": "array", "items": _schema(arguments[0])}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if isinstance(hint, type) and issubclass(hint, IdSet):
        return {"type": "string", "examples": ["0-3,8"]}
    if hint is PciAddress:
        return {"type": "string", "examples": ["0000:3b:00.0"]}
    if hint in _PLAIN:
        return _PLAIN[hint]
    raise InvariantError(f"no schema for {hint!r}: teach docpages.schema")
