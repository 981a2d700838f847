"""A node that joins with garbage, another release or a wrong clock beside a good one: it is told by
name, and nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec
import pytest

from support.controller_home import NODE, Home, claim
from support.controllers import controller
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

STRANGE = "strange-node"


class Remarks(Readiness):
    """Readiness whose remark on nodes can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Note a part, and wake who waits."""
        super().set(part, is_ready, why)
        self._changed.set()

    async def until(self, is_enough: Callable[[str], bool]) -> str:
        """Wait until the remark on nodes satisfies the test; gives it."""
        async with asyncio.timeout(60):
            while not is_enough(self.report().get("nodes", "")):
                self._changed.clear()
                await self._changed.wait()
        return self.report().get("nodes", "")


class LateClock(SystemClock):
    """An hour behind."""

    def now(self) -> datetime:
        """Give the wrong moment."""
        return super().now() - timedelta(hours=1)


async def test_strange_node_is_named_and_the_good_one_is_served(
    home: Home, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """The controller says release, clock and what it cannot read of one node, allocates on the
    other, and takes all back when the node is mended.
    """
    readiness = Remarks()
    settings = NatsSettings(url=nats_server.url)
    machine = msgspec.structs.replace(recorded[0], node=STRANGE)
    inventory = Inventory(node=STRANGE, device_class="nic", generation=1)
    strange = await Bus.connect(settings, name="discovery", clock=LateClock(), release="9.1.0")
    await strange.put(catalogue.MACHINE, machine, node=STRANGE)
    await strange.put(catalogue.INVENTORY, inventory, node=STRANGE, device_class="nic")
    # As a release would write it that nobody here knows: past all of our own code.
    await strange._connection.publish(
        f"$KV.topobus_inventories.{STRANGE}.gpu", b'{"node": 7}', headers={"Topobus-Release": "9.1.0"}
    )
    await strange._connection.barrier()
    await strange.close()

    async with controller(nats_server.url, readiness=readiness):
        await home.put(claim("one"))
        (result,) = await home.results("one")
        text = await readiness.until(
            lambda text: all(word in text for word in ("clock", "discovery", "nic", "cannot be read"))
        )
        is_ready = readiness.is_ready
        async with Bus.session(settings, name="discovery") as mended:
            await mended.put(catalogue.MACHINE, machine, node=STRANGE)
            for device_class in ("nic", "gpu"):
                await mended.put(
                    catalogue.INVENTORY,
                    msgspec.structs.replace(inventory, device_class=device_class),
                    node=STRANGE,
                    device_class=device_class,
                )
        after = await readiness.until(lambda text: text == "ready")

    assert result["pool"] == NODE
    assert is_ready
    assert text.startswith(f"ready: {STRANGE}: ")
    assert NODE not in text
    for words in (
        "discovery runs release 9.1.0, newer than",
        "nic runs release 9.1.0",
        "its clock was 3",
        "s behind the NATS server's",
        "its inventory cannot be read",
    ):
        assert words in text
    assert after == "ready"
