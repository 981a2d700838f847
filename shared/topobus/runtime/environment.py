"""Environment variables as settings: `TOPOBUS_<SERVICE>__<SECTION>__<KEY>`, laid over what a file says.

The type of the field decides how text is read: a list takes comma-separated words or JSON, a mapping takes JSON, the rest is text that
msgspec converts. A variable that names no field is an error: a typo must not pass in silence.
"""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from topobus.domain.errors import ConfigError

__all__ = ["choices_at", "fields_at", "overlay"]

_ALL = "TOPOBUS_ALL__"
_SHARED_SECTIONS = ("node", "nats", "http", "log", "tracing", "hardware")


def overlay(raw: dict[str, Any], kind: type[msgspec.Struct], service: str, environ: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Write the environment's settings into `raw`; give each path with the variable that it came from.

    Errors: ConfigError names the variable, and the nearest key that exists.
    """
    origins: dict[tuple[str, ...], str] = {}
    own = f"TOPOBUS_{service.upper().replace('-', '_')}__"
    for prefix in (_ALL, own):
        for variable in sorted(name for name in environ if name.startswith(prefix)):
            path = tuple(part.lower() for part in variable.removeprefix(prefix).split("__"))
            if prefix == _ALL and path[0] not in _SHARED_SECTIONS:
                raise _unknown(variable, path[:1], _SHARED_SECTIONS)
            wanted = _field_type(kind, path, variable, is_shared=prefix == _ALL)
            if wanted is None:
                continue
            _put(raw, path, _read(environ[variable], wanted, variable), variable)
            origins[path] = variable
    return origins


def fields_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    """Name the keys of the section at `path`, sorted; empty when there is no such section."""
    return sorted(_fields(_type_at(kind, path)) or {})


def choices_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    """List the values that the field at `path` can have; empty when it is not one of a few words."""
    plain = _plain(_type_at(kind, path))
    if typing.get_origin(plain) is typing.Literal:
        return [str(argument) for argument in typing.get_args(plain)]
    return [str(member.value) for member in plain] if isinstance(plain, type) and issubclass(plain, enum.Enum) else []


def _type_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> object:
    here: object = kind
    for name in path:
        here = (_fields(here) or {}).get(name)
    return here


def _field_type(kind: type[msgspec.Struct], path: tuple[str, ...], variable: str, *, is_shared: bool) -> object:
    """Find the type of the field at `path`; None when a shared section is not one of this service's."""
    here: object = kind
    is_foreign = False
    for depth, name in enumerate(path):
        fields = _fields(here)
        if fields is None:
            # Inside a mapping every key is allowed, and its values are text until msgspec says otherwise.
            if _origin(here) is dict:
                return typing.get_args(_plain(here))[1]
            raise _unknown(variable, path[: depth + 1], ())
        if name not in fields:
            if is_shared and depth == 0 and name == "hardware":
                # Here: the tree's readers come with it, and who reads no hardware is told of it only where somebody set it for all.
                from topobus.sysfs.tree import HardwareSettings

                here, is_foreign = HardwareSettings, True
                continue
            raise _unknown(variable, path[: depth + 1], tuple(fields))
        here = fields[name]
    return None if is_foreign else here


def _fields(kind: object) -> dict[str, object] | None:
    plain = _plain(kind)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        hints = typing.get_type_hints(plain, include_extras=True)
        return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(plain)}
    return None


def _plain(kind: object) -> object:
    """Strip Annotated and Optional."""
    if typing.get_origin(kind) is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [argument for argument in typing.get_args(kind) if argument is not type(None)]
        if len(rest) == 1:
            return _plain(rest[0])
    return kind


def _origin(kind: object) -> object:
    plain = _plain(kind)
    return typing.get_origin(plain) or plain


def _read(text: str, kind: object, variable: str) -> object:
    origin = _origin(kind)
    if _fields(kind) is not None:
        raise ConfigError(f"{variable} names a section, not a key", next_step=f"append one of {', '.join(sorted(_fields(kind) or {}))}")
    if origin in (dict, list, tuple, set, frozenset) and text.lstrip()[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as err:
            raise ConfigError(f"{variable} looks like JSON and is not: {err}") from err
    if origin in (list, tuple, set, frozenset):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _put(raw: dict[str, Any], path: tuple[str, ...], value: object, variable: str) -> None:
    here = raw
    for part in path[:-1]:
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{variable} cannot be laid over the file: {part} is not a table there")
        here = inner
    here[path[-1]] = value


def _unknown(variable: str, path: tuple[str, ...], names: tuple[str, ...]) -> ConfigError:
    near = difflib.get_close_matches(path[-1], names, n=1)
    hint = f"did you mean {near[0].upper()}?" if near else f"keys here: {', '.join(sorted(names)) or 'none'}"
    return ConfigError(f"{variable}: there is no setting {'.'.join(path)}", next_step=hint)
