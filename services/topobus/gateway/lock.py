"""One gateway a node at a time: whoever holds the lock beside the checkpoint is the gateway, another one waits.

Two that ran together would replace each other's checkpoint and forget claims that containers use. The kernel frees the lock when its holder ends,
however it ends. A gateway that ends while another one waits hands over: it lets the lock go first and leaves kubelet's device lists up until the other
has registered, so that kubelet sees no device vanish. Nothing that writes the checkpoint runs then any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from topobus.domain.errors import ConfigError
from topobus.runtime.logging import get_logger
from topobus.runtime.readiness import Readiness

__all__ = ["Turn", "alone"]

# Claims cannot be prepared between two gateways, so this is what a roll-over costs at most; two system calls each time are nothing.
_RETRY_S = 0.05


class Turn:
    """This process's turn as the node's gateway."""

    def __init__(self, lock: int, queue: int) -> None:
        self._lock = lock
        self._queue = queue

    def is_awaited(self) -> bool:
        """Say whether another process waits for its turn."""
        try:
            fcntl.flock(self._queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        return False

    def end(self) -> None:
        """Let the next one go on; the checkpoint is no longer ours. A second time does nothing."""
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)


@asynccontextmanager
async def alone(checkpoint: Path, readiness: Readiness) -> AsyncIterator[Turn]:
    """Hold this node's gateway lock for the length of a block; waits, not ready and saying so, while another process holds it.

    Errors: raises ConfigError when the lock file cannot be made.
    """
    path = checkpoint.with_name(checkpoint.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Whoever waits shares this one, so the holder can tell.
        queue = os.open(path.with_suffix(".queue"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise ConfigError(
            f"gateway: checkpoint_path: cannot make {path}: {err.strerror}", next_step="set TOPOBUS_GATEWAY__CHECKPOINT_PATH"
        ) from err
    try:
        await _lock(file, queue, path, readiness)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield Turn(file, queue)
    finally:
        os.close(file)
        os.close(queue)


async def _lock(file: int, queue: int, path: Path, readiness: Readiness) -> None:
    is_said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_said:
                is_said = True
                fcntl.flock(queue, fcntl.LOCK_SH)
                holder = os.pread(file, 20, 0).decode("ascii", "replace") or "unknown"
                readiness.set("lock", is_ready=False, why=f"another gateway runs on this node (process {holder})")
                get_logger().warning("twin.found", lock=str(path), process=holder, next_step="this one waits until the other ends")
            await asyncio.sleep(_RETRY_S)
        else:
            if is_said:
                fcntl.flock(queue, fcntl.LOCK_UN)
                get_logger().info("twin.gone", lock=str(path))
                readiness.set("lock", is_ready=True)
            return
