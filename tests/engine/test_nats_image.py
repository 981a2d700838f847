"""NATS as a container: three versions with the accounts that are shipped, and what `topobus up`
falls back to without a nats-server.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import pytest_asyncio
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from docpages.samples import sample
from engine.conftest import Images
from engine.engine import ROOT, EngineUnavailable, nats_program, program_image
from support.account_nats import ZONES, AccountNats, subject_of
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_accounts_config import render_passwords
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.streams.state import Conflict, Written
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import EVENTS, FORGETTER, HEALTH, HINT, LEDGER, MACHINE, STATES
from topobus.health import follow
from topobus.process.config import NatsSettings
from topobus.simulation.nats_provider import NatsProgram
from topobus.simulation.nats_server import NatsServer, find_nats_server, free_port
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_NODE = "n1"
_CLASSES = ("gpu", "nic")
_WITH_STREAMS = {user.name for account in accounts(Shape.CENTRAL) if account.has_jetstream for user in account.users}
_DEPLOYED = ROOT / "deploy" / "nats"


class Container(NamedTuple):
    """What `AccountNats` asks of a server: where it is, and a folder for the passwords of its
    users.
    """

    url: str
    folder: Path


@pytest.fixture(scope="module", params=["own", "2.10.27", "2.15.1"])
def server(
    request: pytest.FixtureRequest, images: Images, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    """A version of nats-server in a container as compose.yaml has it: by start.sh, with the
    settings for this version and with the accounts.
    """
    scratch = tmp_path_factory.mktemp("nats")
    program = _program(request.param)
    image = program_image(images.base, program, scratch / "image", tag=f"topobus-ci/nats:{request.param}")
    settings = scratch / "settings"
    shutil.copytree(_DEPLOYED, settings)
    users = [user for account in accounts(Shape.CENTRAL) for user in account.users]
    (settings / "passwords.conf").write_text(render_passwords({user.variable: user.name for user in users}))
    (settings / "users.conf").write_text(f"include passwords.conf\n{(settings / 'accounts-central.conf').read_text()}")
    (settings / "topobus.conf").write_text(f"include {_settings_for(program)}\ninclude users.conf\n")
    container = (
        DockerContainer(image)
        .with_command(["/etc/nats/topobus.conf", "/data"])
        .with_volume_mapping(settings, "/etc/nats")
    )
    container.with_tmpfs_mount("/data").with_tmpfs_mount("/tmp").with_exposed_ports(4222)
    container.with_kwargs(
        entrypoint=["/bin/sh", "/etc/nats/start.sh"],
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
    )
    # Not testcontainers' NatsContainer: that one waits for two minutes for a server that has ended.
    with container.waiting_for(LogMessageWaitStrategy("Server is ready").with_poll_interval(0.2)):
        yield Container(f"nats://127.0.0.1:{container.get_exposed_port(4222)}", scratch)


def _program(version: str) -> Path:
    if version == "own":
        return find_nats_server()
    try:
        return nats_program(version)
    except EngineUnavailable as err:
        # Debian's newest suite moves on; as `make versions` does, what
        # cannot be had is said and left out.
        pytest.skip(f"NOT TESTED on nats-server {version}: {err}")


def _settings_for(program: Path) -> str:
    """Name the file of deploy/nats that is for a server's version."""
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    newest = max(
        (tuple(int(number) for number in re.findall(r"\d+", file.stem)), file.name)
        for file in _DEPLOYED.glob("nats-server*.conf")
        if tuple(int(number) for number in re.findall(r"\d+", file.stem)) <= version
    )
    return newest[1]


@pytest_asyncio.fixture
async def nats(server: Container) -> AsyncIterator[AccountNats]:
    """Its users, with their buses and bare clients; the streams are made."""
    users = AccountNats(cast(NatsServer, server), accounts(Shape.CENTRAL), ZONES)
    async with users.bus("controller") as controller:
        await controller.provision()
    yield users


async def test_login_does_its_own_work_when_nats_runs_in_a_container(nats: AccountNats) -> None:
    """Each writer writes what is its own, once.

    A device service in an account without streams answers; a subscriber
    without streams gets the present.
    """
    await nats.fill("{}", _NODE, "gpu")
    async with nats.bus("topology") as topology, nats.bus("gpu") as gpu:
        first = await topology.compare_and_set(LEDGER, Ledger(node="n2"), 0, node="n2")
        second = await topology.compare_and_set(LEDGER, Ledger(node="n2"), 0, node="n2")

        async def hint(_request: object) -> object:
            raise AssertionError("never asked")

        await gpu.answer(HINT, hint, node=_NODE, device_class="gpu")  # type: ignore[arg-type, type-var]
        answered = await topology.is_answered(HINT, timeout_s=10, node=_NODE, device_class="gpu")
    password_file = nats.settings("user").password_file
    async with (
        asyncio.timeout(60),
        aclosing(follow(nats.server.url, password_file=password_file, node=_NODE)) as events,
    ):
        event = await anext(events)

    assert (type(first), type(second), type(answered)) == (Written, Conflict, Answered)
    assert event == sample(HEALTH.message)


# The forgetter removes what is stored about nodes that are gone, and NATS knows no right to delete
# without that to write: it may write nearly all.
@pytest.mark.parametrize("principal", [principal for principal in PRINCIPALS if principal != FORGETTER])
async def test_login_is_denied_the_work_of_others_when_nats_runs_in_a_container(
    nats: AccountNats, principal: str
) -> None:
    """It writes nothing that another login writes, and only the account with the streams makes
    streams or consumers.
    """
    await nats.fill("{}", _NODE, "gpu")
    forbidden = {
        subject_of(noun, _NODE, device_class)
        for noun in (*STATES, *EVENTS)
        for device_class in _CLASSES
        if principal not in noun.writer
        or ("device_class" in noun.parts and principal in _CLASSES and principal != device_class)
    }
    if principal not in _WITH_STREAMS:
        forbidden |= {
            "$JS.API.STREAM.CREATE.OWN",
            "$JS.API.CONSUMER.CREATE.TOPOBUS_HEALTH.own",
            "$JS.API.STREAM.PURGE.TOPOBUS_HEALTH",
        }
    before = await nats.image()
    async with nats.client(principal) as stranger:
        for subject in sorted(forbidden):
            await stranger.send(subject, b"{}")
        undenied = [
            subject
            for subject in sorted(forbidden)
            if not any(f'"{subject.lower()}"' in denial for denial in stranger.denials)
        ]
    after = await nats.image()

    assert undenied == []
    assert after == before


async def test_provider_runs_nats_by_docker_when_no_server_is_installed(images: Images, tmp_path: Path) -> None:
    """The very command that `topobus up` falls back to starts a server with JetStream on loopback,
    and its clean-up leaves no container.
    """
    docker = shutil.which("docker")
    assert docker is not None
    program = NatsProgram(program=Path(docker), image=images.nats)
    port = free_port()
    machine = Machine(node=_NODE, numa_nodes=(), cpus=())
    server = await asyncio.create_subprocess_exec(*program.command(port=port, store=tmp_path))
    try:
        async with (
            asyncio.timeout(60),
            Bus.session(NatsSettings(url=f"nats://127.0.0.1:{port}"), name="topobus-cli") as bus,
        ):
            await bus.provision()
            written = await bus.compare_and_set(MACHINE, machine, 0, node=_NODE)
    finally:
        removal = await asyncio.create_subprocess_exec(*program.cleanup(port=port), stdout=asyncio.subprocess.DEVNULL)
        removed = await removal.wait()
        await server.wait()

    assert (type(written), removed) == (Written, 0)
