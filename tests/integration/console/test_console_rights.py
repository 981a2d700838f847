"""The console as the NATS user that it has: it reads all that it shows,
and may write none of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.account_nats import account_nats
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_permissions import rights
from topobus.console.config import ConsoleSettings
from topobus.console.followers import Followers
from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, LEDGER, MACHINE, OBJECT
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

pytestmark = pytest.mark.integration


async def test_console_reads_the_fleet_as_its_own_user(nats_binary: Path) -> None:
    """On a server with accounts the console's rights are enough for its page, a node's drawing
    included.
    """
    inventory = Inventory(
        node="n1", device_class="gpu", generation=1, devices=(Device(name="gpu-0", device_class="gpu"),)
    )
    machine = Machine(node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=1),), cpus=())
    async with (
        asyncio.timeout(90),
        account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as server,
        server.bus("controller") as controller,
    ):
        await controller.provision()
        async with server.bus("gpu") as gpu, server.bus("discovery") as discovery, server.bus("console") as bus:
            await gpu.put(INVENTORY, inventory, node="n1", device_class="gpu")
            await discovery.put(MACHINE, machine, node="n1")
            await bus.provision()
            followers = Followers(bus, ConsoleSettings())
            following = asyncio.create_task(followers.run())
            await followers.is_settled.wait()
            view = await followers.node("n1")
            following.cancel()
            await asyncio.wait({following})

    assert followers.board.keys("nodes") == ("n1",)
    assert view is not None


def test_console_may_write_nothing_that_it_shows_and_ask_nobody() -> None:
    """No subject of a value, an event or an ask is among what it may publish."""
    published = rights("console")["publish"]

    assert [subject for subject in published if subject.startswith(("$KV.", "topobus."))] == []
    assert [subject for subject in published if subject.startswith("$JS.") and not subject.startswith("$JS.API.")] == []
    verbs = {tuple(subject.split(".")[2:4]) for subject in published if subject.startswith("$JS.API.")}
    assert verbs == {("STREAM", "INFO"), ("STREAM", "MSG")}
    assert {state.name for state in (ALIGNMENT, INVENTORY, LEDGER, MACHINE, OBJECT) if "console" in state.readers} == {
        "alignment",
        "inventory",
        "ledger",
        "machine",
        "object",
    }
