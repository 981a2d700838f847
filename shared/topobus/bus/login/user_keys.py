"""Makes and keeps the passwords of a NATS server's users in files: at the first start, and never
again.

The files are `<folder>/<principal>/password`, each in a folder of its own, so that each can be
given to its process alone. A password appears whole or not at all, whenever this process is killed,
and a later call makes only what is missing. Two processes that begin at the same time wait for each
other at the lock of each folder, and the second finds what the first made.
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

from topobus.bus.server_config.server_users import is_password, logins_of
from topobus.process.own_folder import objection_to_folder
from topobus.values.errors import ConfigError

__all__ = [
    "PASSWORD_FILE",
    "UNREADY",
    "change_password",
    "forget_previous",
    "locked",
    "login_text",
    "make_folder",
    "make_passwords",
    "new_password",
    "password_file",
    "read_logins",
    "read_password",
    "remove_unready",
    "split_login",
    "write_whole",
]

PASSWORD_FILE = "password"
_PREVIOUS = "previous"
UNREADY = ".unready-"
"""How the name of a file or folder begins that is not finished."""
# 128 random bits, as many as a key of AES-128 has.
_RANDOM_BYTES = 16
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def new_password() -> str:
    """Return a random password that fits into a server's configuration and a URL as it is."""
    return f"p{secrets.token_hex(_RANDOM_BYTES)}"


def password_file(folder: Path, principal: str) -> Path:
    """Name the file that holds a principal's password."""
    return folder / principal / PASSWORD_FILE


def make_passwords(folder: Path, principals: Sequence[str], *, is_for_group: bool = False) -> dict[str, str]:
    """Make the passwords that are missing.

    Return all that count, by login (`server_users.logins_of`): the principal's name, unless its
    password was changed with an overlap.

    Shapes: is_for_group — let the group of this process read them, for services that run as another
    user of that group.
    Errors: raises ConfigError for a folder that cannot be made or belongs to another user, and as
    `read_password` does.
    """
    make_folder(folder, is_for_group, is_shared=True)
    passwords: dict[str, str] = {}
    for principal in principals:
        make_folder(folder / principal, is_for_group)
        with locked(folder / principal):
            remove_unready(folder / principal)
            file = password_file(folder, principal)
            if not os.path.lexists(file):
                write_whole(file, f"{new_password()}\n", is_for_group=is_for_group)
            passwords |= read_logins(folder, principal)
    return passwords


def read_logins(folder: Path, principal: str) -> dict[str, str]:
    """Read the passwords of a principal that count, by login: the present one, and during a change
    the previous one.

    Errors: as `read_password`.
    """
    previous = folder / principal / _PREVIOUS
    files = (
        (previous, password_file(folder, principal))
        if os.path.lexists(previous)
        else (password_file(folder, principal),)
    )
    return dict(_read_login(file, principal) for file in files)


def change_password(folder: Path, principal: str, *, is_overlapping: bool, is_for_group: bool = False) -> None:
    """Give a principal another password. With `is_overlapping` the previous one counts as well
    until `forget_previous`.

    The server knows one password for each name, so the newer one belongs to the principal's other
    name, which precedes it in the file: `gpu__2:p…`.
    Errors: as `read_password`, and ConfigError when a file cannot be written.
    """
    file = password_file(folder, principal)
    login = principal
    if is_overlapping:
        (present, password), others = _read_login(file, principal), logins_of(principal)
        login = others[0] if present == others[1] else others[1]
        write_whole(
            folder / principal / _PREVIOUS, f"{login_text(principal, present, password)}\n", is_for_group=is_for_group
        )
    write_whole(file, f"{login_text(principal, login, new_password())}\n", is_for_group=is_for_group)
    if not is_overlapping:
        forget_previous(folder, principal)


def forget_previous(folder: Path, principal: str) -> bool:
    """End the validity of the previous password. True when there was one."""
    previous = folder / principal / _PREVIOUS
    had_one = os.path.lexists(previous)
    previous.unlink(missing_ok=True)
    return had_one


