"""The NATS server of `topobus up --listen`: TLS by a certificate made on the spot, users, and a new
certificate while everybody stays connected.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from support.gateway_rig import WatchedReadiness
from support.launched_layout import launched_layout
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.bus.login.certificate_facts import parse_certificate
from topobus.bus.login.certificates import certify
from topobus.bus.server_config.inboxes import connection_name
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.cli.application import run
from topobus.local_system.nats_listening import LOOPBACK, Listening, NatsCertificate
from topobus.local_system.nats_store import probe_jetstream, size_store
from topobus.local_system.supervision import Supervisor
from topobus.local_system.system import Layout, System, start_nats
from topobus.process.config import NatsSettings
from topobus.values.errors import ConfigError

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_LOOK_EVERY_S = 0.05
_EVERYWHERE = Listening(address="0.0.0.0", names=("hub.example.org",))


@pytest.fixture
def layout(tmp_path: Path, nats_binary: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A state folder, and the server of this run as the one that is launched, at a port that no
    other test tries at the same moment.
    """
    return launched_layout(tmp_path, nats_binary, monkeypatch)


async def _launch(supervisor: Supervisor, layout: Layout) -> System:
    certificate = await asyncio.to_thread(NatsCertificate, _EVERYWHERE, layout.nats_tls, layout.authority)
    url = await start_nats(
        supervisor, layout, size_store(layout.nats), lambda _: None, is_open=False, certificate=certificate
    )
    return System(
        layout=layout,
        node="n1",
        nats_url=url,
        supervisor=supervisor,
        has_users=True,
        tls_ca_file=certificate.authority_file,
    )


async def _offered_end(system: System) -> int:
    """Give when the certificate ends that the server shows to whoever connects now, in seconds
    since 1970.

    It must be one that our clients trust.
    """
    reader, writer = await asyncio.open_connection(LOOPBACK, _port(system))
    try:
        await reader.readline()
        await writer.start_tls(ssl.create_default_context(cafile=system.tls_ca_file), server_hostname="hub.example.org")
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return int(parse_certificate(shown).not_after.timestamp())
    finally:
        writer.close()


def _port(system: System) -> int:
    return int(system.nats_url.rpartition(":")[2])


async def test_each_user_comes_in_by_tls_alone_when_the_server_is_reached_from_elsewhere(
    layout: Layout, tmp_path: Path
) -> None:
    """All users connect with what the first start made.

    A client without the authority, or without a login, does not; monitoring stays on loopback.
    """
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(2 * _LIMIT_S):
        system = await _launch(supervisor, layout)
        for principal in PRINCIPALS:
            async with Bus.session(system.settings_of(principal), name=connection_name(principal)) as bus:
                assert bus.is_encrypted
                assert bus.wants_login
        certify(tmp_path / "other", (LOOPBACK,), authority=tmp_path / "other-authority", now=datetime.now(UTC))
        cli = system.settings_of("cli")
        for settings, says in (
            (
                NatsSettings(
                    url=cli.url,
                    user="cli",
                    password_file=cli.password_file,
                    tls_ca_file=str(tmp_path / "other" / "ca.crt"),
                ),
                "certificate",
            ),
            (NatsSettings(url=cli.url, tls_ca_file=cli.tls_ca_file), "authorization violation"),
        ):
            assert says in await _refusal(settings)
        command = (await asyncio.to_thread(Path(f"/proc/{supervisor.status('nats').pid}/cmdline").read_text)).split(
            "\0"
        )

    assert command[command.index("-a") + 1] == "0.0.0.0"
    assert "-m" not in command
    assert f'http: "{LOOPBACK}:' in (layout.nats / "topobus-up.conf").read_text()


async def test_probe_looks_by_tls_when_the_server_has_it(layout: Layout, tmp_path: Path) -> None:
    """It says that the server stores, and not when it trusts another
    authority, or talks in clear.
    """
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(2 * _LIMIT_S):
        system = await _launch(supervisor, layout)
        text = (layout.nats / "topobus-up.conf").read_text()
        ports = _port(system), int(text.partition(f'http: "{LOOPBACK}:')[2].partition('"')[0])
        password = system.password_file("cli").read_text().strip()
        certify(tmp_path / "other", (LOOPBACK,), authority=tmp_path / "other-authority", now=datetime.now(UTC))

        look = partial(probe_jetstream, LOOPBACK, *ports, user="cli", password=password)
        # A look has a limit, which a busy machine can reach: whoever waits for a server looks again.
        while not await look(ca_file=system.tls_ca_file):
            await next_look()
        others = [await look(ca_file=ca_file) for ca_file in (str(tmp_path / "other" / "ca.crt"), None)]

    assert others == [False, False]


async def test_certificate_is_shown_to_new_clients_when_it_was_renewed_while_all_run(
    layout: Layout, tmp_path: Path
) -> None:
    """`topobus keys certify` is all: the server shows the new one, nobody's connection ends, and
    the process is the same.
    """
    # Made a day ago, so that the end of the next one is another.
    certify(
        layout.nats_tls,
        _EVERYWHERE.wanted_names(),
        authority=layout.authority,
        now=datetime.now(UTC) - timedelta(days=1),
    )
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(2 * _LIMIT_S):
        system = await _launch(supervisor, layout)
        before, pid = await _offered_end(system), supervisor.status("nats").pid
        registry = CollectorRegistry()
        bus = await Bus.connect(system.settings_of("cli"), name="topobus-cli", registry=registry)
        try:
            assert await asyncio.to_thread(run, ["keys", "certify", str(layout.nats_tls), "--renew"]) == 0
            while await _offered_end(system) == before:
                await next_look()
            await bus._connection.barrier()
            assert not registry.get_sample_value("topobus_bus_losses_total", {"reason": "closed"})
        finally:
            await bus.close()
        assert supervisor.status("nats").pid == pid


async def test_start_is_refused_when_the_certificate_of_somebody_else_expired(layout: Layout, tmp_path: Path) -> None:
    """The error says when; the folder stays as it is, and no server is started."""
    now = datetime.now(UTC)
    certify(layout.nats_tls, ("gpu1.example.org",), authority=tmp_path / "theirs", now=now - timedelta(days=400))
    before = (layout.nats_tls / "tls.crt").read_bytes()

    with pytest.raises(ConfigError, match=f"expired on {now - timedelta(days=35):%Y-%m-%d}"):
        NatsCertificate(_EVERYWHERE, layout.nats_tls, layout.authority)
    assert (layout.nats_tls / "tls.crt").read_bytes() == before


async def _refusal(settings: NatsSettings) -> str:
    """Give what the bus says while it is not let in."""
    readiness = WatchedReadiness()
    connecting = asyncio.create_task(Bus.connect(settings, name="topobus-cli", readiness=readiness))
    await readiness.until(
        lambda parts: any(word in parts.get("bus", "").lower() for word in ("certificate", "authorization")),
        timeout_s=_LIMIT_S,
    )
    assert not readiness.is_ready
    said = readiness.report()["bus"].lower()
    connecting.cancel()
    await asyncio.wait({connecting})
    return said
