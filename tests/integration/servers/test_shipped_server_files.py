"""The files of deploy/nats with what `topobus keys` makes, on a real server: what compose.yaml
starts.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.gateway_rig import WatchedReadiness
from topobus.bus.bus import Bus
from topobus.cli.application import run
from topobus.formats.messages.catalogue import MACHINE
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 60.0


class _Shipped(NatsServer):
    """A server with the shipped file and the users that were made, at a port and in a folder of its
    own.
    """

    users = Path()

    def write_config(self) -> Path:
        """Write the files as compose mounts them, with this machine's port and folder."""
        text = (ROOT / "deploy/nats/nats-server.conf").read_text(encoding="utf-8")
        text = re.sub(r'^listen: ".*"$', f'listen: "127.0.0.1:{self.port}"', text, flags=re.MULTILINE)
        text = re.sub(r'^http: ".*"$', "", text, flags=re.MULTILINE).replace('"/data"', f'"{self.store}"')
        file = self.folder / "nats.conf"
        file.write_text(f"{text}include users.conf\n", encoding="utf-8")
        (self.folder / "users.conf").write_bytes(self.users.read_bytes())
        return file


async def test_services_work_and_take_new_passwords_with_the_files_of_compose(
    nats_binary: Path, tmp_path: Path
) -> None:
    """A device service behind its account reads what the core wrote, and comes back by itself after
    `keys rotate` and a SIGHUP, which change no form of the users.
    """
    keys, users = tmp_path / "keys", tmp_path / "users.conf"
    assert await asyncio.to_thread(run, ["keys", "make", str(keys), "--accounts", "--server-file", str(users)]) == 0

    def settings(principal: str) -> NatsSettings:
        zone = "vendor" if principal == "gpu" else "core"
        return NatsSettings(url=server.url, user=principal, password_file=str(keys / principal / "password"), zone=zone)  # type: ignore[arg-type]  # both are zones

    server = _Shipped(binary=nats_binary)
    server.users = users
    readiness = WatchedReadiness()
    async with asyncio.timeout(_LIMIT_S), AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        controller = await stack.enter_async_context(Bus.session(settings("controller"), name="controller"))
        discovery = await stack.enter_async_context(Bus.session(settings("discovery"), name="discovery"))
        gpu = await Bus.connect(settings("gpu"), name="gpu", readiness=readiness)
        stack.push_async_callback(gpu.close)
        await controller.provision()
        await discovery.put(MACHINE, Machine(node="n1", numa_nodes=(), cpus=()), node="n1")
        await gpu.provision()
        assert await gpu.get(MACHINE, node="n1") is not None

        assert await asyncio.to_thread(run, ["keys", "rotate", str(keys), "gpu", "--server-file", str(users)]) == 0
        server.write_config()
        os.kill(server.pid, signal.SIGHUP)
        await readiness.until(
            lambda parts: gpu._connection.generation > 1 and parts["bus"] == "ready", timeout_s=_LIMIT_S
        )

        assert await gpu.get(MACHINE, node="n1") is not None
        assert discovery._connection.generation == 1
