"""What is stored and asked says who sent it: its release, and its clock against the server's.

The sender learns it, too, and nobody is refused for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

from integration.values import inventory
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

# More than any machine makes a test wait.
_HOUR_S = 3600.0


class WrongClock(SystemClock):
    """The machine's clock, some seconds off."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def now(self) -> datetime:
        """Give the wrong moment."""
        return super().now() + timedelta(seconds=self.ahead_s)


@asynccontextmanager
async def process(
    server: NatsServer,
    name: str,
    *,
    release_text: str | None = None,
    clock: SystemClock | None = None,
    readiness: Readiness | None = None,
) -> AsyncIterator[Bus]:
    """Connect as a process of some release, with some clock."""
    bus = await Bus.connect(
        NatsSettings(url=server.url), name=name, clock=clock, readiness=readiness, release=release_text
    )
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize("ahead_s", [_HOUR_S, -_HOUR_S], ids=["ahead", "behind"])
async def test_readers_learn_release_and_clock_of_who_wrote_a_value(
    nats_server: NatsServer, bus: Bus, ahead_s: float
) -> None:
    """The server's own time of storing is the measure, so that the
    reader's clock does not matter.
    """
    async with process(nats_server, "gpu", release_text="9.1.0", clock=WrongClock(ahead_s)) as gpu:
        await gpu.put(INVENTORY, inventory(1), node="n1", device_class="gpu")
    async with process(nats_server, "controller", clock=WrongClock(_HOUR_S)) as reader:
        entry = await reader.get(INVENTORY, node="n1", device_class="gpu")
        (listed,) = await reader.list(INVENTORY)

    assert entry is not None
    for origin in (entry.origin, listed.origin):
        assert origin.release == "9.1.0"
        assert origin.ahead_s is not None
        assert -60 < origin.ahead_s - ahead_s < 1
        assert ("ahead of" if ahead_s > 0 else "behind") in origin.clock_remark


async def test_process_learns_that_its_clock_is_wrong_and_that_it_is_right_again(
    nats_server: NatsServer, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what, wanted and next step, readiness has a remark and stays ready.

    Servers before 2.10 tell by a write that is read again.
    """
    readiness = Readiness()
    clock = WrongClock(-_HOUR_S)

    async def look(generation: int) -> None:
        await gpu.inspect()
        await gpu.put(INVENTORY, inventory(generation), node="n1", device_class="gpu")
        await gpu.get(INVENTORY, node="n1", device_class="gpu")

    async with process(nats_server, "gpu", clock=clock, readiness=readiness) as gpu:
        await look(1)
        wrong, is_ready, log = readiness.report()["clock"], readiness.is_ready, capsys.readouterr().err
        clock.ahead_s = 0.0
        await look(2)
        right = readiness.report()["clock"]

    assert wrong.startswith("ready: this machine's clock is 3")
    assert "behind the NATS server's" in wrong
    assert is_ready
    assert log.count("clock.differs") == 1
    assert "next_step" in log
    assert right == "ready"