def split_login(user: str, text: str) -> tuple[str, str]:
    """Split a password file's text into login name and password. The second name of a user may
    precede the password in its file.

    >>> split_login("gpu", "gpu__2:secret"), split_login("gpu", "se:cret")
    (('gpu__2', 'secret'), ('gpu', 'se:cret'))
    """
    login, separator, password = text.partition(":")
    return (login, password) if separator and user and login == logins_of(user)[1] else (user, text)


def login_text(principal: str, login: str, password: str) -> str:
    """Write a password together with its login name, the inverse of `split_login`.

    >>> login_text("gpu", "gpu__2", "secret"), login_text("gpu", "gpu", "secret")
    ('gpu__2:secret', 'secret')
    """
    return password if login == principal else f"{login}:{password}"


def _read_login(file: Path, principal: str) -> tuple[str, str]:
    login, password = split_login(principal, _read_secret(file))
    if not is_password(password):
        raise ConfigError(
            f"password: {file} holds {len(password)} characters, wanted 16 to 128 letters and digits, a letter first",
            next_step=f"remove {file}: the next start makes another one",
        )
    return login, password


def read_password(file: Path) -> str:
    """Read one password from its file. The file's folder has the name of its user.

    Errors: raises ConfigError for a file that cannot be read, that others may read or change, or
    that holds no password of ours.
    """
    return _read_login(file, file.parent.name)[1]


def _read_secret(file: Path) -> str:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(4096).strip()
    except OSError as err:
        raise ConfigError(
            f"password: cannot read {file}: {err.strerror}", next_step="give this process the right to read it"
        ) from err
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"password: {file} is no text", next_step=f"remove {file}: the next start makes another one"
        ) from err
    if mode & 0o027:
        raise ConfigError(
            f"password: {file} has mode {stat.S_IMODE(mode):o}: others may read or change it, wanted 600 (or 640)",
            next_step=f"chmod 600 {file}; if somebody may have read it, remove it: the next start makes another one",
        )
    return text


def write_whole(file: Path, text: str, *, is_for_group: bool = False, is_public: bool = False) -> None:
    """Write a file that no other user can read (unless `is_public`), whole or not at all, also when
    the power is cut.

    Errors: raises ConfigError when it cannot be written.
    """
    unready = file.with_name(f"{UNREADY}{file.name}-{secrets.token_hex(4)}")
    mode = 0o644 if is_public else 0o640 if is_for_group else 0o600
    try:
        handle = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as made:
            # Whatever the umask, because the group may be the reader.
            os.fchmod(made.fileno(), mode)
            made.write(text)
            made.flush()
            os.fsync(made.fileno())
        unready.replace(file)
        with _opened(file.parent) as folder:
            os.fsync(folder)
    except OSError as err:
        raise ConfigError(
            f"cannot write {file}: {err.strerror}", next_step="give a folder that can be written"
        ) from err


def make_folder(folder: Path, is_for_group: bool, *, is_shared: bool = False) -> None:
    """Make a folder that no other user can enter.

    An existing folder gets the same narrow mode, unless it is shared by all users: their own
    folders in it are narrow.

    Errors: raises ConfigError for a folder that others can write, or that cannot be made.
    """
    mode = 0o750 if is_for_group else 0o700
    try:
        is_new = not folder.exists()
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with _opened(folder) as opened:
            objection = objection_to_folder(os.fstat(opened))
            if objection:
                raise ConfigError(
                    f"{folder} {objection}: a user who may write there could read the secrets in it",
                    next_step="give a folder of your own (chmod go-w)",
                )
            if is_new or not is_shared:
                # The umask may have taken the group's right; a new volume is open to all.
                os.fchmod(opened, mode)
                if is_for_group:
                    # An owner may give a file to a group that it is in, without any capability.
                    os.fchown(opened, -1, os.getegid())
    except OSError as err:
        raise ConfigError(
            f"cannot make the folder {folder}: {err.strerror}", next_step="give a folder that can be written"
        ) from err


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, _FOLDER_FLAGS)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    A holder needs milliseconds, and the kernel frees the lock when that process ends.
    """
    with _opened(folder) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def remove_unready(folder: Path) -> None:
    """Remove what a killed start left half-written. Under the lock no other process is writing."""
    for path in folder.glob(f"{UNREADY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            path.unlink()
