"""The certificate of a NATS server with TLS: why one is refused, that none ends a connection, and
what is told before one ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from support.gateway_rig import WatchedReadiness
from support.looks import until
from topobus.bus.bus import Bus
from topobus.bus.login.certificates import add_authority, certify, drop_old_authorities
from topobus.bus.server_config.nats_tls import server_tls
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock

pytestmark = pytest.mark.integration

# Ends only a test that waits for what never comes.
_LIMIT_S = 60.0
_LOOK_EVERY_S = 0.05
# How often the bus looks at a certificate that is about to end.
_LOOK_S = 6 * 3600.0
_EXPIRES = "topobus_bus_certificate_expiry_timestamp_seconds"


class _Secure:
    """A server whose certificate and authority stand in two folders."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.tls = folder / "tls"
        self.authority = folder / "authority"
        self._binary = binary
        self.server: NatsServer

    def certify(self, *names: str, ago: timedelta = timedelta(), is_renewal: bool = False) -> datetime:
        """Make a certificate as it would have been made a while ago; gives when it ends."""
        now = datetime.now(UTC) - ago
        return certify(self.tls, names, authority=self.authority, now=now, is_renewal=is_renewal).facts.not_after

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the server until the block ends."""
        async with NatsServer(binary=self._binary, config=server_tls(str(self.tls))) as self.server:
            yield

    def settings(self, host: str = "127.0.0.1", *, ca_file: Path | None = None) -> NatsSettings:
        """Connect to it by this name."""
        return NatsSettings(url=f"tls://{host}:{self.server.port}", tls_ca_file=str(ca_file or self.tls / "ca.crt"))

    async def reload(self, times: int) -> None:
        """Have it read its files again."""
        os.kill(self.server.pid, signal.SIGHUP)
        await until(lambda: self.server.read_log().count("Reloaded server configuration") >= times)


@pytest.fixture
def secure(tmp_path: Path, nats_binary: Path) -> _Secure:
    """A server that does not run yet, without a certificate."""
    return _Secure(tmp_path, nats_binary)


async def _refusal(settings: NatsSettings) -> str:
    """Give what the bus says while the server's certificate is refused."""
    readiness = WatchedReadiness()
    connecting = asyncio.create_task(Bus.connect(settings, name="topobus-cli", readiness=readiness))
    await readiness.until(
        lambda parts: "the certificate of the server" in parts.get("bus", "") or parts.get("bus") == "ready",
        timeout_s=_LIMIT_S,
    )
    said = readiness.report()["bus"]
    connecting.cancel()
    await asyncio.wait({connecting})
    return said


async def test_refusal_names_dates_names_and_signer_when_a_certificate_will_not_do(
    secure: _Secure, tmp_path: Path
) -> None:
    """Expired, not good yet, for another name, of another authority: each says what the server
    shows and what was wanted; nobody gets in.
    """
    # The authority must have been there before the oldest of its certificates.
    secure.certify("127.0.0.1", ago=timedelta(days=1000))
    other = tmp_path / "other"
    certify(other, ("127.0.0.1",), authority=tmp_path / "other-authority", now=datetime.now(UTC))
    said = {}
    async with secure.running():
        ended = secure.certify("127.0.0.1", ago=timedelta(days=400), is_renewal=True)
        await secure.reload(1)
        said["expired"] = await _refusal(secure.settings())
        secure.certify("127.0.0.1", ago=timedelta(days=-3), is_renewal=True)
        await secure.reload(2)
        said["early"] = await _refusal(secure.settings())
        secure.certify("hub.example.org", "10.1.2.3", is_renewal=True)
        await secure.reload(3)
        said["name"] = await _refusal(secure.settings("localhost"))
        said["address"] = await _refusal(secure.settings())
        said["authority"] = await _refusal(secure.settings(ca_file=other / "ca.crt"))

    assert (
        f"expired on {ended:%Y-%m-%d %H:%M} UTC (it was good from "
        f"{ended - timedelta(days=365, hours=1):%Y-%m-%d %H:%M} UTC)" in said["expired"]
    )
    assert f"is good from {datetime.now(UTC) + timedelta(days=3, hours=-1):%Y-%m-%d}" in said["early"]
    assert "is for 10.1.2.3, hub.example.org, and not for localhost" in said["name"]
    assert "is for 10.1.2.3, hub.example.org, and not for 127.0.0.1" in said["address"]
    assert re.search(
        rf"is signed by 'Topobus authority [0-9a-f]+', not trusted by {other}/ca.crt \(nats.tls_ca_file\): ",
        said["authority"],
    )


