"""Creates and removes the folder in which a run of the whole system keeps its files, safely also
where every user may write.

Only this user can use the folder, and it is locked for the run. In a shared folder for temporary
files another user may have created anything under our names, links that lead elsewhere included. So
nothing is opened or deleted by a path that another user can change: the folder is opened once
without following links, must be ours and closed to others, and everything below it is reached
through that open folder.
Source: open(2) O_NOFOLLOW, openat(2), symlink(7).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from topobus.process.own_folder import objection_to_folder
from topobus.values.errors import ConfigError

__all__ = ["SOCKET_BYTES", "state_folder"]

# AF_UNIX paths end at 108 bytes (sun_path, unix(7)). This is the longest socket below a state
# folder, with room for a plugin's class name as the gateway leaves it; a longer path fails only at
# bind, so it is checked before anything starts.
_LONGEST_SOCKET = "kubelet/device-plugins/topobus-cccccccccccccccc-00000000-00.sock"
SOCKET_BYTES = 107
_SHORT_TMP = Path("/tmp")
_PREFIX = "topobus-"
# As tempfile.mkdtemp names them.
_FRESH = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_LOCK = "lock"
# The time between making a folder and locking it is much shorter.
_ABANDONED_AFTER_S = 60.0
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Does not wait for a writer where another user put a FIFO, and never truncates a file: a lock file
# has no content.
_LOCK_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def state_folder(wanted: Path | None) -> Iterator[Path]:
    """Provide the folder for a run: the requested one, kept afterwards, or else a fresh one that is
    removed afterwards.

    Errors: raises ConfigError when the folder is in use by another run, cannot be made, belongs to
    others or may be written by them, or is so deep that sockets would not fit.
    """
    if wanted is None:
        near = Path(tempfile.gettempdir())
        home = near if _has_room(near / f"{_PREFIX}12345678") else _SHORT_TMP
        _remove_abandoned(home)
        with _signals_as_interrupts():
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
            try:
                with _opened(made) as folder, _locked(folder):
                    yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)
        return
    path = wanted.absolute()
    if not _has_room(path):
        longest = len(os.fsencode(path / _LONGEST_SOCKET))
        raise ConfigError(
            f"--dir {path}: a socket below it would have a path of {longest} bytes, wanted at most {SOCKET_BYTES}",
            next_step="choose a shorter folder, such as ~/topobus",
        )
    with contextlib.ExitStack() as held:
        try:
            path.mkdir(parents=True, exist_ok=True)
            # A user may link to a folder of ours. The target must be safe.
            folder = held.enter_context(_opened(path.resolve()))
            objection = objection_to_folder(os.fstat(folder))
            if objection:
                raise ConfigError(
                    f"--dir {path} {objection}: a user who may write there could make it write to any of your files",
                    next_step="choose a folder of your own that only you may write to (chmod go-w)",
                )
            held.enter_context(_locked(folder))
        except BlockingIOError as err:
            raise ConfigError(
                f"--dir {path} is in use by another `topobus up`", next_step="stop that one, or choose another folder"
            ) from err
        except OSError as err:
            raise ConfigError(f"--dir {path}: {err.strerror}", next_step="choose a folder that can be written") from err
        yield path


@contextlib.contextmanager
def _opened(path: str | Path, *, below: int | None = None) -> Iterator[int]:
    """Hold a folder itself open. A link in its place is an OSError."""
    folder = os.open(path, _FOLDER_FLAGS, dir_fd=below)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(folder: int, *, older_than_s: float | None = None) -> Iterator[None]:
    """Hold the lock of an open folder. The kernel frees it when this process ends, however it ends.

    Shapes: older_than_s — take only a lock file that is there already, and so old.
    Errors: raises BlockingIOError when another process holds it, OSError when the file is no lock
    file of ours.
    """
    flags = _LOCK_FLAGS if older_than_s is not None else _LOCK_FLAGS | os.O_CREAT
    lock = os.open(_LOCK, flags, 0o600, dir_fd=folder)
    try:
        found_stat = os.fstat(lock)
        if not stat.S_ISREG(found_stat.st_mode) or found_stat.st_uid != os.geteuid():
            raise OSError(f"{_LOCK} in it is no file of yours")
        if older_than_s is not None and time.time() - found_stat.st_mtime < older_than_s:
            raise BlockingIOError("too young to be abandoned")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_abandoned(home: Path) -> None:
    """Remove fresh folders of runs that were killed before they could remove them: ours alone, old
    enough, with a lock that no process holds.
    """
    with contextlib.suppress(OSError), _opened(home.resolve()) as parent:
        for name in sorted(filter(_FRESH.fullmatch, os.listdir(parent))):  # noqa: PTH208 - of an open folder
            # Another process holds it, another run removes it at this moment, or it is none of
            # ours.
            with contextlib.suppress(OSError), _opened(name, below=parent) as folder:
                if not objection_to_folder(os.fstat(folder)):
                    with _locked(folder, older_than_s=_ABANDONED_AFTER_S):
                        _empty(folder)
                        os.rmdir(name, dir_fd=parent)


def _empty(folder: int) -> None:
    """Delete all that is in an open folder, and nothing behind links in it."""
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that files made before a loop runs
    are removed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signal_number: signal.signal(signal_number, signal.default_int_handler)
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _has_room(folder: Path) -> bool:
    return len(os.fsencode(folder / _LONGEST_SOCKET)) <= SOCKET_BYTES
