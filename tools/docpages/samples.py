"""A sample value of any message with every field filled: what golden files and the AsyncAPI
document show.

Samples are made from the type alone, so a field that is renamed, removed or retyped changes them.
"""

from __future__ import annotations

import enum
import types
import typing
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from docpages.describe import is_struct
from topobus.formats.messages.catalogue import ASKS, EVENTS, NOTICES, STATES
from topobus.formats.messages.codec import decode
from topobus.values.errors import InvariantError
from topobus.values.idset import IdSet
from topobus.values.pci import PciAddress

__all__ = ["MESSAGES", "file_stem", "sample", "variants"]

M = TypeVar("M")

MESSAGES: tuple[type[Struct], ...] = tuple(
    dict.fromkeys(
        [
            *(state.message for state in STATES),
            *(noun.message for noun in (*EVENTS, *NOTICES)),
            *(kind for ask in ASKS for kind in (ask.request, ask.reply)),
        ]
    )
)
"""Every message type of the catalogue, once."""

# By field name, so that a sample reads like a message and not like noise.
_TEXTS = {
    "node": "demo-node",
    "device_class": "gpu",
    "device": "gpu-0000-3b-00-0",
    "peer": "gpu-0000-5e-00-0",
    "driver": "nvidia",
    "time": "2026-01-02T03:04:05.000000Z",
    "since": "2026-01-02T03:04:05.000000Z",
    "code": "numa-capacity",
    "verb": "place",
    "path": "/dev/nvidia0",
    "host_path": "/dev/nvidia0",
    "container_path": "/dev/nvidia0",
    "permissions": "rw",
    "kind": "Pod",
    "api_version": "v1",
    "root": "pci0000:17",
    "pcie_root": "pci0000:17",
}


def sample(kind: type[M], variant: str = "") -> M:
    """Make a value with every field filled; `variant` names the member (by tag) to take where
    several are possible.
    """
    return decode(msgspec.json.encode(_value(kind, "value", variant)), kind, where=f"sample of {kind.__name__}")


def variants(kind: type[Struct]) -> tuple[str, ...]:
    """Name the variants that a message has: its first form (empty), and the tags of other members
    of its unions.
    """
    structs: set[str] = set()
    _collect(kind, structs, set())
    return ("", *sorted(structs))


def file_stem(kind: type[Struct], variant: str = "") -> str:
    """Name the golden file of a message: `place_reply`, `place_reply.refusal`."""
    name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")
    return f"{name}.{variant}" if variant else name


def _value(hint: object, name: str, variant: str) -> Any:
    if typing.get_origin(hint) is typing.Annotated:
        return _value(typing.get_args(hint)[0], name, variant)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(_member(arguments, variant), name, variant)
    if origin is typing.Literal:
        return arguments[0]
    if origin is dict:
        return {str(_value(arguments[0], "key", variant)): _value(arguments[1], name, variant)}
    if origin in (tuple, list):
        if Ellipsis in arguments or origin is list:
            return [_value(arguments[0], name, variant)]
        return [_value(argument, name, variant) for argument in arguments]
    if is_struct(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        made = {
            field.encode_name: _value(hints[field.name], field.name, variant) for field in msgspec.structs.fields(hint)
        }
        config = hint.__struct_config__
        if config.tag is not None:
            made[config.tag_field or "type"] = config.tag
        return list(made.values()) if config.array_like else made
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    return _scalar(hint, name)


def _scalar(hint: object, name: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, IdSet):
        return "0-3,8"
    if hint is PciAddress:
        return "0000:3b:00.0"
    plain: dict[object, Any] = {
        str: _TEXTS.get(name, f"some-{name.replace('_', '-')}"),
        int: 7,
        float: 2.5,
        bool: True,
        typing.Any: {"any": "thing"},
    }
    try:
        return plain[hint]
    except (KeyError, TypeError) as err:
        raise InvariantError(f"no sample for {hint!r} (field {name}): teach docpages.samples") from err


def _member(arguments: tuple[object, ...], variant: str) -> object:
    members = [argument for argument in arguments if argument is not type(None)]
    return next((member for member in members if variant and _tag(member) == variant), members[0])


def _tag(kind: object) -> str:
    return str(kind.__struct_config__.tag) if is_struct(kind) and kind.__struct_config__.tag is not None else ""


def _collect(hint: object, structs: set[str], seen: set[object]) -> None:
    if is_struct(hint):
        if hint in seen:
            return
        seen.add(hint)
        for type_hint in typing.get_type_hints(hint, include_extras=True).values():
            _collect(type_hint, structs, seen)
        return
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        structs.update(
            tag
            for argument in [argument for argument in arguments if argument is not type(None)][1:]
            if (tag := _tag(argument))
        )
    for argument in arguments:
        _collect(argument, structs, seen)
