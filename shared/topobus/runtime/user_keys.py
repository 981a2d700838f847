"""Makes and keeps the passwords of a NATS server's users in files: at the first start, and never again.

Flows in: a folder, and the principals. Flows out: `<folder>/<principal>/password`, each in a folder of its own, so that each can be handed to its process alone. A
password appears whole or not at all, whenever this process is killed, and a later call makes only what is missing. Two that begin at the same time wait for each other at the
lock of each folder, and the second finds what the first made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from topobus.contracts.server_users import is_password
from topobus.domain.errors import ConfigError
from topobus.runtime.own_folder import objection_to_folder

__all__ = [
    "PASSWORD_FILE",
    "UNREADY",
    "locked",
    "make_folder",
    "make_passwords",
    "new_password",
    "password_file",
    "read_password",
    "remove_unready",
    "write_whole",
]

PASSWORD_FILE = "password"
UNREADY = ".unready-"
"""How the name of a file or folder begins that is not finished."""
# 128 random bits, as many as a key of AES-128 has.
_RANDOM_BYTES = 16
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def new_password() -> str:
    """Give a random password that a server's configuration and a URL take as it is."""
    return f"p{secrets.token_hex(_RANDOM_BYTES)}"


def password_file(folder: Path, principal: str) -> Path:
    """Name the file that holds a principal's password."""
    return folder / principal / PASSWORD_FILE


def make_passwords(folder: Path, principals: Sequence[str], *, is_for_group: bool = False) -> dict[str, str]:
    """Make the passwords that are missing; give all of them, by principal.

    Shapes: is_for_group — let the group of this process read them, for services that run as another user of that group.
    Errors: raises ConfigError for a folder that cannot be made or belongs to somebody else, and as `read_password` does.
    """
    make_folder(folder, is_for_group, is_shared=True)
    passwords = {}
    for principal in principals:
        make_folder(folder / principal, is_for_group)
        with locked(folder / principal):
            remove_unready(folder / principal)
            file = password_file(folder, principal)
            if not os.path.lexists(file):
                write_whole(file, f"{new_password()}\n", is_for_group=is_for_group)
            passwords[principal] = read_password(file)
    return passwords


def read_password(file: Path) -> str:
    """Read one password.

    Errors: raises ConfigError for a file that cannot be read, that others may read or change, or that holds no password of ours.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(4096).strip()
    except OSError as err:
        raise ConfigError(f"password: cannot read {file}: {err.strerror}", next_step="give this process the right to read it") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"password: {file} is no text", next_step=f"remove {file}: the next start makes another one") from err
    if mode & 0o027:
        raise ConfigError(
            f"password: {file} has mode {stat.S_IMODE(mode):o}: others may read or change it, wanted 600 (or 640)",
            next_step=f"chmod 600 {file}; if somebody may have read it, remove it: the next start makes another one",
        )
    if not is_password(text):
        raise ConfigError(
            f"password: {file} holds {len(text)} characters, wanted 16 to 128 letters and digits, a letter first",
            next_step=f"remove {file}: the next start makes another one",
        )
    return text


def write_whole(file: Path, text: str, *, is_for_group: bool = False, is_public: bool = False) -> None:
    """Write a file that nobody else can read (unless `is_public`), so that it is there whole or not at all, also after the power was cut.

    Errors: raises ConfigError when it cannot be written.
    """
    unready = file.with_name(f"{UNREADY}{file.name}-{secrets.token_hex(4)}")
    mode = 0o644 if is_public else 0o640 if is_for_group else 0o600
    try:
        handle = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as made:
            # Whatever the umask: the group may be who reads it.
            os.fchmod(made.fileno(), mode)
            made.write(text)
            made.flush()
            os.fsync(made.fileno())
        unready.replace(file)
        with _opened(file.parent) as folder:
            os.fsync(folder)
    except OSError as err:
        raise ConfigError(f"cannot write {file}: {err.strerror}", next_step="give a folder that can be written") from err


def make_folder(folder: Path, is_for_group: bool, *, is_shared: bool = False) -> None:
    """Make a folder that nobody else can enter. One that is there is made as narrow, unless it is shared by all users: their own folders in it are narrow."""
    mode = 0o750 if is_for_group else 0o700
    try:
        is_new = not folder.exists()
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with _opened(folder) as opened:
            objection = objection_to_folder(os.fstat(opened))
            if objection:
                raise ConfigError(
                    f"{folder} {objection}: whoever may write there could read what is secret in it",
                    next_step="give a folder of your own (chmod go-w)",
                )
            if is_new or not is_shared:
                # The umask may have taken the group's right; a new volume is open to all.
                os.fchmod(opened, mode)
                if is_for_group:
                    # To a group that it is in an owner may give anything, without any capability.
                    os.fchown(opened, -1, os.getegid())
    except OSError as err:
        raise ConfigError(f"cannot make the folder {folder}: {err.strerror}", next_step="give a folder that can be written") from err


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, _FOLDER_FLAGS)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; whoever holds it needs milliseconds, and the kernel frees it when that process ends."""
    with _opened(folder) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def remove_unready(folder: Path) -> None:
    """Remove what a killed start left half-written; under the lock nobody else is writing."""
    for path in folder.glob(f"{UNREADY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            path.unlink()
