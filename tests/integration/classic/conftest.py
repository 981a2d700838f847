"""Two nodes and the classes of the classic API, without a controller and with one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.classic_home import ClassicPlace, classic_place, controller
from support.classic_manifests import CLASSES
from topobus.bus.bus import Bus
from topobus.simulation.nats_server import NatsServer


@pytest_asyncio.fixture
async def place(bus: Bus, nats_server: NatsServer) -> AsyncIterator[ClassicPlace]:
    """Two nodes, classes, no controller."""
    async with classic_place(bus, nats_server.url) as made:
        await made.apply(CLASSES)
        yield made


@pytest_asyncio.fixture
async def served(place: ClassicPlace) -> AsyncIterator[ClassicPlace]:
    """The same with a controller."""
    async with controller(place.url):
        yield place
