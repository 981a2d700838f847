"""TLS that is wanted is not to be talked out of: a server, or somebody before it, without TLS is
sent nothing, and learns no password.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from support.gateway_rig import WatchedReadiness
from support.tls_front import Authority
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_LIMIT_S = 30.0
_PASSWORD = "topsecretpw"


class _FakeServer:
    """Greets without a word of TLS, and keeps all that it is sent."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting
        self.port = 0
        self.received = io.BytesIO()
        self.left: asyncio.Queue[None] = asyncio.Queue()
        """One entry for each client that went away."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Greet, and take in everything until the client leaves.

        Answer a PING as a server would, so that a client goes on.
        """
        writer.write(self._greeting.replace("PORT", str(self.port)).encode())
        with suppress(OSError):
            while data := await reader.read(65536):
                self.received.write(data)
                if b"PING" in data:
                    writer.write(b"PONG\r\n")
        writer.close()
        self.left.put_nowait(None)


@asynccontextmanager
async def _fake_server(greeting: str) -> AsyncIterator[_FakeServer]:
    fake = _FakeServer(greeting)
    listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = listening.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        listening.close()


_PLAIN = 'INFO {"server_id":"X","version":"2.9.10","headers":true,"max_payload":1048576}\r\n'
_PLAIN_WITH_OTHERS = _PLAIN.replace("}", ',"connect_urls":["127.0.0.1:PORT","127.0.0.1:PORT"],"auth_required":true}')
_LATE_TLS = _PLAIN.replace("}", ',"tls_available":true}')


@pytest.mark.parametrize(
    "greeting",
    [_PLAIN, _PLAIN_WITH_OTHERS, _LATE_TLS],
    ids=["no-word-of-tls", "names-other-servers", "tls-only-available"],
)
@pytest.mark.parametrize(
    ("url", "has_ca"),
    [
        ("tls://127.0.0.1:PORT", False),
        ("tls://cli:topsecretpw@127.0.0.1:PORT", False),
        ("nats://127.0.0.1:PORT", True),
        ("tls://127.0.0.1:PORT,nats://127.0.0.1:PORT", False),
    ],
    ids=["tls-url", "password-in-url", "ca-set", "one-of-several"],
)
async def test_password_is_not_sent_when_the_server_offers_no_tls(
    tmp_path: Path, greeting: str, url: str, has_ca: bool
) -> None:
    """Not one byte goes to a server whose greeting leaves TLS out, at the first connect and at the
    next ones.

    The error says why.
    """
    (tmp_path / "password").write_text(_PASSWORD)
    ca_file = str(Authority(tmp_path / "ca").own.certificate) if has_ca else ""
    readiness = WatchedReadiness()
    async with _fake_server(greeting) as fake:
        settings = NatsSettings(
            url=url.replace("PORT", str(fake.port)),
            user="cli",
            password_file=str(tmp_path / "password"),
            tls_ca_file=ca_file,
        )
        connecting = asyncio.create_task(Bus.connect(settings, name="topobus-cli", readiness=readiness))
        async with asyncio.timeout(_LIMIT_S):
            for _ in range(3):
                await fake.left.get()
            await readiness.until(lambda parts: "offers no TLS" in parts.get("bus", ""))
            bus = readiness.report()["bus"]
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting

    assert fake.received.getvalue() == b""
    assert f"127.0.0.1:{fake.port} offers no TLS" in bus
    assert _PASSWORD not in bus


@pytest.mark.parametrize(
    "greeting",
    [
        "INFO " + "x" * 300_000,
        "INFO []\r\n",
        "INFO 5\r\n",
        _PLAIN.replace("}", ',"connect_urls":["[::1"]}'),
        "SSH-2.0-x\r\n",
    ],
    ids=["endless line", "a list", "a number", "a wrong address", "another protocol"],
)
async def test_greeting_of_another_program_is_waited_out(greeting: str) -> None:
    """What listens at the address for a while, when a server is replaced, never ends a process."""
    readiness = WatchedReadiness()
    async with _fake_server(greeting) as fake:
        settings = NatsSettings(url=f"nats://127.0.0.1:{fake.port}")
        connecting = asyncio.create_task(Bus.connect(settings, name="topobus-cli", readiness=readiness))
        async with asyncio.timeout(_LIMIT_S):
            for _ in range(3):
                await fake.left.get()
        is_waiting = not connecting.done()
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting

    assert is_waiting
    assert "waiting for NATS" in readiness.report()["bus"]


async def test_bus_does_not_connect_when_a_plain_server_stands_behind_a_tls_url(nats_binary: Path) -> None:
    """A real server without TLS is not used when TLS was asked for."""
    async with NatsServer(binary=nats_binary) as server:
        readiness = WatchedReadiness()
        connecting = asyncio.create_task(
            Bus.connect(
                NatsSettings(url=server.url.replace("nats://", "tls://")), name="topobus-cli", readiness=readiness
            )
        )
        async with asyncio.timeout(_LIMIT_S):
            await readiness.until(lambda parts: "offers no TLS" in parts.get("bus", ""))
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting

        assert not readiness.is_ready


async def test_bus_connects_when_the_server_has_tls(nats_binary: Path, tmp_path: Path) -> None:
    """With the server's authority trusted, a user and a password, the connection is made and
    messages come back.

    Another authority is refused.
    """
    authority = Authority(tmp_path / "ca")
    issued = authority.issue("server")
    (tmp_path / "password").write_text(_PASSWORD)
    config = f"""
        tls {{ cert_file: "{issued.certificate}", key_file: "{issued.key}" }}
        authorization {{ users: [ {{ user: u, password: {_PASSWORD} }} ] }}
    """
    async with NatsServer(binary=nats_binary, config=config) as server:
        for scheme in ("tls", "nats"):
            settings = NatsSettings(
                url=server.url.replace("nats://", f"{scheme}://"),
                user="u",
                password_file=str(tmp_path / "password"),
                tls_ca_file=str(authority.own.certificate),
            )
            async with asyncio.timeout(_LIMIT_S), Bus.session(settings, name="topobus-cli") as bus:
                assert bus.is_connected
        other = Authority(tmp_path / "other").own.certificate
        settings = NatsSettings(
            url=server.url, user="u", password_file=str(tmp_path / "password"), tls_ca_file=str(other)
        )
        readiness = WatchedReadiness()
        connecting = asyncio.create_task(Bus.connect(settings, name="topobus-cli", readiness=readiness))
        async with asyncio.timeout(_LIMIT_S):
            await readiness.until(lambda parts: "certificate" in parts.get("bus", "").lower())
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting

        assert not readiness.is_ready
