"""Announces to the commands of this user how to log in at the server of a `topobus up` on this
machine, so that they need no flags.

A file `<network namespace>-<port>`, in a folder that only this user can enter, has the path of each
password and no password itself. It counts only while the process that wrote it runs: another server
may have the port later, and would be sent a password that is not for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from topobus.bus.connection.endpoint import read_url
from topobus.local_system.processes import is_process, process_start
from topobus.process.own_folder import objection_to_folder

__all__ = ["LocalLogin", "announced_login", "find_login", "is_local", "port_name", "run_folder"]

# The same for all terminals of a user, whatever their TMPDIR; the folder in
# it is checked before it is used.
_PARENT = Path("/tmp")
_DEFAULT_PORT = 4222


class LocalLogin(Struct, frozen=True, kw_only=True):
    """The user to connect as, and the file of its password."""

    user: str
    password_file: str
    tls_ca_file: str = ""
    """Whom to trust; empty: the server has no TLS, or a certificate that the system trusts."""
    hosts: tuple[str, ...] = ()
    """Names and addresses of this server besides those of loopback."""


class _Note(Struct, frozen=True, kw_only=True):
    login: LocalLogin
    pid: int
    started: str
    """The process' start in clock ticks since the boot, from /proc: a pid is given again to another
    process, this time is not."""


@contextlib.contextmanager
def announced_login(port: int, login: LocalLogin) -> Iterator[bool]:
    """Let commands find this login while the block runs.

    Return whether they will: a folder that is not ours alone is not written to.
    """
    folder = run_folder()
    note = _Note(login=login, pid=os.getpid(), started=process_start(os.getpid()))
    file = folder / port_name(port)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if objection_to_folder(folder.lstat()) or folder.is_symlink():
            yield False
            return
        unready = folder / f".{secrets.token_hex(4)}"
        unready.write_bytes(msgspec.json.encode(note))
        unready.replace(file)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            if _read(file) == note:
                file.unlink()


def find_login(url: str) -> LocalLogin | None:
    """Return the login for a server's URL.

    None when it is no server of ours on this machine that runs now, or the URL itself has a user.
    """
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        return None
    if "," in url or parts.username is not None:
        return None
    folder = run_folder()
    try:
        if objection_to_folder(folder.lstat()):
            return None
    except OSError:
        return None
    note = _read(folder / port_name(port))
    if note is None or not is_process(note.pid, note.started):
        return None
    host = parts.hostname or ""
    return note.login if _is_loopback(host) or host in note.login.hosts else None


def is_local(url: str) -> bool:
    """Say whether all servers of a setting `nats.url` are at this machine's loopback interface.

    >>> is_local("nats://127.0.0.1:4222,localhost"), is_local("tls://[::1]"), is_local("10.0.0.1"), is_local("nats://nats,nats://127.0.0.1")
    (True, True, False, False)
    """
    return all(
        _is_loopback(urlsplit(server if "://" in server else f"nats://{server}").hostname or "")
        for server in read_url(url)[0]
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_folder() -> Path:
    """Name the folder for files of this user's running processes.

    A caller first checks whether it is the user's alone.
    """
    return _PARENT / f"topobus-logins-{os.geteuid()}"


def port_name(port: int) -> str:
    """Give a name for a port of this machine."""
    # Each network namespace has ports of its own, while /tmp may be shared.
    return f"{Path('/proc/self/ns/net').stat().st_ino}-{port}"


def _read(file: Path) -> _Note | None:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as opened:
            return msgspec.json.decode(opened.read(65536), type=_Note)
    except (OSError, msgspec.DecodeError):
        return None
