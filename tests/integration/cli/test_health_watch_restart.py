"""`topobus health watch` over a NATS restart: two watchers, one started in the middle, see each
device's generations without gap or repeat.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import HEALTH
from topobus.formats.messages.messages import HealthEvent
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable
from topobus.values.health import HEALTHY

pytestmark = pytest.mark.integration

_LIMIT_S = 30.0
NODE = "demo-node"
DEVICES = tuple(f"gpu-{number}" for number in range(4))
# Fewer than the stream keeps of one subject (64), or a watcher that was away may rightly miss some.
ROUNDS = 52
LAST = 60


class Watcher:
    """A running `topobus health watch --json`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._news = asyncio.Condition()

    async def read(self) -> None:
        """Collect its lines until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._news:
                self.lines.append(json.loads(line))
                self._news.notify_all()

    async def until(self, holds: Callable[[dict[str, list[int]]], bool]) -> dict[str, list[int]]:
        """Wait until the generations by device are as wanted."""
        async with asyncio.timeout(_LIMIT_S), self._news:
            await self._news.wait_for(lambda: holds(self.generations()))
        return self.generations()

    def gaps(self) -> list[str]:
        """What it has said of the connection."""
        return [line["gap"] for line in self.lines if "gap" in line]

    def generations(self) -> dict[str, list[int]]:
        """What it has printed: each device's generations in order."""
        generations: dict[str, list[int]] = {}
        for line in self.lines:
            if "gap" in line:
                continue
            generations.setdefault(line["event"]["device"], []).append(line["event"]["generation"])
        return generations


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watcher]:
    """Run a watcher until the block ends; it must end in order."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.cli.main",
        "health",
        "watch",
        "--json",
        "--nats",
        url,
        env={key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    watcher = Watcher(process)
    reader = asyncio.create_task(watcher.read())
    try:
        yield watcher
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(reader, _LIMIT_S)
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert "Traceback" not in said
    assert await process.wait() == 0, said


async def tell(bus: Bus, generation: int) -> None:
    """Publish one event of each device, as its service does: the same again until it is surely
    stored.
    """
    for device in DEVICES:
        event = HealthEvent(
            node=NODE,
            device_class="gpu",
            device=device,
            health=HEALTHY,
            generation=generation,
            time="2026-01-02T03:04:05.000000Z",
        )
        async with asyncio.timeout(_LIMIT_S):
            while True:
                try:
                    event_id = f"{NODE}.gpu.{device}.{generation}"
                    await bus.publish(HEALTH, event, event_id=event_id, node=NODE, device_class="gpu", device=device)
                    break
                except PeerUnavailable:
                    await bus.wait_connected()


def reached(last: int) -> Callable[[dict[str, list[int]]], bool]:
    """Say whether every device's newest generation is the wanted one."""
    return lambda generations: (
        len(generations) == len(DEVICES)
        and all(device_generations[-1] == last for device_generations in generations.values())
    )


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_watchers_see_each_generation_once_when_nats_restarts_in_the_middle(
    own_nats_server: NatsServer, own_bus: Bus, how: str
) -> None:
    """One watcher from the start, one from the middle.

    The server ends between two events, in order or by a crash, and comes back: no gap, no
    repeat, and both say where it was.
    """
    await tell(own_bus, 1)
    async with watching(own_nats_server.url) as early:
        await early.until(reached(1))
        for generation in range(2, ROUNDS // 2):
            await tell(own_bus, generation)
        async with watching(own_nats_server.url) as late:
            began = await late.until(lambda generations: len(generations) == len(DEVICES))
            # Frozen, so that the first event is surely on its way, and
            # unanswered, when the server ends.
            own_nats_server.pause()
            telling = asyncio.create_task(tell_all(own_bus, ROUNDS // 2, ROUNDS))
            await asyncio.wait({telling}, timeout=0.1)
            is_interrupted = not telling.done()
            await (own_nats_server.stop() if how == "stop" else own_nats_server.kill())
            await own_nats_server.start()
            await telling
            await tell_all(own_bus, ROUNDS + 1, LAST)
            seen = await early.until(reached(LAST))
            seen_late = await late.until(reached(LAST))

    assert is_interrupted, "nothing was under way when the server ended: the test proved less than it says"
    assert seen == {device: list(range(1, LAST + 1)) for device in DEVICES}
    assert seen_late == {device: list(range(began[device][0], LAST + 1)) for device in DEVICES}
    assert early.gaps() == late.gaps() == ["disconnected", "connected"]
    assert all(generations[0] == ROUNDS // 2 - 1 for generations in began.values()), (
        "a late watcher begins with the present state"
    )


async def tell_all(bus: Bus, first: int, last: int) -> None:
    """Publish these generations of all devices."""
    for generation in range(first, last + 1):
        await tell(bus, generation)
