"""Unix sockets: serve gRPC on one, notice when one is removed or replaced, and remove those that a
dead process left.

It also has the error boundary of every gRPC method.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from topobus.gateway.device_plugins.malformed_calls import MalformedAnswers, MalformedCalls
from topobus.gateway.metrics import CallMetrics
from topobus.process.broadcast import Broadcast
from topobus.process.clock import until_tick
from topobus.process.folder_events import FolderEvents
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable, TopobusError
from topobus.values.outcome import Refusal

__all__ = [
    "CallRefused",
    "FolderWatch",
    "answer",
    "dialling",
    "identity",
    "refuse",
    "remove_stale",
    "serving",
    "within",
]

T = TypeVar("T")

# A status is sent in a header, where one byte may be encoded as three, and gRPC begins to drop
# headers of 8 KiB. A longer text would hide the status itself.
_TEXT_LIMIT_BYTES = 2048


class CallRefused(Exception):
    """Raised inside a gRPC method for an answer that kubelet must get as an error."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def refuse(refusal: Refusal, doing: str) -> NoReturn:
    """Raise a refusal as the error of the call, with every reason in it.

    Errors: raises CallRefused.
    """
    raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, f"{doing}: {refusal.why}")


async def within(work: Awaitable[T], limit_s: float, what: str) -> T:
    """Do a call's work within our own deadline, because kubelet sets none or a longer one.

    Errors: raises CallRefused when the time is up.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as err:
        raise CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, f"{what} was not done within {limit_s:g} s") from err


async def answer(
    context: grpc.aio.ServicerContext[Any, Any],
    metrics: CallMetrics,
    method: str,
    device_class: str,
    work: Awaitable[T],
) -> T:
    """Run one gRPC method. Every error becomes a status with one clear sentence."""
    started = asyncio.get_running_loop().time()
    outcome = "ok"
    try:
        return await work
    except CallRefused as err:
        outcome, code, text = "refused", err.code, str(err)
    except PeerUnavailable as err:
        outcome, code, text = "unavailable", grpc.StatusCode.UNAVAILABLE, str(err)
    except TopobusError as err:
        outcome, code, text = "failed", grpc.StatusCode.INTERNAL, str(err)
        if not isinstance(err, ContractError):
            get_logger().error("call.failed", method=method, device_class=device_class, error=text)
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    except Exception as err:  # noqa: BLE001
        # boundary: gRPC servicer. An internal error must not end the stream of other calls.
        get_logger().exception("call.crashed", method=method, device_class=device_class)
        outcome, code, text = (
            "crashed",
            grpc.StatusCode.INTERNAL,
            f"topobus gateway: a bug in {method}: {type(err).__name__}: {err}",
        )
    finally:
        elapsed_s = asyncio.get_running_loop().time() - started
        metrics.calls_s.labels(method, device_class, outcome).observe(elapsed_s)
    if len(text.encode()) > _TEXT_LIMIT_BYTES:
        text = f"{text.encode()[:_TEXT_LIMIT_BYTES].decode(errors='ignore')} ..."
    get_logger().warning("call.refused", method=method, device_class=device_class, code=code.name, error=text)
    return await context.abort(code, text)


@asynccontextmanager
async def serving(path: Path, add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[None]:
    """Serve gRPC on a socket for the length of a block. The socket is removed at its end.

    Errors: raises ConfigError when the socket cannot be made.
    """
    server = grpc.aio.server(interceptors=[MalformedCalls()])
    add(server)
    try:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        own = identity(path)
    except (OSError, RuntimeError) as err:
        raise ConfigError(f"cannot listen on {path}: {err}", next_step="check the folder's rights") from err
    try:
        yield
    finally:
        # No grace: kubelet's streams never end by themselves.
        await server.stop(None)
        if identity(path) == own:
            # Another gateway may use this name by now, so only our own socket is removed.
            path.unlink(missing_ok=True)  # noqa: ASYNC240  (one unlink is shorter than a thread's start)


def dialling(path: Path, *, checks_answers: bool = True) -> grpc.aio.Channel:
    """Open a separate channel to a socket of kubelet.

    gRPC shares connections (and their back-off) between the channels of one process, while a
    restarted kubelet listens under the same name. An answer that cannot be decoded is an error of
    the call. A caller that checks each itself (`readable`) saves an interceptor's two tasks.
    """
    return grpc.aio.insecure_channel(
        f"unix:{path}",
        options=[("grpc.use_local_subchannel_pool", 1)],
        interceptors=[MalformedAnswers()] if checks_answers else None,
    )


def identity(path: Path) -> tuple[int, int, int] | None:
    """Return what distinguishes a socket from another one with the same name. None when there is
    none.

    It includes the time of change, because inode numbers are reused.
    """
    try:
        found_stat = path.lstat()
    except OSError:
        return None
    return (found_stat.st_dev, found_stat.st_ino, found_stat.st_ctime_ns) if stat.S_ISSOCK(found_stat.st_mode) else None


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove sockets of ours without a listener. One that answers belongs to a running gateway."""
    try:
        paths = [path for path in sorted(folder.glob(pattern)) if identity(path) is not None]
    except FileNotFoundError:
        # kubelet's folder is being replaced.
        return
    for path in paths:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                get_logger().info("socket.removed-stale", path=str(path))
            except OSError:
                # It may be busy or not accessible, so it stays.
                continue


class FolderWatch(Broadcast):
    """Wakes its waiters when a socket in a folder comes or goes, and every `watchdog_s`, because
    not every file system reports changes.
    """

    def __init__(self, folder: Path, watchdog_s: float) -> None:
        super().__init__()
        self.folder = folder
        self._watchdog_s = watchdog_s

    async def run(self) -> None:
        """Watch until cancelled. The folder may disappear and come back."""
        while True:
            try:
                # kubelet writes its checkpoint into the same folder at each admission.
                with FolderEvents(self.folder, suffix=".sock") as events:
                    is_there = True
                    while is_there:
                        # Announce once before the first wait, so that changes before the kernel
                        # watched are seen as well.
                        self.announce()
                        is_there = await self._changed(events)
            except (FileNotFoundError, NotADirectoryError):
                # The loop below opens the folder again.
                pass
            except OSError as err:
                get_logger().warning("folder.watch-failed", folder=str(self.folder), error=str(err))
            await asyncio.sleep(self._watchdog_s)
            self.announce()

    async def _changed(self, events: FolderEvents) -> bool:
        """Wait for the folder's next event, or for the watchdog. False when the folder is gone."""
        try:
            async with asyncio.timeout(until_tick(asyncio.get_running_loop().time(), self._watchdog_s)):
                return await events.next()
        except TimeoutError:
            return self.folder.is_dir()
