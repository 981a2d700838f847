"""Chooses the system that a command uses, and records where the choice comes from.

Errors name the system by this.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from topobus.bus.connection.endpoint import read_url
from topobus.cli.config import CliSettings
from topobus.cli.contexts import DEFAULT_PORT, Context, ContextFolder, ContextState
from topobus.cli.exits import NotFoundError, UsageError
from topobus.process.config import NatsSettings, load_settings, origin_of
from topobus.values.errors import ConfigError, PeerUnavailable
from topobus.values.names import is_loopback

__all__ = ["VARIABLE", "Target", "check_server_url", "choose_target", "is_local", "refuses"]

VARIABLE = "TOPOBUS_CONTEXT"
_DEFAULT = "the default"
# A server, or its absence, answers at once. A distant one gets the time of the connection itself.
_REFUSAL_S = 1.0


class Target(Struct, frozen=True, kw_only=True):
    """A system, as a command sees it."""

    settings: CliSettings
    source: str
    """Where the choice comes from: `--nats`, `context demo, the selected one`."""
    context: str = ""
    """The context's name. Empty: none."""

    @property
    def text(self) -> str:
        """Name the system for people, without passwords."""
        return f"NATS at {self.url}, from {self.source}"

    @property
    def url(self) -> str:
        """Return the server's URL without passwords."""
        return read_url(self.settings.nats.url)[1]

    @property
    def next_step(self) -> str:
        """Return what helps when no server answers."""
        if self.context:
            return "start that system, or choose another one with --context NAME or --nats URL: `topobus context ls`"
        return (
            "start the system with `topobus up`, or name it with --context NAME, --nats URL or TOPOBUS_ALL__NATS__URL"
        )


def choose_target(*, nats: str | None, context: str | None, config: Path | None, environ: Mapping[str, str]) -> Target:
    """Choose by the first that is given: --nats, --context, a URL of the environment or the
    settings file, TOPOBUS_CONTEXT, the selected context, the default.

    Errors: raises UsageError and ConfigError for what names no system, PeerUnavailable for the
    context of a `topobus up` that ended.
    """
    if nats is not None and context is not None:
        raise UsageError("--nats and --context exclude each other: both name the system", next_step="choose one")
    settings = load_settings(CliSettings, "cli", file=config, environ=environ)
    if nats is not None:
        check_server_url(nats)
        return _with_login(
            msgspec.structs.replace(settings, nats=msgspec.structs.replace(settings.nats, url=nats)), "--nats", environ
        )
    if context is not None:
        return _of_context(settings, context, "by --context", environ)
    origin = origin_of(CliSettings, "cli", "nats.url", file=config, environ=environ)
    if origin != _DEFAULT:
        return _with_login(settings, origin, environ)
    if named := environ.get(VARIABLE, ""):
        return _of_context(settings, named, f"by {VARIABLE}", environ)
    folder = ContextFolder(environ)
    if (selected := folder.selected()) and folder.get(selected) is not None:
        return _of_context(settings, selected, "the selected one", environ)
    return _with_login(settings, "the default, because no option, variable or context names one", environ)


def check_server_url(text: str) -> None:
    """Check a server's address from the command line.

    Errors: raises UsageError for what is no URL. A bare word could be a host, and is far more often
    a mistake.
    """
    try:
        servers, _ = read_url(text)
    except ConfigError as err:
        raise UsageError(
            f"--nats: {err.message.removeprefix('nats.url: ')}", next_step="for example --nats nats://127.0.0.1:4222"
        ) from err
    for server in servers:
        if "://" not in server and server != "localhost" and not set(server) & set(".:["):
            raise UsageError(
                f"--nats: got {server!r}, which is no URL; wanted nats://HOST:PORT",
                next_step=f"for the host of this name: --nats nats://{server}:{DEFAULT_PORT}; for a context: --context "
                f"{server}",
            )


def is_local(url: str) -> bool:
    """Say whether all servers of a setting `nats.url` are at this machine's loopback interface.

    >>> is_local("nats://127.0.0.1:4222,localhost"), is_local("tls://[::1]"), is_local("nats://nats,nats://127.0.0.1")
    (True, True, False)
    """
    return all(
        is_loopback(urlsplit(server if "://" in server else f"nats://{server}").hostname or "")
        for server in read_url(url)[0]
    )


async def refuses(url: str) -> bool:
    """Say whether every server of a URL refuses connections: none listens there, so waiting does
    not help.
    """
    outcomes = await asyncio.gather(*(_is_refused(server) for server in read_url(url)[0]))
    return all(outcomes)


async def _is_refused(server: str) -> bool:
    parts = urlsplit(server if "://" in server else f"nats://{server}")
    default = {"ws": 80, "wss": 443}.get(parts.scheme, DEFAULT_PORT)
    try:
        async with asyncio.timeout(_REFUSAL_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or default)
    except ConnectionRefusedError:
        return True
    except OSError as err:
        # A name with several addresses: asyncio joins their errors into a text. An address family
        # that this machine lacks proves nothing.
        numbers = {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(err))}
        return errno.ECONNREFUSED in numbers and numbers <= {
            errno.ECONNREFUSED,
            errno.EADDRNOTAVAIL,
            errno.EAFNOSUPPORT,
        }
    writer.close()
    return False


def _of_context(settings: CliSettings, name: str, source: str, environ: Mapping[str, str]) -> Target:
    try:
        context = ContextFolder(environ).named(name, source)
    except NotFoundError as err:
        raise UsageError(err.message, next_step=err.next_step) from err
    if context.state is ContextState.STOPPED:
        raise PeerUnavailable(
            f"context {name} ({source}) is the `topobus up` of {context.state_dir}, which is not running",
            next_step=f"start it again (topobus up --dir {context.state_dir}), or choose another one: topobus context ls",  # noqa: E501
        )
    return _with_login(
        msgspec.structs.replace(settings, nats=_nats_of(settings.nats, context)),
        f"context {name}, {source}",
        environ,
        context=name,
    )


def _nats_of(nats: NatsSettings, context: Context) -> NatsSettings:
    """Apply a context to the settings. A login in the settings stays."""
    nats = msgspec.structs.replace(nats, url=context.nats)
    if nats.user:
        return nats
    return msgspec.structs.replace(
        nats,
        user=context.user,
        password_file=context.password_file,
        tls_ca_file=nats.tls_ca_file or context.tls_ca_file,
    )


def _with_login(settings: CliSettings, source: str, environ: Mapping[str, str], *, context: str = "") -> Target:
    """Add the login of a `topobus up` of this user that runs at that
    address, where none is named.
    """
    nats = settings.nats
    login = None if nats.user else ContextFolder(environ).running_at(nats.url)
    if login is not None:
        ca_file = nats.tls_ca_file or login.tls_ca_file
        nats = msgspec.structs.replace(nats, user=login.user, password_file=login.password_file, tls_ca_file=ca_file)
    return Target(settings=msgspec.structs.replace(settings, nats=nats), source=source, context=context)
