"""Two recorded nodes, without a controller and with one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest_asyncio

from support.controllers import controller
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from support.scheduling_home import Place
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine


@pytest_asyncio.fixture
async def home(bus: Bus, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]) -> AsyncIterator[Place]:
    """Two nodes of eight GPUs each, no controller yet."""
    nodes: dict[str, WatchedTopology] = {}
    for name in ("n1", "n2"):
        machine = msgspec.structs.replace(recorded[0], node=name)
        inventories = [msgspec.structs.replace(inventory, node=name) for inventory in recorded[1]]
        nodes[name] = await topologies.enter_async_context(real_topology(bus, machine, inventories))
    async with Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Place(bus, objects, nodes)


@pytest_asyncio.fixture
async def served(home: Place, nats_server: NatsServer) -> AsyncIterator[Place]:
    """Two nodes with a controller."""
    async with controller(nats_server.url):
        yield home
