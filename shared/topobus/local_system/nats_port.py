"""Chooses the port of the NATS server that `topobus up` starts: the same again for the same state
folder, else the first free one of a short, fixed list.

No other `topobus up` of this user takes the port meanwhile. The server binds it a moment later.
Another program can be faster, and then the server logs that the port is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from topobus.local_system.nats_listening import free_to_listen
from topobus.process.own_folder import objection_to_folder
from topobus.simulation.nats_server import free_port

__all__ = ["PORTS", "reserved_port"]

PORTS = (4222, *range(4230, 4250))
"""NATS' own port, then twenty others that no well-known service has (IANA's list), so that an
`export` or a bookmark also works in the next run."""
# The same for all terminals of a user, whatever their TMPDIR. The folder in it is checked before it
# is used.
_PARENT = Path("/tmp")
_REMEMBERED = "nats-port"
_LOCK_FLAGS = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def reserved_port(state: Path, address: str) -> Iterator[int]:
    """Reserve a port for the block, and note it in the state folder for the next run."""
    with contextlib.ExitStack() as locks:
        port = (
            next((port for port in _wanted(state) if _is_free(address, port) and _lock(locks, port)), None)
            or free_port()
        )
        with contextlib.suppress(OSError):
            (state / _REMEMBERED).write_text(f"{port}\n", encoding="utf-8")
        yield port


def _wanted(state: Path) -> tuple[int, ...]:
    try:
        remembered = int((state / _REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return PORTS
    return (remembered, *PORTS) if 1024 <= remembered <= 65_535 else PORTS


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return free_to_listen(address, port)


def _lock(locks: contextlib.ExitStack, port: int) -> bool:
    """Lock the port against other runs of this user. The kernel frees the lock when this process
    ends.

    Where the folder cannot be used there is no lock.
    """
    folder = _PARENT / f"topobus-ports-{os.geteuid()}"
    # Each network namespace has ports of its own, while /tmp may be shared.
    name = f"{Path('/proc/self/ns/net').stat().st_ino}-{port}.lock"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or objection_to_folder(folder.lstat()):
            return True
        handle = os.open(folder / name, _LOCK_FLAGS, 0o600)
    except OSError:
        return True
    locks.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
