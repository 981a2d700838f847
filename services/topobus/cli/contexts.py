"""Keeps a user's systems under names: one file each in the user's configuration folder, and the
name of the selected one.

A context records where a command connects, and as which user. It holds paths of password files,
never a password. One that `topobus up` wrote is running while the process that wrote it runs. After
that its port may belong to another program, so commands refuse it.

Source of the folder: XDG Base Directory Specification. Decision:
docs/adr/0061-contexts-name-systems.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from topobus.cli.exits import NotFoundError, UsageError
from topobus.process.own_folder import objection_to_folder
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree
from topobus.values.errors import ConfigError
from topobus.values.names import is_loopback

__all__ = [
    "DEFAULT_PORT",
    "Context",
    "ContextFolder",
    "ContextState",
    "announced_context",
    "check_name",
    "name_of_folder",
    "process_start",
]

DEFAULT_PORT = 4222
"""NATS' own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
# The name of a `topobus up` without --dir, whose folder has a random name.
_FRESH = "local"
_LARGEST_FILE = 65_536


class ContextState(StrEnum):
    """What is known of a context's system without a connection."""

    RUNNING = "running"
    """Its `topobus up` runs."""
    STOPPED = "stopped"
    """Its `topobus up` ended."""
    ADDED = "added"
    """A user added it. Only a connection shows whether it runs."""


class Context(Struct, frozen=True, kw_only=True):
    """Where a system is, and as which user to connect."""

    name: str
    nats: str
    """URL of its NATS server."""
    user: str = ""
    password_file: str = ""
    tls_ca_file: str = ""
    hosts: tuple[str, ...] = ()
    """Names and addresses of its server besides those of loopback and of `nats`."""
    node: str = ""
    """The node of a `topobus up`."""
    state_dir: str = ""
    """The state folder of the `topobus up` that wrote this. Empty for one that was added."""
    pid: int = 0
    """The process of that `topobus up`. 0 after its end."""
    started: str = ""
    """When that process began, as in /proc."""

    @property
    def state(self) -> ContextState:
        """Say whether its `topobus up` runs."""
        if not self.state_dir:
            return ContextState.ADDED
        is_running = _is_process(self.pid, self.started)
        return ContextState.RUNNING if is_running else ContextState.STOPPED


class ContextFolder:
    """The contexts of one user."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Find the folder. Nothing is created yet."""
        # The specification ignores a relative path.
        given = Path(environ.get("XDG_CONFIG_HOME", ""))
        self._root = (
            given if given.is_absolute() else Path(environ.get("HOME") or "/nonexistent") / ".config"
        ) / "topobus"
        self._files = self._root / "contexts"
        self._selected = self._root / "context"

    def all(self) -> tuple[Context, ...]:
        """Read all, by name.

        A file that cannot be read is left out, so that the others can still be used.
        """
        if not self._is_usable():
            return ()
        names = sorted(file.stem for file in self._files.glob("*.json") if _NAME.fullmatch(file.stem))
        return tuple(context for name in names if (context := self._read(name)) is not None)

    def get(self, name: str) -> Context | None:
        """Read one. None when there is none of this name."""
        return self._read(name) if _NAME.fullmatch(name) and self._is_usable() else None

    def named(self, name: str, source: str = "") -> Context:
        """Read the context that a user or a variable names.

        Shapes: source — where the name comes from, for the error.
        Errors: raises NotFoundError that lists those there are.
        """
        context = self.get(name)
        if context is None:
            names = ", ".join(other.name for other in self.all())
            raise NotFoundError(
                f"there is no context {name!r}{source and f' ({source})'}",
                next_step=f"known are {names}" if names else "`topobus up` makes one; `topobus context add` another",
            )
        return context

    def running_at(self, url: str) -> Context | None:
        """Find the `topobus up` of this user whose NATS server a URL means.

        None when no such server runs here now, or the URL names a user itself: another server may
        have the port, and would be sent a password that is not for it.
        """
        host, port, has_user = _server_of(url)
        if has_user or "," in url:
            return None
        for context in self.all():
            own_host, own_port, _ = _server_of(context.nats)
            is_same = host in (own_host, *context.hosts) or (is_loopback(host) and is_loopback(own_host))
            if context.state is ContextState.RUNNING and port == own_port and is_same and _is_near(context.pid):
                return context
        return None

    def selected(self) -> str:
        """Return the selected name. Empty: none."""
        if not self._is_usable():
            return ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = self._selected.read_text(encoding="utf-8").strip()
            return name if _NAME.fullmatch(name) else ""
        return ""

    def select(self, name: str) -> None:
        """Select the context that commands use without an option. Empty: none.

        Errors: raises ConfigError when it cannot be written.
        """
        with self._writing():
            if name:
                self._write(self._selected, f"{name}\n".encode())
            else:
                self._selected.unlink(missing_ok=True)

    def put(self, context: Context) -> None:
        """Write one, replacing another of the same name.

        Errors: raises ConfigError when it cannot be written.
        """
        with self._writing():
            self._write(self._files / f"{context.name}.json", msgspec.json.format(msgspec.json.encode(context)) + b"\n")

    def remove(self, name: str) -> None:
        """Remove one, and its selection.

        Errors: raises ConfigError when it cannot be removed.
        """
        with self._writing():
            (self._files / f"{name}.json").unlink(missing_ok=True)
        if self.selected() == name:
            self.select("")

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Lock the choice of a name for the block: two runs that start at the same moment would
        choose the same.

        Errors: raises ConfigError when the folder cannot be written.
        """
        with contextlib.ExitStack() as held:
            with self._writing():
                lock = os.open(
                    self._root / ".lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
                )
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def free_name(self, wanted: str, state_dir: str) -> str:
        """Return a name for the `topobus up` of a state folder: the wanted one, else with a number.

        A name is free when no context has it, when it is this folder's own from an earlier run, or
        when it is that of a stopped run whose folder is gone.

        Errors: raises ConfigError when all numbers are taken.
        """
        for name in (wanted, *(f"{wanted}-{number}" for number in range(2, 1000))):
            other = self.get(name)
            if other is None or (
                other.state is ContextState.STOPPED
                and (other.state_dir == state_dir or not Path(other.state_dir).is_dir())
            ):
                return name
        raise ConfigError(f"there are a thousand contexts named {wanted}", next_step="topobus context rm NAME…")

    def _is_usable(self) -> bool:
        """Say whether only this user can write the folder: a context that others can write may send
        a password anywhere.
        """
        try:
            return not objection_to_folder(self._files.stat())
        except OSError:
            return False

    def _read(self, name: str) -> Context | None:
        try:
            with (self._files / f"{name}.json").open("rb") as file:
                return msgspec.structs.replace(msgspec.json.decode(file.read(_LARGEST_FILE), type=Context), name=name)
        except (OSError, msgspec.DecodeError):
            return None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            if objection := objection_to_folder(self._files.stat()):
                raise ConfigError(
                    f"{self._files} {objection}: contexts there could send a password anywhere",
                    next_step="chmod go-w it",
                )
            yield
        except OSError as err:
            raise ConfigError(
                f"cannot write {self._root}: {err.strerror}", next_step="set XDG_CONFIG_HOME to a folder of yours"
            ) from err

    @staticmethod
    def _write(file: Path, content: bytes) -> None:
        unready = file.with_name(f".{secrets.token_hex(4)}")
        handle = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
        unready.replace(file)


def _server_of(url: str) -> tuple[str, int, bool]:
    """Read host and port of one server's URL, and whether it names a user. Port 0 is none."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        return parts.hostname or "", parts.port or DEFAULT_PORT, parts.username is not None
    except ValueError:
        return "", 0, False


