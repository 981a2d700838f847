"""The demo node, without a controller and with one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio

from support.controller_home import Home
from support.controllers import controller
from support.reading import Reader
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine


@pytest_asyncio.fixture
async def home(bus: Bus, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]) -> AsyncIterator[Home]:
    """The demo node with its topology, no controller yet."""
    machine, inventories = recorded
    topology = await topologies.enter_async_context(real_topology(bus, machine, inventories))
    async with Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Home(bus, objects, topology, inventories)


@pytest_asyncio.fixture
async def served(home: Home, nats_server: NatsServer) -> AsyncIterator[Home]:
    """The demo node with a controller."""
    async with controller(nats_server.url):
        yield home
