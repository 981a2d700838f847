"""The documented example, run as it stands: the present first, then changes, across a restart of the server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from integration.values import health
from topobus.contracts.catalogue import HEALTH
from topobus.contracts.nats_permissions import PRINCIPALS, render_permissions
from topobus.domain.errors import PeerUnavailable
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "health_subscriber.py"


async def _publish(bus: Bus, device: str, generation: int) -> None:
    while True:
        try:
            await bus.publish(
                HEALTH, health(generation, device), event_id=f"{device}-{generation}", node="n1", device_class="gpu", device=device
            )
        except PeerUnavailable:
            await bus.wait_connected()
        else:
            return


async def _start(url: str) -> asyncio.subprocess.Process:
    """Run the example at a server without accounts."""
    return await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), env={**os.environ, "NATS_URL": url, "NATS_API": "$JS.API"}, stdout=asyncio.subprocess.PIPE
    )


async def _read(process: asyncio.subprocess.Process, count: int, *, limit_s: float = 15.0) -> list[tuple[str, int]]:
    """Read so many events; a restart must not blind the example for as long as nats-py's defaults would (19 s)."""
    assert process.stdout is not None
    printed = []
    async with asyncio.timeout(limit_s):
        while len(printed) < count:
            event = json.loads(await process.stdout.readline())
            printed.append((event["device"], event["generation"]))
    return printed


async def test_example_shows_present_then_changes_once_each_when_it_starts_late(own_nats_server: NatsServer, own_bus: Bus) -> None:
    """Events before its start: the newest of each device. Later ones, and those after a restart of the server: every one, once, in order."""
    for generation in (1, 2, 3):
        await _publish(own_bus, "gpu-0", generation)
    await _publish(own_bus, "gpu-1", 1)
    process = await _start(own_nats_server.url)
    try:
        present = await _read(process, 2)
        for generation in (4, 5):
            await _publish(own_bus, "gpu-0", generation)
        changes = await _read(process, 2)
        await own_nats_server.stop()
        await own_nats_server.start()
        for generation in (6, 7):
            await _publish(own_bus, "gpu-0", generation)
        await _publish(own_bus, "gpu-1", 2)
        after = await _read(process, 3)
        await _publish(own_bus, "gpu-2", 1)
        last = await _read(process, 1)
    finally:
        process.kill()
        await process.wait()

    assert present == [("gpu-0", 3), ("gpu-1", 1)]
    assert changes == [("gpu-0", 4), ("gpu-0", 5)]
    assert after == [("gpu-0", 6), ("gpu-0", 7), ("gpu-1", 2)]
    assert last == [("gpu-2", 1)]


async def test_example_works_with_a_users_rights_when_permissions_are_on(
    nats_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendered permissions of `user` are enough to follow health."""
    for principal in PRINCIPALS:
        monkeypatch.setenv(f"TOPOBUS_{principal.upper()}_PASSWORD", principal)
    password, provisioner = tmp_path / "gpu", tmp_path / "controller"
    password.write_text("gpu")
    provisioner.write_text("controller")
    async with (
        NatsServer(binary=nats_binary, config=render_permissions()) as server,
        Bus.session(NatsSettings(url=server.url, user="controller", password_file=str(provisioner)), name="controller") as controller,
        Bus.session(NatsSettings(url=server.url, user="gpu", password_file=str(password)), name="gpu") as bus,
    ):
        await controller.provision()
        await bus.provision()
        await _publish(bus, "gpu-0", 1)
        process = await _start(server.url.replace("nats://", "nats://user:user@"))
        try:
            assert await _read(process, 1) == [("gpu-0", 1)]
        finally:
            process.kill()
            await process.wait()


def test_example_has_at_most_sixty_lines_when_it_is_counted() -> None:
    """It fits one screen: that is what it promises to a reader."""
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60
