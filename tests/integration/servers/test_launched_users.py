"""The NATS server that `topobus up` starts: with users whose passwords are made at the first start,
or open when that is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from integration.values import health
from support.gateway_rig import WatchedReadiness
from support.launched_layout import launched_layout
from support.reading import Reader
from topobus.bus.bus import Bus
from topobus.bus.server_config.inboxes import connection_name
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.cli.application import run
from topobus.formats.messages.catalogue import HEALTH, MACHINE
from topobus.local_system.nats_store import probe_jetstream, size_store
from topobus.local_system.supervision import Supervisor
from topobus.local_system.system import Layout, System, start_nats
from topobus.process.config import NatsSettings
from topobus.values.errors import ConfigError
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "health_subscriber.py"


@pytest.fixture
def layout(tmp_path: Path, nats_binary: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A state folder, and the server of this run as the one that is launched, at a port that no
    other test tries at the same moment.
    """
    return launched_layout(tmp_path, nats_binary, monkeypatch)


async def _launch(supervisor: Supervisor, layout: Layout, *, is_open: bool) -> System:
    url = await start_nats(supervisor, layout, size_store(layout.nats), lambda _: None, is_open=is_open)
    return System(layout=layout, node="n1", nats_url=url, supervisor=supervisor, has_users=not is_open)


async def test_each_user_is_let_in_when_it_has_its_own_password(layout: Layout, tmp_path: Path) -> None:
    """All users connect with the passwords of the first start, also after a second one.

    The provisioner makes the streams; nobody comes in with another's.
    """
    for _ in range(2):
        async with Supervisor(tmp_path / "logs") as supervisor:
            system = await _launch(supervisor, layout, is_open=False)
            async with asyncio.timeout(_LIMIT_S):
                async with Bus.session(system.settings_of("controller"), name="controller") as bus:
                    await bus.provision()
                    assert bus.wants_login
                for principal in PRINCIPALS:
                    async with Bus.session(system.settings_of(principal), name=connection_name(principal)) as bus:
                        assert bus.is_connected
                assert await _is_refused(
                    NatsSettings(url=system.nats_url, user="gpu", password_file=str(system.password_file("nic")))
                )
                assert await _is_refused(NatsSettings(url=system.nats_url))
    modes = {
        path.stat().st_mode & 0o777 for path in (layout.nats / "topobus-up.conf", *layout.nats_users.glob("*/password"))
    }
    assert modes == {0o600}


async def test_ledger_is_there_when_the_next_start_has_other_users(layout: Layout, tmp_path: Path) -> None:
    """What a server without accounts stored is that of the account with the streams afterwards, and
    the other way round: nobody begins with an empty ledger.
    """
    machine = Machine(node="n1", numa_nodes=(), cpus=())
    async with Supervisor(tmp_path / "open") as supervisor, asyncio.timeout(_LIMIT_S):
        system = await _launch(supervisor, layout, is_open=True)
        async with Bus.session(system.settings_of("discovery"), name="discovery") as bus:
            await bus.provision()
            written = await bus.put(MACHINE, machine, node="n1")
    for is_open in (False, True, False):
        async with Supervisor(tmp_path / f"later-{is_open}") as supervisor, asyncio.timeout(_LIMIT_S):
            system = await _launch(supervisor, layout, is_open=is_open)
            async with Bus.session(system.settings_of("controller"), name="controller") as bus:
                await bus.provision()
            # Behind its account a device service reads the same streams.
            async with Bus.session(system.settings_of("gpu"), name="gpu") as bus:
                await bus.provision()
                entry = await bus.get(MACHINE, node="n1")
            assert entry is not None
            assert (entry.value, entry.revision) == (machine, written)


async def test_start_is_refused_when_two_accounts_have_streams(layout: Layout, tmp_path: Path) -> None:
    """Two ledgers: nobody starts on one of them without saying which."""
    for is_open in (True, False):
        async with Supervisor(tmp_path / f"logs-{is_open}") as supervisor, asyncio.timeout(_LIMIT_S):
            system = await _launch(supervisor, layout, is_open=is_open)
            async with Bus.session(system.settings_of("controller"), name="controller") as bus:
                await bus.provision()
        if is_open:
            (layout.nats / "jetstream" / "$G").rename(tmp_path / "older")
    (tmp_path / "older").rename(layout.nats / "jetstream" / "$G")

    async with Supervisor(tmp_path / "logs") as supervisor:
        with pytest.raises(ConfigError, match="streams of two accounts"):
            await _launch(supervisor, layout, is_open=False)


