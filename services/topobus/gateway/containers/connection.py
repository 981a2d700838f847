"""One connection to a container runtime's NRI socket, with calls in both directions at the same
time.

When the connection ends, every waiting call ends as well. Only calls with one request and one
answer exist in NRI. A deadline that the caller sends is obeyed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from topobus.gateway.containers.frames import Channel, Demultiplexer, Message, MessageType, frames_of
from topobus.process.logging import get_logger
from topobus.runtimepb.ttrpc.v1 import api_pb2 as ttrpc
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["CallFailed", "RuntimeConnection", "StatusCode"]

_READ_BYTES = 256 * 1024


class StatusCode:
    """The gRPC status codes that are used here."""

    INVALID_ARGUMENT = 3
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallFailed(Exception):
    """Raised by a function that answers calls. The caller gets the code and the message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


Answerer = Callable[[str, str, bytes], Awaitable[bytes]]
"""Answers a call (service, method, request) with the answer's bytes. Raises CallFailed for an
answer that is an error."""


class RuntimeConnection:
    """Exchanges ttrpc calls in both directions over one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answerer) -> None:
        """Use a connected socket. Nothing is read before `run`."""
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._next_stream_id = 1
        self._waiting: dict[int, asyncio.Future[ttrpc.Response]] = {}
        self._is_over = False

    async def run(self) -> None:
        """Read and answer until the runtime closes the connection.

        Then every waiting call ends with PeerUnavailable.

        Errors: raises ContractError for bytes that are no frames.
        """
        demultiplexer = Demultiplexer()
        try:
            async with asyncio.TaskGroup() as answers:
                # Also an error that is no ConnectionError: see `_send`.
                with suppress(OSError):
                    while received := await self._reader.read(_READ_BYTES):
                        for message in demultiplexer.feed(received):
                            if message.type == MessageType.RESPONSE and message.channel == Channel.RUNTIME:
                                self._take_response(message)
                            elif message.type == MessageType.REQUEST and message.channel == Channel.PLUGIN:
                                answers.create_task(self._respond(message))
        finally:
            self._end()

    async def call(self, service: str, method: str, request: bytes, timeout_s: float) -> bytes:
        """Call the runtime.

        Errors: raises PeerUnavailable when the connection ends or no answer comes in time. The
        outcome is then unknown. Raises ContractError when the runtime answers with an error.
        """
        if self._is_over:
            raise PeerUnavailable(f"NRI: {method}: the connection to the container runtime has ended")
        stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
        envelope = ttrpc.Request(service=service, method=method, payload=request, timeout_nano=int(timeout_s * 1e9))
        response: asyncio.Future[ttrpc.Response] = asyncio.get_running_loop().create_future()
        self._waiting[stream_id] = response
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Message(Channel.RUNTIME, stream_id, MessageType.REQUEST, envelope.SerializeToString()))
                answer = await response
        except TimeoutError as err:
            raise PeerUnavailable(f"NRI: {method} was not answered within {timeout_s:g} s") from err
        finally:
            self._waiting.pop(stream_id, None)
        if answer.status.code:
            raise ContractError(
                f"NRI: {method}: the container runtime refuses: {answer.status.message}", code=answer.status.code
            )
        return answer.payload

    def _take_response(self, message: Message) -> None:
        response = self._waiting.get(message.stream_id)
        # Otherwise no call waits for it any more.
        if response is None or response.done():
            return
        try:
            response.set_result(ttrpc.Response.FromString(message.data))
        except DecodeError as err:
            response.set_exception(ContractError(f"NRI: an answer that is no ttrpc response: {err}"))

    async def _respond(self, message: Message) -> None:
        try:
            request = ttrpc.Request.FromString(message.data)
            limit_s = request.timeout_nano / 1e9 if request.timeout_nano > 0 else None
            async with asyncio.timeout(limit_s):
                answer = ttrpc.Response(payload=await self._answer(request.service, request.method, request.payload))
        except DecodeError as err:
            answer = _failed(StatusCode.INVALID_ARGUMENT, f"no ttrpc request: {err}")
        except CallFailed as err:
            answer = _failed(err.code, str(err))
        except TimeoutError:
            # The caller has given up by now.
            answer = _failed(StatusCode.UNAVAILABLE, "not answered in time")
        except Exception as err:  # noqa: BLE001
            # boundary: one call. An internal error must not end the connection, because that would
            # break the CPU promises to all other containers.
            get_logger().exception("nri-call.crashed")
            answer = _failed(StatusCode.INTERNAL, f"topobus gateway: a bug: {type(err).__name__}: {err}")
        with suppress(OSError):
            await self._send(
                Message(Channel.PLUGIN, message.stream_id, MessageType.RESPONSE, answer.SerializeToString())
            )

    async def _send(self, message: Message) -> None:
        # One write for each message, because pieces of two messages of one channel must not be
        # mixed. A runtime that accepts no connection has a full queue, and asyncio then takes the
        # socket for connected. Its first use fails with ENOTCONN, which is no ConnectionError.
        try:
            self._writer.write(frames_of(message))
            await self._writer.drain()
        except OSError as err:
            if message.type == MessageType.REQUEST:
                raise PeerUnavailable(f"NRI: the connection to the container runtime has ended: {err}") from err
            raise

    def _end(self) -> None:
        self._is_over = True
        for response in self._waiting.values():
            if not response.done():
                response.set_exception(
                    PeerUnavailable("NRI: the connection to the container runtime ended before the answer came")
                )
        self._writer.close()


def _failed(code: int, message: str) -> ttrpc.Response:
    return ttrpc.Response(status=ttrpc.Status(code=code, message=message))
