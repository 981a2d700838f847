"""Environment variables as settings: `TOPOBUS_<SERVICE>__<SECTION>__<KEY>`, which override a file's
values.

The type of the field decides how text is read: a list takes comma-separated words or JSON, a
mapping takes JSON, the rest is text that msgspec converts. A variable that names no field is an
error: a typo must not pass in silence.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from topobus.bus.server_config.principals import LEAF_PRINCIPALS
from topobus.values.errors import ConfigError
from topobus.values.names import meant_name

__all__ = ["choices_at", "fields_at", "overlay", "strange_variables"]

_PREFIX = "TOPOBUS_"
_ALL = f"{_PREFIX}ALL__"
_SERVICES = ("all", *(principal for principal in LEAF_PRINCIPALS if principal not in ("user", "verdicts")))
_SHARED_SECTIONS = ("node", "nats", "http", "log", "tracing", "hardware")


def overlay(
    raw: dict[str, Any], kind: type[msgspec.Struct], service: str, environ: Mapping[str, str]
) -> tuple[dict[tuple[str, ...], str], list[ConfigError]]:
    """Write the environment's settings into `raw`.

    Return each path with the variable that it came from, and the mistakes in others.

    Errors: raises nothing; each mistake names the variable, and the nearest key that exists.
    """
    origins: dict[tuple[str, ...], str] = {}
    mistakes: list[ConfigError] = []
    own = _own_prefix(service)
    for prefix in (_ALL, own):
        for variable in sorted(name for name in environ if name.startswith(prefix)):
            path = tuple(part.lower() for part in variable.removeprefix(prefix).split("__"))
            try:
                if prefix == _ALL and path[0] not in _SHARED_SECTIONS:
                    raise _unknown(variable, path[:1], _SHARED_SECTIONS)
                wanted = _field_type(kind, path, variable, is_shared=prefix == _ALL)
                if wanted is None:
                    continue
                _put(raw, path, _read(environ[variable], wanted, variable), variable)
            except ConfigError as err:
                mistakes.append(err)
            else:
                origins[path] = variable
    return origins, mistakes


def strange_variables(kind: type[msgspec.Struct], service: str, environ: Mapping[str, str]) -> list[str]:
    """List variables that set nothing here and look as if they should: a misspelt service, none,
    single underscores, small letters.

    They are no errors: a class of your own may have any name, and another program may read them.

    >>> from topobus.process.config import ServiceSettings
    >>> for text in strange_variables(ServiceSettings, "gpu", {"TOPOBUS_TOPLOGY__NODE": "n", "NATS__URL": "b", "TOPOBUS_NPU__NODE": "n"}):
    ...     print(text)
    NATS__URL sets nothing; did you mean TOPOBUS_ALL__NATS__URL?
    TOPOBUS_NPU__NODE is for a class npu of your own: Topobus has no service of that name
    TOPOBUS_TOPLOGY__NODE sets nothing: there is no service toplogy; did you mean TOPOBUS_TOPOLOGY__NODE?
    """  # noqa: E501
    own, paths = _own_prefix(service), ["__".join(path).upper() for path in _paths(kind)]
    legal = {
        _squeezed(f"{prefix}{path}"): f"{prefix}{path}"
        for prefix in (own, _ALL)
        for path in paths
        if prefix == own or _is_shared(path)
    }
    unprefixed = {path: f"{_ALL if _is_shared(path) else own}{path}" for path in paths if "__" in path}
    said: list[str] = []
    for name in sorted(environ):
        meant = unprefixed.get(name) or unprefixed.get(name.removeprefix(_PREFIX)) or legal.get(_squeezed(name.upper()))
        head, underscores, rest = name.removeprefix(_PREFIX).partition("__")
        if name in legal.values() or (not name.upper().startswith(_PREFIX) and name not in unprefixed):
            continue
        if meant is not None:
            said.append(f"{name} sets nothing; did you mean {meant}?")
        elif name.startswith(_PREFIX) and underscores and head.lower() not in {*_SERVICES, service.replace("-", "_")}:
            near = meant_name(head, _SERVICES)
            said.append(
                f"{name} sets nothing: there is no service {head.lower()}; did you mean "
                f"{_PREFIX}{near.upper()}__{rest}?"
                if near
                else f"{name} is for a class {head.lower()} of your own: Topobus has no service of that name"
            )
    return said


def _own_prefix(service: str) -> str:
    return f"{_PREFIX}{service.upper().replace('-', '_')}__"


def _squeezed(name: str) -> str:
    return re.sub("_+", "_", name)


def _is_shared(path: str) -> bool:
    return path.partition("__")[0].lower() in _SHARED_SECTIONS


def _paths(kind: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Give the paths of all keys."""
    for name, inner in (_fields(kind) or {}).items():
        if _fields(inner) is None:
            yield (*path, name)
        else:
            yield from _paths(inner, (*path, name))


def fields_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    """Name the keys of the section at `path`, sorted. Empty when there is no such section."""
    return sorted(_fields(_type_at(kind, path)) or {})


def choices_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    """List the values that the field at `path` can have.

    Empty when it is not one of a few words.
    """
    plain = _plain(_type_at(kind, path))
    if typing.get_origin(plain) is typing.Literal:
        return [str(argument) for argument in typing.get_args(plain)]
    return [str(member.value) for member in plain] if isinstance(plain, type) and issubclass(plain, enum.Enum) else []


def _type_at(kind: type[msgspec.Struct], path: tuple[str, ...]) -> object:
    here: object = kind
    for part in path:
        name, bracket, _ = part.partition("[")
        here = (_fields(here) or {}).get(name)
        if bracket:
            # Of `own_shapes[0]` an item, and of `parts[...]` a value.
            here = typing.get_args(_plain(here))[_origin(here) is dict]
    return here


def _field_type(kind: type[msgspec.Struct], path: tuple[str, ...], variable: str, *, is_shared: bool) -> object:
    """Find the type of the field at `path`.

    None when a shared section is not one of this service's.
    """
    here: object = kind
    is_foreign = False
    for depth, name in enumerate(path):
        fields = _fields(here)
        if fields is None:
            # Inside a mapping every key is allowed, and its values are text until msgspec converts
            # them.
            if _origin(here) is dict:
                return typing.get_args(_plain(here))[1]
            raise _unknown(variable, path[: depth + 1], ())
        if name not in fields:
            if is_shared and depth == 0 and name == "hardware":
                # Imported here, because it loads the readers of the tree. A service that reads no
                # hardware accepts these keys only in a variable for all services.
                from topobus.sysfs.tree import HardwareSettings

                here, is_foreign = HardwareSettings, True
                continue
            raise _unknown(variable, path[: depth + 1], tuple(fields))
        here = fields[name]
    return None if is_foreign else here


def _fields(kind: object) -> dict[str, object] | None:
    plain = _plain(kind)
    return _types_of(plain) if isinstance(plain, type) and issubclass(plain, msgspec.Struct) else None


@cache
def _types_of(structure: type[msgspec.Struct]) -> dict[str, object]:
    """Evaluate the annotations of a section: milliseconds in all, and each variable leads through
    some.
    """
    return {field.encode_name: field.type for field in msgspec.structs.fields(structure)}


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
        raise ConfigError(
            f"{variable} names a section, not a key",
            next_step=f"append one of {', '.join(sorted(_fields(kind) or {}))}",
        )
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