async def test_subscriber_is_answered_at_one_name_whatever_users_the_server_has(layout: Layout, tmp_path: Path) -> None:
    """The documented example, with what `topobus up` prints for it and nothing else, reads health
    with accounts, and from an open server.
    """
    for is_open in (False, True):
        async with Supervisor(tmp_path / f"logs-{is_open}") as supervisor, asyncio.timeout(_LIMIT_S):
            system = await _launch(supervisor, layout, is_open=is_open)
            async with Bus.session(system.settings_of("controller"), name="controller") as bus:
                await bus.provision()
            async with Bus.session(system.settings_of("gpu"), name="gpu") as bus:
                await bus.publish(
                    HEALTH, health(1), event_id=f"first-{is_open}", node="n1", device_class="gpu", device="gpu-0"
                )
                login = "" if is_open else f"user:{system.password_file('user').read_text().strip()}@"
                program = await asyncio.create_subprocess_exec(
                    sys.executable,
                    str(_EXAMPLE),
                    env={"PATH": os.environ["PATH"], "NATS_URL": system.nats_url.replace("nats://", f"nats://{login}")},
                    stdout=asyncio.subprocess.PIPE,
                )
                try:
                    assert program.stdout is not None
                    generations = [json.loads(await program.stdout.readline())["generation"]]
                    await bus.publish(
                        HEALTH, health(2), event_id=f"second-{is_open}", node="n1", device_class="gpu", device="gpu-0"
                    )
                    generations.append(json.loads(await program.stdout.readline())["generation"])
                finally:
                    program.kill()
                    await program.wait()

            assert generations == [1, 2]


async def test_everybody_is_let_in_when_the_server_is_open(layout: Layout, tmp_path: Path) -> None:
    """As before there were users: any name may make the streams and write; no password is made."""
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(_LIMIT_S):
        system = await _launch(supervisor, layout, is_open=True)
        async with Bus.session(system.settings_of("cli"), name="anybody") as bus:
            await bus.provision()
            await bus.put(MACHINE, Machine(node="n1", numa_nodes=(), cpus=()), node="n1")
            assert not bus.wants_login
            async with Reader(bus.watch(MACHINE)) as changes:
                await changes.until(lambda items: any(change.parts.get("node") == "n1" for change in items))

        assert await _argument(supervisor, "-a") == "127.0.0.1"
    assert not layout.nats_users.exists()


async def test_password_is_taken_over_when_it_changes_while_all_run(layout: Layout, tmp_path: Path) -> None:
    """After `topobus keys rotate` the user comes back by itself with what stands in its file, the
    server ends no other's connection and is not started anew.
    """
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(_LIMIT_S):
        system = await _launch(supervisor, layout, is_open=False)
        before = system.password_file("gpu").read_text()
        (tmp_path / "old").write_text(before)
        readiness = WatchedReadiness()
        gpu = await Bus.connect(system.settings_of("gpu"), name="gpu", readiness=readiness)
        nic = await Bus.connect(system.settings_of("nic"), name="nic")
        try:
            assert await asyncio.to_thread(run, ["keys", "rotate", str(layout.nats_users), "gpu"]) == 0
            await readiness.until(
                lambda parts: gpu._connection.generation > 1 and parts["bus"] == "ready", timeout_s=_LIMIT_S
            )

            assert await _is_refused(NatsSettings(url=system.nats_url, user="gpu", password_file=str(tmp_path / "old")))
        finally:
            await gpu.close()
            await nic.close()
        log = (tmp_path / "logs" / "nats.log").read_text()
    assert system.password_file("gpu").read_text() != before
    assert "Reloaded server configuration" in log
    # The server names each whose connection it ends.
    assert 'authentication error - User "gpu"' in log
    assert 'User "nic"' not in log


async def test_probe_fails_when_its_login_is_wrong(layout: Layout, tmp_path: Path) -> None:
    """A server that does not let the launcher in is not taken for one that stores."""
    async with Supervisor(tmp_path / "logs") as supervisor:
        system = await _launch(supervisor, layout, is_open=False)
        ports = int(await _argument(supervisor, "-p")), int(await _argument(supervisor, "-m"))
        password = system.password_file("cli").read_text().strip()

        assert await probe_jetstream("127.0.0.1", *ports, user="cli", password=password)
        assert not await probe_jetstream("127.0.0.1", *ports, user="cli", password=f"{password}0")
        assert not await probe_jetstream("127.0.0.1", *ports)


async def _is_refused(settings: NatsSettings) -> bool:
    """Say whether the server does not let this login in, by what the bus
    says of it while it waits.
    """
    readiness = WatchedReadiness()
    connecting = asyncio.create_task(Bus.connect(settings, name="gpu", readiness=readiness))
    await readiness.until(
        lambda parts: parts.get("bus") == "ready" or "authorization violation" in parts.get("bus", "").lower(),
        timeout_s=_LIMIT_S,
    )
    is_refused = not readiness.is_ready
    connecting.cancel()
    await asyncio.wait({connecting})
    return is_refused


async def _argument(supervisor: Supervisor, option: str) -> str:
    """Give what the launched server was told on its command line, which wins over any
    configuration.
    """
    command = await asyncio.to_thread(Path(f"/proc/{supervisor.status('nats').pid}/cmdline").read_text)
    arguments = command.split("\0")
    assert arguments.count(option) == 1
    return arguments[arguments.index(option) + 1]
