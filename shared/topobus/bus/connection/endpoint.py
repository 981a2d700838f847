"""Turns the NATS settings into servers, passwords and certificates, or raises a ConfigError that
names the key.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from topobus.bus.login.tls_trust import server_context
from topobus.values.errors import ConfigError

if TYPE_CHECKING:
    from topobus.process.config import NatsSettings

__all__ = ["read_files", "read_secret", "read_url", "strange_urls", "tls_context", "why_tls"]

# What NATS' clients take where none is written.
_PORT = 4222


def read_url(text: str) -> tuple[list[str], str]:
    """Split a comma-separated list of NATS servers.

    Shapes: result — the servers as written, and the same list without user and password, for logs.
    Errors: raises ConfigError for a server that is not `nats://`, `tls://`, `ws://` or `wss://`
    with a host; the message has no password.

    >>> read_url("nats://me:secret@a:4222, b")
    (['nats://me:secret@a:4222', 'b'], 'nats://a:4222,nats://b')
    """
    servers = [part.strip() for part in text.split(",") if part.strip()]
    shown = []
    for server in servers or [text]:
        try:
            parts = urlsplit(server if "://" in server else f"nats://{server}")
            is_good = parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            parts, is_good = None, False
        if parts is None or not is_good:
            raise ConfigError(
                f"nats.url: got {server.rpartition('@')[2]!r}, wanted nats://HOST:PORT",
                next_step="several servers are separated by commas",
            )
        shown.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
    return servers, ",".join(shown)


def strange_urls(text: str) -> list[str]:
    """List servers that are not written as a URL, each with how it is understood.

    >>> strange_urls("127.0.0.1, nats://a:4222, b:4223")
    ["nats.url: '127.0.0.1' is taken for nats://127.0.0.1:4222", "nats.url: 'b:4223' is taken for nats://b:4223"]
    """
    bare = [(server, urlsplit(f"nats://{server}")) for server in read_url(text)[0] if "://" not in server]
    return [
        f"nats.url: {server.rpartition('@')[2]!r} is taken for "
        f"nats://{parts.netloc.rpartition('@')[2]}{'' if parts.port else f':{_PORT}'}"
        for server, parts in bare
    ]


def read_secret(path: str, key: str) -> str:
    """Read a secret's file, stripped.

    Shapes: key — the setting that named the file.
    Errors: raises ConfigError for a file that cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as err:
        raise ConfigError(
            f"{key}: cannot read {path}: {err.strerror}", next_step="mount the secret, or leave the key out", key=key
        ) from err
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"{key}: {path} is no text", next_step="mount the secret as it was given, not packed", key=key
        ) from err


def read_files(settings: NatsSettings) -> tuple[str | None, ssl.SSLContext | None]:
    """Read the files that a connection needs: return the password, and which authorities to trust.

    They are read again for each connection, because a mounted secret is replaced while we run.

    Errors: raises ConfigError that names the key.
    """
    password = read_secret(settings.password_file, "nats.password_file") if settings.password_file else None
    return password, tls_context(settings)


def tls_context(settings: NatsSettings) -> ssl.SSLContext | None:
    """Return the context with the authorities to trust. None: the client's own choice.

    Errors: raises ConfigError when the file of authorities cannot be read.
    """
    if not settings.tls_ca_file:
        return None
    try:
        return server_context(settings.tls_ca_file)
    except OSError as err:
        raise ConfigError(
            f"nats.tls_ca_file: cannot use {settings.tls_ca_file}: {err}",
            next_step="give a PEM file",
            key="nats.tls_ca_file",
        ) from err


def why_tls(settings: NatsSettings) -> str:
    """Name the setting that requires TLS. Empty when none does.

    One tls:// among several servers requires it of all, because they are sent the same password.

    >>> from topobus.process.config import NatsSettings
    >>> why_tls(NatsSettings(url="nats://a,tls://b")), why_tls(NatsSettings())
    ('nats.url (tls://)', '')
    """
    servers, _ = read_url(settings.url)
    scheme = next((scheme for scheme in ("tls", "wss") for server in servers if server.startswith(f"{scheme}://")), "")
    if scheme:
        return f"nats.url ({scheme}://)"
    return "nats.tls_ca_file" if settings.tls_ca_file else ""