def _is_near(pid: int) -> bool:
    """Say whether a process is in this network namespace: each has ports of its own."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return False


def check_name(name: str) -> str:
    """Check a context's name.

    Errors: raises UsageError for one that is no file name of letters, digits, `-`, `_` and `.`.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"a context's name: got {name!r}, wanted letters, digits, '-', '_' and '.'", next_step="topobus context ls"
        )
    return name


def name_of_folder(state: Path, *, is_kept: bool) -> str:
    """Return the name of a `topobus up` without a given one: its folder's.

    >>> name_of_folder(Path("/home/me/my lab"), is_kept=True), name_of_folder(Path("/tmp/topobus-x1y2z3a4"), is_kept=False)
    ('my-lab', 'local')
    """  # noqa: E501
    name = _NOT_IN_A_NAME.sub("-", state.name).strip("-._")[:60] if is_kept else _FRESH
    return name or _FRESH


@contextlib.contextmanager
def announced_context(folder: ContextFolder, context: Context, *, is_kept: bool) -> Iterator[bool]:
    """Keep a context for the run of a `topobus up`.

    Yields whether commands use it from now on without an option. It becomes the selected one unless
    the selected one runs or was added: a second system does not take over commands that use the
    first.
    Shapes: is_kept — the state folder outlives the run; then the context stays, marked as stopped.
    Errors: raises ConfigError when it cannot be written; a failure to remove it at the end is
    ignored.
    """
    context = msgspec.structs.replace(context, pid=os.getpid(), started=process_start(os.getpid()))
    folder.put(context)
    before = folder.get(folder.selected())
    if before is None or before.name == context.name or before.state is ContextState.STOPPED:
        folder.select(context.name)
    try:
        yield folder.selected() == context.name
    finally:
        # The user may have removed it, or written another of its name.
        if folder.get(context.name) == context:
            with contextlib.suppress(ConfigError):
                if is_kept:
                    folder.put(msgspec.structs.replace(context, pid=0, started=""))
                else:
                    folder.remove(context.name)


def _is_process(pid: int, started: str) -> bool:
    """Return whether the process of a note still runs."""
    return pid != 0 and started != "" and started == process_start(pid)


def process_start(pid: int) -> str:
    """Return when a process began, in clock ticks since the boot, and which boot.

    Empty when there is none. A process id is reused after a while, but this time only recurs after
    the next boot. Source: proc_pid_stat(5), field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return f"{text.rpartition(')')[2].split()[19]}@{read_boot_id(Tree())}"
