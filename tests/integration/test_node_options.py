"""The node's options for alignment, as its topology service publishes them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from topobus.contracts.catalogue import ALIGNMENT
from topobus.domain.idset import CpuSet
from topobus.domain.request import Policy
from topobus.domain.view import AlignmentOptions, NodeAlignment
from topobus.runtime.bus import Bus
from topobus.topology.options import publish_options

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

MINE = NodeAlignment(
    node="n1", options=AlignmentOptions(policy=Policy.RESTRICTED), reserved_cpus=CpuSet(0, 8), reserved_memory={"0": 1 << 30}
)


async def _until(bus: Bus, wanted: NodeAlignment) -> None:
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n1")) as changes:
        async for change in changes:
            if change.value == wanted:
                return


async def test_options_are_published_when_others_stand_there(bus: Bus) -> None:
    """What the last start wrote with other settings is replaced."""
    await bus.put(ALIGNMENT, NodeAlignment(node="n1"), node="n1")

    task = asyncio.create_task(publish_options(bus, MINE))
    await _until(bus, MINE)
    task.cancel()


async def test_options_are_published_again_when_they_are_deleted(bus: Bus) -> None:
    """They are the node's to say: who deletes them gets them back."""
    task = asyncio.create_task(publish_options(bus, MINE))
    await _until(bus, MINE)

    await bus.delete(ALIGNMENT, node="n1")
    await _until(bus, MINE)
    task.cancel()


async def test_options_are_left_alone_when_they_stand_there(bus: Bus) -> None:
    """A restart with the same settings writes nothing: the revision stays."""
    revision = await bus.put(ALIGNMENT, MINE, node="n1")
    other = NodeAlignment(node="n2")

    task = asyncio.create_task(publish_options(bus, MINE))
    second = asyncio.create_task(publish_options(bus, other))
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n2")) as changes:
        async for change in changes:
            if change.value == other:
                break
    entry = await bus.get(ALIGNMENT, node="n1")
    task.cancel()
    second.cancel()

    assert entry is not None
    assert entry.revision == revision
