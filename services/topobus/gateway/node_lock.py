"""Lets only one gateway at a time work on a node: the one that holds the lock file beside the
checkpoint.

The others are on standby. Two working gateways would overwrite each other's checkpoint and forget
claims that containers use. The kernel frees the lock when its holder ends in any way. A standby
gateway reports ready as soon as it could take over, because a rolling update waits for that before
it ends the old one. A gateway that ends while another is on standby hands over: it frees the lock
first and keeps kubelet's device lists until the other has registered, so that kubelet sees no
device disappear. After it has freed the lock it writes nothing to the checkpoint.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError

__all__ = ["NodeLock", "open_node_lock"]

# In seconds. Claims wait while no gateway holds the lock, so this is the most that a roll-over
# costs. Two system calls each time are cheap.
_RETRY_S = 0.05
_LINE_LIMIT_BYTES = 128


class NodeLock:
    """This process's claim to the node lock: held, or waited for."""

    def __init__(self, path: Path, lock: int, queue: int, instance: str, readiness: Readiness) -> None:
        self.instance = instance
        """The name of this gateway's own sockets. It differs from the given one when the gateway
        that holds the lock has that name."""
        self._path = path
        self._lock = lock
        self._queue = queue
        self._readiness = readiness

    def try_begin(self) -> bool:
        """Take the lock if it is free."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._holder()[1] == self.instance:
                # Two gateways with one name would remove each other's sockets again and again.
                self.instance = f"{self.instance}-{uuid.uuid4().hex[:8]}".lstrip("-")
                get_logger().warning(
                    "instance.renamed",
                    instance=self.instance,
                    why="the gateway that has the turn goes by the name that was set",
                )
            return False
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {self.instance}".encode(), 0)
        except OSError as err:
            # On a full disk a standby gateway cannot read our name, but the lock stays ours: what
            # is prepared can still be answered and undone.
            get_logger().error("turn.unnamed", lock=str(self._path), error=str(err), next_step="make room on this disk")
        return True

    async def begin(self) -> None:
        """Wait for the lock, and log who holds it."""
        if self.try_begin():
            return
        # All waiting processes share this lock, so the holder can detect them.
        fcntl.flock(self._queue, fcntl.LOCK_SH)
        process = self._holder()[0]
        self._readiness.set(
            "lock", is_ready=True, why=f"standby: another gateway runs on this node (process {process})"
        )
        get_logger().warning(
            "twin.found", lock=str(self._path), process=process, next_step="this one waits until the other ends"
        )
        while not self.try_begin():  # noqa: ASYNC110  (the kernel does not report that a lock is free)
            await asyncio.sleep(_RETRY_S)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        get_logger().info("twin.gone", lock=str(self._path))
        self._readiness.set("lock", is_ready=True)

    def other_instance(self) -> str | None:
        """Return the instance that holds the lock. None when it left no name, or is this one."""
        process, instance = self._holder()
        return None if not process or instance == self.instance else instance

    def is_awaited(self) -> bool:
        """Return whether another process waits for the lock."""
        try:
            fcntl.flock(self._queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        return False

    def end(self) -> None:
        """Release the lock. The checkpoint is no longer ours.

        It does nothing a second time, or without the lock.
        """
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _holder(self) -> tuple[str, str]:
        process, _, instance = os.pread(self._lock, _LINE_LIMIT_BYTES, 0).decode("ascii", "replace").partition(" ")
        return process, instance


@contextmanager
def open_node_lock(checkpoint: Path, instance: str, readiness: Readiness) -> Iterator[NodeLock]:
    """Open this node's lock for the length of a block.

    Errors: raises ConfigError when the lock file cannot be created.
    """
    path = checkpoint.with_name(checkpoint.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        queue = os.open(path.with_suffix(".queue"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise ConfigError(
            f"gateway: checkpoint_path: cannot make {path}: {err.strerror}",
            next_step="set TOPOBUS_GATEWAY__CHECKPOINT_PATH",
        ) from err
    try:
        yield NodeLock(path, lock, queue, instance, readiness)
    finally:
        os.close(lock)
        os.close(queue)
