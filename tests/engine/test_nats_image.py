"""NATS as a container: what `topobus up` falls back to without a nats-server, and what users run beside the services."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path

import pytest

from engine.conftest import Images
from topobus.contracts.catalogue import MACHINE
from topobus.domain.machine import Machine
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.runtime.state import Conflict, Written
from topobus.simulation.nats_provider import NatsProgram

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# The reaper that testcontainers starts beside a container is an image of its own, which cannot be pulled here; the context manager cleans up.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"


async def _write_twice(url: str) -> tuple[object, object]:
    """Provision, create an entry, and create it again."""
    machine = Machine(node="n1", numa_nodes=(), cpus=())
    async with asyncio.timeout(60), Bus.session(NatsSettings(url=url), name="topobus-cli") as bus:
        await bus.provision()
        return await bus.compare_and_set(MACHINE, machine, 0, node="n1"), await bus.compare_and_set(MACHINE, machine, 0, node="n1")


# testcontainers' NATS module uses waiting functions that testcontainers itself calls deprecated.
@pytest.mark.filterwarnings("ignore:The (@wait_container_is_ready|wait_for_logs):DeprecationWarning")
async def test_bus_works_when_nats_runs_in_a_test_container(images: Images) -> None:
    """A driver author who tests with testcontainers gets a bus that provisions, writes once and refuses the second."""
    # testcontainers reads the environment above when it is imported.
    from testcontainers.community.nats import NatsContainer

    with NatsContainer(images.nats, jetstream=True) as container:
        first, second = await _write_twice(container.nats_uri())

    assert isinstance(first, Written)
    assert isinstance(second, Conflict)


async def test_provider_runs_nats_by_docker_when_no_server_is_installed(images: Images, tmp_path: Path) -> None:
    """The very command that `topobus up` falls back to starts a server with JetStream on loopback, and its clean-up leaves no container."""
    docker = shutil.which("docker")
    assert docker is not None
    program = NatsProgram(program=Path(docker), image=images.nats)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = await asyncio.create_subprocess_exec(*program.command(port=port, store=tmp_path))
    try:
        first, second = await _write_twice(f"nats://127.0.0.1:{port}")
    finally:
        removal = await asyncio.create_subprocess_exec(*program.cleanup(port=port), stdout=asyncio.subprocess.DEVNULL)
        removed = await removal.wait()
        await server.wait()

    assert (type(first), type(second), removed) == (Written, Conflict, 0)