async def test_connection_lives_on_when_the_server_has_an_expired_certificate_by_now(secure: _Secure) -> None:
    """Whoever is connected stays so and is answered; whoever connects now is refused; with a good
    one again everybody comes in.
    """
    secure.certify("127.0.0.1", ago=timedelta(days=1000))
    secure.certify("127.0.0.1", is_renewal=True)
    registry = CollectorRegistry()
    async with secure.running(), asyncio.timeout(2 * _LIMIT_S), _session(secure, registry) as bus:
        secure.certify("127.0.0.1", ago=timedelta(days=400), is_renewal=True)
        await secure.reload(1)
        assert "expired on" in await _refusal(secure.settings())
        await bus._connection.barrier()
        secure.certify("127.0.0.1", is_renewal=True)
        await secure.reload(2)
        async with Bus.session(secure.settings(), name="topobus-cli") as later:
            assert later.is_connected

        assert _ended_by_server(registry) == 0
        assert bus.is_connected


async def test_services_come_back_when_certificate_and_authority_change_while_they_run(secure: _Secure) -> None:
    """In the manual's steps, with each connection lost after each step: a client reads the file of
    the authorities anew, and is never refused.
    """
    secure.certify("127.0.0.1", ago=timedelta(days=1))
    now = datetime.now(UTC)

    def renew() -> None:
        certify(secure.tls, (), authority=secure.authority, now=now, is_renewal=True)

    steps = (
        lambda: add_authority(secure.tls, authority=secure.authority, now=now),
        renew,
        lambda: drop_old_authorities(secure.tls, authority=secure.authority),
    )
    readiness = WatchedReadiness()
    with capture_logs() as logs:
        async with secure.running(), asyncio.timeout(2 * _LIMIT_S):
            bus = await Bus.connect(secure.settings(), name="topobus-cli", readiness=readiness)
            try:
                issuers = [_issuer(bus)]
                for number, step in enumerate(steps, start=1):
                    await asyncio.to_thread(step)
                    await secure.reload(number)
                    before = bus._connection.generation
                    bus._connection._lost.set()
                    await readiness.until(
                        lambda parts, before=before: bus._connection.generation > before and parts["bus"] == "ready",  # type: ignore[misc]
                        timeout_s=_LIMIT_S,
                    )
                    issuers.append(_issuer(bus))
            finally:
                await bus.close()

    assert issuers[0] == issuers[1] != issuers[2] == issuers[3]
    # A machine that is busy may let a connect wait; none is refused.
    assert [
        log["error"] for log in logs if log["event"] == "bus.waiting" and "certificate" in log["error"].lower()
    ] == []


@asynccontextmanager
async def _session(secure: _Secure, registry: CollectorRegistry) -> AsyncIterator[Bus]:
    bus = await Bus.connect(secure.settings(), name="topobus-cli", registry=registry)
    try:
        yield bus
    finally:
        await bus.close()


def _ended_by_server(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("topobus_bus_losses_total", {"reason": "closed"}) or 0


def _issuer(bus: Bus) -> str:
    assert bus.certificate is not None
    return bus.certificate.issuer


async def test_end_of_the_certificate_is_told_when_it_is_near(secure: _Secure) -> None:
    """The metric says when it ends.

    From 30 days before it is looked at what the server shows to new clients, so a renewed one ends
    the warnings without a new connection.
    """
    ends = secure.certify("127.0.0.1", ago=timedelta(days=340))
    clock, registry = ManualClock(datetime.now(UTC)), CollectorRegistry()
    with capture_logs() as logs:
        async with secure.running(), asyncio.timeout(_LIMIT_S):
            bus = await Bus.connect(secure.settings(), name="topobus-cli", clock=clock, registry=registry)
            try:
                at_first = registry.get_sample_value(_EXPIRES)
                await clock.asleep(_LOOK_S)
                clock.advance(_LOOK_S)
                await until(lambda: len(_warnings(logs)) >= 2)
                renewed = secure.certify("127.0.0.1", is_renewal=True)
                await secure.reload(1)
                await clock.asleep(_LOOK_S)
                clock.advance(_LOOK_S)
                await until(lambda: registry.get_sample_value(_EXPIRES) == renewed.timestamp())
                assert _ended_by_server(registry) == 0
            finally:
                await bus.close()

    assert at_first == ends.timestamp()
    assert {(warning["expires"], warning["days"]) for warning in _warnings(logs)} == {
        (f"{ends:%Y-%m-%d %H:%M} UTC", 24)
    }


def _warnings(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [log for log in logs if log["event"] == "bus.certificate-expiring"]
