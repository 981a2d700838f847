"""Reads settings: defaults, then a TOML file, then the environment.

Each error names the key and where it was written. `TOPOBUS_ALL__NATS__URL` applies to every
process, `TOPOBUS_GPU__NATS__URL` to one. An unknown key is an error.
"""

from __future__ import annotations

import math
import re
import socket
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from topobus.bus.connection.endpoint import read_url
from topobus.process.environment import choices_at, fields_at, overlay
from topobus.process.tracing import TracingSettings
from topobus.values.errors import ConfigError
from topobus.values.names import is_dns_subdomain

__all__ = [
    "HttpSettings",
    "LogSettings",
    "NatsSettings",
    "ServiceSettings",
    "find_mistakes",
    "load_settings",
    "origin_of",
]


class NatsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach NATS, and as whom."""

    url: str = "nats://127.0.0.1:4222"
    """One or several servers of one cluster, comma-separated. The default is a server on this
    machine."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Copies of each stream and bucket. 1: a single server. More than 1 needs nats-server 2.10 or
    later (before, compare-and-set is not exclusive)."""
    user: str = ""
    """User name; empty: none."""
    password_file: str = ""
    """A file that holds the password, so that no password is in a process list or an environment
    dump. A changed password is read while the service runs."""
    zone: Literal["", "core", "vendor"] = ""
    """Whether the server keeps accounts apart (docs/how-to/secure-nats.md). `core`: it does, and
    each service knows whether its own is the one with the streams. `vendor`: this service's account
    has none, and it reads what the server lets through. Empty: one account for all."""
    tls_ca_file: str = ""
    """Certificates to trust, PEM; empty: the system's own for tls:// URLs. Given, or with a tls://
    URL, a server without TLS is sent nothing."""
    store_mib: Annotated[int, Meta(ge=0)] = 0
    """What all streams and buckets together may take on the server's disk, when they are made; each
    one's bound shrinks or grows in proportion. 0: the catalogue's own bounds, see
    docs/reference/contracts.md. Streams that exist keep theirs."""
    provisioner: Literal["controller", "topology"] = "controller"
    """Which service makes the streams of this server, where each process is a NATS user of its own.
    `controller`: a central server, and the hub. `topology`: a node's own server, where no
    controller runs; set the same for all services of the node. Stand-alone claims are not there:
    the gateway prepares claims of a Kubernetes API server alone then (`cluster.mode`)."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """How long one JetStream request may take. 5 s: longer than a leader election usually takes on
    an idle cluster."""

    @property
    def is_nodes_own(self) -> bool:
        """Whether the server is a node's own: no controller makes the streams there, and no
        stand-alone objects are stored.
        """
        return self.provisioner == "topology"


class HttpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoint for probes and metrics: /healthz, /readyz, /metrics."""

    host: str = "127.0.0.1"
    """The address to listen at. The default keeps metrics on this machine; 0.0.0.0 or :: opens
    them."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: no endpoint."""
    stalled_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """After how many seconds without a turn of the event loop /healthz fails, so that a supervisor
    starts the process again. 10 s: no honest step blocks the loop for a second, and a machine that
    swaps or was suspended is back sooner; with a probe each 10 s that must fail three times a hung
    process ends within 40 s."""
    stuck_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """After how many seconds without progress in a loop's work /healthz fails. 120 s: each step has
    a limit of its own of ten seconds or so, and a long pass reports each of its steps."""


class LogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written. `info` is one line a decision."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto` is `console` on a terminal and `json` elsewhere."""


class ServiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that every service has."""

    node: str = ""
    """This node's name, as Kubernetes calls it. Empty: the host's name in lower case."""
    nats: NatsSettings = NatsSettings()
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()


S = TypeVar("S", bound=ServiceSettings)

_NOTHING = object()

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")


def load_settings(kind: type[S], service: str, *, file: Path | None, environ: Mapping[str, str]) -> S:
    """Read the settings of one service.

    Order: defaults, `file` (TOML), TOPOBUS_ALL__*, TOPOBUS_<SERVICE>__*; later wins.
    Errors: ConfigError names the key, and the file or variable it came from; one for several
    mistakes has a line for each.
    """
    settings, mistakes = find_mistakes(kind, service, file=file, environ=environ)
    if len(mistakes) > 1:
        raise ConfigError("\n  ".join([f"{len(mistakes)} settings are wrong:", *map(str, mistakes)]))
    if mistakes:
        raise mistakes[0]
    assert settings is not None
    return settings


def find_mistakes(
    kind: type[S],
    service: str,
    *,
    file: Path | None,
    environ: Mapping[str, str],
    checks: Sequence[Callable[[S], object]] = (),
) -> tuple[S | None, list[ConfigError]]:
    """Read the settings of one service, and find all mistakes in them: each wrong value is removed,
    and the rest is checked again.

    Shapes: checks — each refuses, by ConfigError, settings that cannot be used; an error without a
    `key` ends its search. The result has settings unless a mistake cannot be separated from the
    rest.
    Errors: as `load_settings`, each in the list; raises nothing.
    """
    try:
        raw = _read_file(file)
    except ConfigError as err:
        return None, [err]
    origins, mistakes = overlay(raw, kind, service, environ)
    settings: S | None = None
    waiting = list(checks)
    while True:
        wrong, settings = _first_mistake(kind, service, raw, file, origins)
        while settings is not None and wrong is None and waiting:
            try:
                waiting[0](settings)
                waiting.pop(0)
            except ConfigError as err:
                wrong = _with_origin(err, service, file, origins, raw)
        if wrong is None:
            return settings, mistakes
        mistakes.append(wrong)
        key = wrong.facts.get("key")
        if isinstance(key, str) and _take_out(raw, key):
            continue
        if settings is None:
            return None, mistakes
        # A check whose error names no key would report the same again in each round.
        waiting.pop(0)


def _first_mistake(
    kind: type[S], service: str, raw: dict[str, Any], file: Path | None, origins: dict[tuple[str, ...], str]
) -> tuple[ConfigError | None, S | None]:
    """Convert the raw values. Return the first mistake, with its key, or the settings."""
    try:
        settings = msgspec.convert(raw, type=kind, strict=False)
    except msgspec.ValidationError as err:
        return _explain(err, kind, service, raw, file, origins), None
    for path, value in _floats(settings, ()):
        # TOML and the environment can hold nan and inf, and no limit of ours excludes both.
        if not math.isfinite(value):
            key = ".".join(path)
            text = f"{service}: {key}: got {value}, wanted a finite number (from {_written(path, file, origins)})"
            return ConfigError(text, next_step="leave the key out for its default", key=key), None
    try:
        read_url(settings.nats.url)
    except ConfigError as err:
        where = _written(("nats", "url"), file, origins)
        return ConfigError(f"{service}: {err.message} (from {where})", next_step=err.next_step, key="nats.url"), None
    node = settings.node or socket.gethostname().lower()
    if not is_dns_subdomain(node):
        source = origins.get(("node",), str(file) if "node" in raw else "the host's name")
        text = (
            f"{service}: node: got {node!r} from {source}, wanted a DNS name (lower-case letters, digits, '-' and '.')"
        )
        return ConfigError(text, next_step=f"set TOPOBUS_{service.upper()}__NODE", key="node"), None
    return None, msgspec.structs.replace(settings, node=node)


def _take_out(raw: dict[str, Any], key: str) -> bool:
    """Remove the value at a key from the raw values, or the list or mapping that has it.

    Return whether there was something.
    """
    here: Any = raw
    parts = key.split(".")
    for part in parts[:-1]:
        inner = here.get(part) if isinstance(here, dict) else None
        if not isinstance(inner, dict):
            parts = [part]
            break
        here = inner
    name = parts[-1].partition("[")[0]
    return isinstance(here, dict) and here.pop(name, _NOTHING) is not _NOTHING


def _with_origin(
    err: ConfigError, service: str, file: Path | None, origins: dict[tuple[str, ...], str], raw: dict[str, Any]
) -> ConfigError:
    """Add to an error that has a setting's key where that setting was written."""
    key = err.facts.get("key")
    if not isinstance(key, str):
        return err
    message = err.message if err.message.startswith(f"{service}: ") else f"{service}: {err.message}"
    return ConfigError(f"{message} (from {_origin(raw, key, file, origins)})", next_step=err.next_step, **err.facts)


def origin_of(kind: type[S], service: str, key: str, *, file: Path | None, environ: Mapping[str, str]) -> str:
    """Name the source of a key's value: a variable, the file, or the default."""
    raw = _read_file(file)
    origins, _ = overlay(raw, kind, service, environ)
    return _origin(raw, key, file, origins)


def _origin(raw: dict[str, Any], key: str, file: Path | None, origins: dict[tuple[str, ...], str]) -> str:
    path = tuple(key.split("."))
    here: Any = raw
    for part in path:
        if not isinstance(here, dict) or part not in here:
            return "the default"
        here = here[part]
    return _written(path, file, origins)


def _written(path: tuple[str, ...], file: Path | None, origins: dict[tuple[str, ...], str]) -> str:
    """Name the variable that the value at a path came from, else the file."""
    # The last one wins, and is listed last.
    variable = next(
        (name for key, name in reversed(origins.items()) if key == path[: len(key)] or key[: len(path)] == path), None
    )
    return variable or (f"file {file}" if file else "the default")


def _floats(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Struct):
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from _floats(getattr(value, name), (*path, key))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _floats(inner, (*path, str(key)))


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"cannot read the settings file {file}: {err.strerror}", next_step="check --config") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"the settings file {file} is not TOML: {err}") from err


def _explain(
    err: msgspec.ValidationError,
    kind: type[Struct],
    service: str,
    raw: dict[str, Any],
    file: Path | None,
    origins: dict[tuple[str, ...], str],
) -> ConfigError:
    """Turn msgspec's "… - at `$.nats.replicas`" into the key, the value, and the place where it was
    written.
    """
    what, _, where = str(err).partition(" - at `$.")
    path = tuple(where.rstrip("`").split(".")) if where else ()
    unknown = _UNKNOWN_FIELD.match(what)
    if unknown and file is not None:
        # Only the file can hold one: variables that name no field have been refused before.
        fields = fields_at(kind, path)
        near = get_close_matches(unknown[1], fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"keys here: {', '.join(fields)}"
        key = ".".join((*path, unknown[1]))
        return ConfigError(f"{service}: there is no setting {key} (from file {file})", next_step=hint, key=key)
    # A variable has a list or a mapping as a whole: `own_shapes` of `own_shapes[0].within`.
    index = next((index for index, part in enumerate(path) if "[" in part), len(path) - 1)
    whole = (*path[:index], path[index].partition("[")[0]) if path else ()
    variable = next((name for key, name in origins.items() if key[: len(whole)] == whole), None) if path else None
    source = variable or (f"file {file}" if file else "the environment")
    value: Any = raw
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    got = f", got {value!r}" if isinstance(value, str | int | float) else ""
    key = ".".join(path) or "settings"
    choices = choices_at(kind, path)
    wanted = f", wanted one of {', '.join(choices)}" if choices else ""
    return ConfigError(
        f"{service}: {key}: {what}{got}{wanted} (from {source})",
        next_step="see docs/reference/settings.md for the keys",
        key=key,
    )
