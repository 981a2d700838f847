"""gRPC helpers of the simulator: dials a unix socket as kubelet does, formats errors as grpc-go
does, and owns tasks that end with their owner.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

__all__ = ["DialError", "Tasks", "deadline_of", "dial", "go_error", "is_socket", "outcome_of", "shown", "to_plain"]

_LARGE_BYTES = 64 * 1024
T = TypeVar("T")


class DialError(Exception):
    """Raised when a plugin's socket did not accept in time."""


class Tasks:
    """Background tasks of one owner. `close` cancels them all, waits, and raises the error of a
    task that died.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of this owner."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def close(self) -> None:
        """Cancel and wait. An error of a task is raised here, never lost."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def dial(path: Path, timeout_s: float) -> grpc.aio.Channel:
    """Open a channel and wait until the other side serves.

    Errors: raises DialError with kubelet's wording after `timeout_s`; the channel is closed then.
    """
    channel = grpc.aio.insecure_channel(
        f"unix:{path}",
        options=[
            # gRPC shares connections between channels of one process. kubelet dials each time, and
            # a removed socket must not answer.
            ("grpc.use_local_subchannel_pool", 1),
            # Without a limit, gRPC backs off up to two minutes between attempts and would
            # miss a socket that appears late.
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ],
    )
    try:
        # Not wait_for: until Python 3.12 it loses a cancellation that comes at the moment when the
        # wait is over, and `Tasks.close` would never end.
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except (TimeoutError, asyncio.CancelledError) as err:
        await channel.close()
        if isinstance(err, asyncio.CancelledError):
            raise
        raise DialError("context deadline exceeded") from err
    return channel


async def outcome_of(call: Awaitable[T]) -> T:
    """Await a call that another task may cut off by closing its channel, as kubelet closes a plugin
    that registers again.

    Errors: raises AioRpcError; grpc would raise the CancelledError that means the end of our own
    task.
    """
    try:
        return await call
    except asyncio.CancelledError as err:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        closed = grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="grpc: the client connection is closing",
        )
        raise closed from err


def go_error(err: grpc.aio.AioRpcError) -> str:
    """Word an RPC error as grpc-go does.

    >>> go_error(grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, details="no"))
    'rpc error: code = FailedPrecondition desc = no'
    """
    code = "".join(part.capitalize() for part in err.code().name.split("_")).replace("Cancelled", "Canceled")
    return f"rpc error: code = {code} desc = {err.details() or ''}"


def deadline_of(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return the time left for a gRPC call. None when the caller set no deadline.

    Units: seconds.
    """
    # The stubs declare a float, but at run time a call without a deadline gives None.
    left: float | None = context.time_remaining()
    return left


async def shown(message: Message) -> dict[str, Any]:
    """Return `to_plain` of a message.

    A large message is converted in a thread, because a list of thousands would block the other
    tasks of this loop.
    """
    return await asyncio.to_thread(to_plain, message) if message.ByteSize() > _LARGE_BYTES else to_plain(message)


def to_plain(message: Message) -> dict[str, Any]:
    """Turn a protobuf message into dicts, lists and scalars.

    Shapes: result — keys are the proto's field names (snake_case); fields at their default are left
    out.
    Units: 64-bit integers are text, as in protobuf's JSON.
    """
    plain: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return plain


def is_socket(path: Path) -> bool:
    """Say whether there is a unix socket at this path now."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False
