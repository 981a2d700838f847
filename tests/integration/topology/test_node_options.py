"""The node's options for alignment, as its topology service publishes them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from msgspec import structs

from support.garbage import write_garbage
from topobus.bus.bus import Bus, ChangeKind
from topobus.engine.health.silence import SAID_EVERY_S
from topobus.formats.messages.catalogue import ALIGNMENT
from topobus.testing.clock import ManualClock
from topobus.topology.options import AlignmentPublisher
from topobus.values.idset import CpuSet
from topobus.values.request import Policy
from topobus.values.view import AlignmentOptions, NodeAlignment

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

MINE = NodeAlignment(
    node="n1",
    options=AlignmentOptions(policy=Policy.RESTRICTED),
    reserved_cpus=CpuSet(0, 8),
    reserved_memory={"0": 1 << 30},
)


async def _until(bus: Bus, wanted: NodeAlignment) -> None:
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n1")) as changes:
        async for change in changes:
            if change.value == wanted:
                return


async def test_options_are_published_when_others_stand_there(bus: Bus) -> None:
    """What the last start wrote with other settings is replaced."""
    await bus.put(ALIGNMENT, NodeAlignment(node="n1"), node="n1")

    task = asyncio.create_task(AlignmentPublisher(bus, MINE).run())
    await _until(bus, MINE)
    task.cancel()


async def test_options_are_published_again_when_they_are_deleted(bus: Bus) -> None:
    """They are the node's to say: who deletes them gets them back."""
    task = asyncio.create_task(AlignmentPublisher(bus, MINE).run())
    await _until(bus, MINE)

    await bus.delete(ALIGNMENT, node="n1")
    await _until(bus, MINE)
    task.cancel()


async def test_options_are_left_alone_when_they_stand_there(bus: Bus) -> None:
    """A restart with the same settings writes nothing: the revision stays."""
    revision = await bus.put(ALIGNMENT, MINE, node="n1")
    other = NodeAlignment(node="n2")

    task = asyncio.create_task(AlignmentPublisher(bus, MINE).run())
    second = asyncio.create_task(AlignmentPublisher(bus, other).run())
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n2")) as changes:
        async for change in changes:
            if change.value == other:
                break
    entry = await bus.get(ALIGNMENT, node="n1")
    task.cancel()
    second.cancel()

    assert entry is not None
    assert entry.revision == revision


async def test_silent_services_are_published_when_silence_begins_and_ends(bus: Bus) -> None:
    """Who only reads the bus sees which device services do not answer, since when, and that they do
    again.
    """
    publisher = AlignmentPublisher(bus, MINE)
    task = asyncio.create_task(publisher.run())
    await _until(bus, MINE)

    publisher.note_silence({"gpu": "2026-11-28T00:00:00.000000Z"})
    await _until(bus, structs.replace(MINE, unheard_classes={"gpu": "2026-11-28T00:00:00.000000Z"}))
    publisher.note_silence({})
    await _until(bus, MINE)
    task.cancel()


async def test_options_are_said_anew_while_they_stand_there(bus: Bus) -> None:
    """Each half minute the same is written again, so that who only reads hears when topology has
    stopped.
    """
    clock = ManualClock()
    task = asyncio.create_task(AlignmentPublisher(bus, MINE, clock).run())
    revisions: list[int] = []
    async with (
        asyncio.timeout(60),
        clock.ticking(SAID_EVERY_S),
        aclosing(bus.watch(ALIGNMENT, node="n1")) as changes,
    ):
        async for change in changes:
            if change.kind is ChangeKind.PUT:
                revisions.append(change.revision)
            if len(revisions) == 3:
                break
    task.cancel()

    assert revisions == sorted(set(revisions))


async def test_options_of_an_instance_that_started_later_are_not_spoken_over(bus: Bus) -> None:
    """During a rolling update the earlier instance says nothing more, neither that it lives nor who
    is silent.
    """
    publisher = AlignmentPublisher(bus, MINE)
    earlier = asyncio.create_task(publisher.run())
    await _until(bus, MINE)
    later = structs.replace(MINE, reserved_cpus=CpuSet(1))
    second = asyncio.create_task(AlignmentPublisher(bus, later).run())
    await _until(bus, later)

    publisher.note_silence({"gpu": "2026-11-28T00:00:00.000000Z"})
    other = asyncio.create_task(AlignmentPublisher(bus, structs.replace(later, node="n2")).run())
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n2")) as changes:
        async for change in changes:
            if change.kind is ChangeKind.PUT:
                break
    entry = await bus.get(ALIGNMENT, node="n1")
    for task in (earlier, second, other):
        task.cancel()

    assert entry is not None
    assert entry.value == later


async def test_options_are_written_over_when_what_stands_there_cannot_be_read(bus: Bus) -> None:
    """A server's own answer at the key, as whoever names it as a reply subject gets it there, is
    written over at once, and they are said anew as before.
    """
    clock = ManualClock()
    task = asyncio.create_task(AlignmentPublisher(bus, MINE, clock).run())
    await _until(bus, MINE)

    garbage = await write_garbage(bus, ALIGNMENT, node="n1")
    said: list[NodeAlignment | None] = []
    async with (
        asyncio.timeout(60),
        clock.ticking(SAID_EVERY_S),
        aclosing(bus.watch(ALIGNMENT, node="n1")) as changes,
    ):
        async for change in changes:
            if change.revision > garbage:
                said.append(change.value)
            if len(said) == 2:
                break
    task.cancel()

    assert said == [MINE, MINE]


async def test_options_are_left_to_the_later_instance_when_garbage_stands_there(bus: Bus) -> None:
    """During a rolling update the instance whose words stood there last says them again, and not
    the one that was spoken over.
    """
    later = structs.replace(MINE, reserved_cpus=CpuSet(1))
    earlier = asyncio.create_task(AlignmentPublisher(bus, MINE).run())
    await _until(bus, MINE)
    second = asyncio.create_task(AlignmentPublisher(bus, later).run())
    await _until(bus, later)

    revision = await write_garbage(bus, ALIGNMENT, node="n1")
    async with asyncio.timeout(60), aclosing(bus.watch(ALIGNMENT, node="n1")) as changes:
        async for change in changes:
            if change.revision > revision:
                break
    for task in (earlier, second):
        task.cancel()

    assert change.value == later
