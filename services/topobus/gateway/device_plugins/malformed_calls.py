"""Turns undecodable bytes, in calls to our sockets and in answers of kubelet and of plugins, into an
error and one log line.

A call gets INVALID_ARGUMENT. An answer of a plugin becomes a value instead of a message: gRPC itself
would log a traceback for each, as often as any process on the node likes. gRPC gives a client None
instead of the message, which becomes an error of the call where kubelet or a gateway answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from msgspec import Struct

from topobus.process.logging import get_logger
from topobus.process.tracing import entered

__all__ = ["Malformed", "MalformedAnswers", "MalformedCalls", "readable", "reading"]

Context = grpc.aio.ServicerContext[Any, Any]


class Malformed(Struct, frozen=True):
    """Describes undecodable bytes, in place of a message."""

    size_bytes: int
    why: str

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes cannot be read: {self.why}"


def reading(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a decoder so that it returns a `Malformed` for bytes that it cannot decode."""

    def careful(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as err:
            return Malformed(len(data), str(err))

    return careful


def readable(answer: Any) -> Any:
    """Return the answer of a call that gRPC could decode.

    Errors: raises AioRpcError for another one, as for any other failure of the call.
    """
    if answer is None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "its answer cannot be read")
    return answer


class MalformedAnswers(grpc.aio.UnaryUnaryClientInterceptor):
    """Raises the error of a call for an answer that gRPC could not decode."""

    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Pass the call on.

        Errors: raises AioRpcError, as `readable` does.
        """
        return readable(await (await continuation(client_call_details, request)))


class MalformedCalls(grpc.aio.ServerInterceptor):
    """Answers calls that cannot be read, and passes all others on."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Replace the method's decoder by ours. The API has only calls with one request."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None or handler.request_streaming:
            return handler
        method = str(handler_call_details.method)
        how = {
            "request_deserializer": reading(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(method, handler.unary_stream), **how)
        return grpc.unary_unary_rpc_method_handler(_call(method, handler.unary_unary), **how)


def _call(method: str, work: Any) -> Any:
    name = f"kubelet {method.rpartition('/')[2]}"

    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, Malformed):
            await _refuse(method, request, context)
        with entered(name, method=method):
            return await work(request, context)

    return call


def _stream(method: str, work: Any) -> Any:
    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, Malformed):
            await _refuse(method, request, context)
        async with aclosing(work(request, context)) as messages:
            async for message in messages:
                yield message

    return stream


async def _refuse(method: str, malformed: Malformed, context: Context) -> None:
    get_logger().warning("call.malformed", method=method, size_bytes=malformed.size_bytes, error=malformed.why)
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{method}: the request of {malformed.size_bytes} bytes cannot be read: {malformed.why}",
    )
