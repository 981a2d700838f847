"""HTTP/1.1 for the API server simulator: the subset that Kubernetes clients use, on asyncio
streams.

A connection gives requests one after another, and takes answers with a body, or a stream of JSON
lines in chunks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from topobus.testing.apiserver.values import ApiError, bad_request

__all__ = ["Connection", "HttpRequest"]

_REASONS = {
    200: "OK",
    201: "Created",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    409: "Conflict",
    410: "Gone",
    422: "Unprocessable Entity",
}
# A slice of 128 devices is some 100 KiB; etcd takes 1.5 MiB.
_BODY_LIMIT = 3 * 1024 * 1024


class HttpRequest(Struct, frozen=True, kw_only=True):
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""

    def json(self) -> Any:
        """Read the body. An empty one is nothing.

        Errors: raises ApiError 400 when it is no JSON, 415 when its header names another type.
        """
        if not self.body:
            return None
        if "protobuf" in self.headers.get("content-type", ""):
            raise ApiError(
                415,
                "UnsupportedMediaType",
                "this simulator takes JSON alone; send objects by `kubectl apply -f`, or ask for JSON",
            )
        try:
            return json.loads(self.body)
        except ValueError as err:
            raise bad_request(f"couldn't get version/kind; json parse error: {err}") from err


class Connection:
    """One client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> HttpRequest | None:
        """Read the next request. None when the client is done.

        Errors: raises ApiError for a malformed request.
        """
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        headers = {
            key.strip().lower(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon
        }
        length = int(headers.get("content-length", "0"))
        if length > _BODY_LIMIT:
            raise ApiError(413, "RequestEntityTooLarge", f"limit is {_BODY_LIMIT}")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._read_chunks()
        else:
            body = await self._reader.readexactly(length)
        parts = urlsplit(rest.rpartition(" ")[0])
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return HttpRequest(method=method, path=unquote(parts.path), query=query, headers=headers, body=body)

    async def answer(self, code: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON answer. A text is sent as it is."""
        is_text = isinstance(body, str)
        data = body.encode() if is_text else json.dumps(body, separators=(",", ":")).encode()
        head = {
            "Content-Type": "text/plain; charset=utf-8" if is_text else "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }
        self._writer.write(_head(code, head) + data)
        await self._writer.drain()

    async def begin_stream(self) -> None:
        """Begin an answer of JSON lines."""
        self._writer.write(_head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}))
        await self._writer.drain()

    async def send_line(self, body: Any) -> None:
        """Send one line of the stream."""
        data = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def end_stream(self) -> None:
        """End the stream in order. The connection can take another request."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def wait_closed_by_client(self) -> None:
        """Return when the client has gone. It sends nothing while it reads a stream."""
        while await self._reader.read(4096):
            pass

    async def close(self) -> None:
        """Close."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except (ConnectionError, asyncio.CancelledError):
            # The client has gone, or the loop ends: asyncio's stream callback would write a
            # traceback for a connection that is over either way.
            return

    async def _read_chunks(self) -> bytes:
        body = b""
        while size := int((await self._reader.readline()).split(b";")[0], 16):
            body += await self._reader.readexactly(size)
            await self._reader.readline()
        await self._reader.readline()
        return body


def _head(code: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {code} {_REASONS.get(code, 'Status')}", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
