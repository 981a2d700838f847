"""Connections of browsers: half a request has its time, a whole one has as long as its answer
takes.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from topobus.console.connections import HEAD_S, BoundedProtocol

pytestmark = pytest.mark.virtual_time

_HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class _Transport(asyncio.Transport):
    """Notes when it is ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def abort(self) -> None:
        self.ended.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return self.ended.is_set()

    write = pause_reading = resume_reading = close = mock.Mock()


async def _never(_scope: object, _receive: object, _send: object) -> None:
    await asyncio.Event().wait()


def _connected() -> tuple[BoundedProtocol, _Transport]:
    config = uvicorn.Config(_never, http=BoundedProtocol, lifespan="off", log_config=None)
    config.load()
    protocol, transport = BoundedProtocol(config, ServerState(), {}), _Transport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("sent", [b"", _HEAD[:20]], ids=["nothing", "half"])
async def test_connection_ends_when_a_requests_head_does_not_come_in_time(sent: bytes) -> None:
    """Bytes that come slowly do not make it later."""
    protocol, transport = _connected()
    began = protocol.loop.time()
    for byte in sent:
        protocol.data_received(bytes([byte]))

    await transport.ended.wait()

    assert protocol.loop.time() - began == pytest.approx(HEAD_S)
    assert protocol not in protocol.connections


async def test_connection_stays_when_its_request_is_whole() -> None:
    """What is answered may take as long as it takes: a stream lasts for days."""
    protocol, transport = _connected()
    protocol.data_received(_HEAD[:20])
    protocol.data_received(_HEAD[20:])

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10 * HEAD_S):
            await transport.ended.wait()

    assert protocol in protocol.connections
