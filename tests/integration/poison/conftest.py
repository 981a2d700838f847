"""The demo node, before somebody writes poison."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.alignment_nodes import dgx_facts
from support.poisoned_home import Poisoned
from support.reading import Reader
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import HintsReply, HintsRequest


@pytest_asyncio.fixture
async def home(bus: Bus) -> AsyncIterator[Poisoned]:
    """The demo machine with its GPUs, no controller yet."""
    machine, inventories = dgx_facts()

    async def hints(_: HintsRequest) -> HintsReply:
        return HintsReply(hints=None)

    # Otherwise the controller would take the gpu service for silent during a long test.
    await bus.answer(catalogue.HINT, hints, node=machine.node, device_class="gpu")
    async with (
        real_topology(bus, machine, [inventories["gpu"]]) as topology,
        Reader(bus.watch(catalogue.OBJECT)) as objects,
    ):
        yield Poisoned(bus, objects, topology)
