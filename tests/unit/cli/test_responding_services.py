"""Waiting for services that hang or take long, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from topobus.bus.bus import Bus
from topobus.cli.commands.device import _ask
from topobus.cli.listing.responding_services import CONTROLLER, Peer, device_service_on, note_waiting, topology_on
from topobus.cli.objects.device_selection import ChosenDevice
from topobus.formats.messages.catalogue import OPERATE, PREFER
from topobus.formats.messages.messages import PreferReply, PreferRequest
from topobus.formats.messages.operation_messages import OperateRequest
from topobus.values.maintenance import DeviceOperation, DeviceVerb

pytestmark = pytest.mark.virtual_time

NODE = "n1"


@pytest.fixture
def server() -> MemoryNats:
    """A server in memory."""
    return MemoryNats()


@pytest_asyncio.fixture
async def bus(server: MemoryNats) -> AsyncIterator[Bus]:
    """A command's connection."""
    async with MemoryBus.session(server, name="topobus-cli") as connected:
        yield connected


async def _hang(server: MemoryNats, *subjects: str) -> None:
    """Listen as a stopped process does: what is asked comes, and nothing is answered."""
    client = server.new_client()
    await client.connect([server.url])
    for subject in subjects:
        await client.listen_at_once(subject, _ignore)


async def _ignore(_message: object) -> None:
    return


async def _work(_request: PreferRequest) -> PreferReply:
    raise AssertionError("a sign of life prefers nothing")


async def _answer_at_last() -> str:
    await asyncio.sleep(4)
    return "done"


@pytest.mark.parametrize(
    "peer", [CONTROLLER, topology_on(NODE), device_service_on(NODE, "gpu")], ids=lambda peer: peer.name
)
async def test_wait_names_the_service_that_hangs(server: MemoryNats, bus: Bus, peer: Peer) -> None:
    """A person learns before the end for whom the command waits."""
    await _hang(server, peer.ask.subject(**peer.parts))
    said: list[str] = []

    answer = await note_waiting(bus, _answer_at_last(), [peer], said.append)

    assert (answer, said) == ("done", [f"waiting for {peer.name} (no answer within 1 s)"])


async def test_wait_names_who_hangs_behind_the_one_that_was_asked(server: MemoryNats, bus: Bus) -> None:
    """Topology waits for the device service itself: it is well, and not named."""
    gpu = device_service_on(NODE, "gpu")
    await _hang(server, gpu.ask.subject(**gpu.parts))
    said: list[str] = []
    async with MemoryBus.session(server, name="topology") as topology:
        await topology.answer(PREFER, _work, node=NODE)

        await note_waiting(bus, _answer_at_last(), [topology_on(NODE), gpu], said.append)

    assert said == ["waiting for gpu on n1 (no answer within 1 s)"]


async def test_wait_says_nothing_when_the_answer_comes_soon(bus: Bus) -> None:
    """A word for what takes a moment would be noise."""
    said: list[str] = []

    answer = await note_waiting(bus, asyncio.sleep(1, "done"), [CONTROLLER], said.append)

    assert (answer, said) == ("done", [])


async def test_wait_names_who_works_when_nobody_hangs(server: MemoryNats, bus: Bus) -> None:
    """A reset takes a driver's time."""
    said: list[str] = []
    async with MemoryBus.session(server, name="topology") as topology:
        await topology.answer(PREFER, _work, node=NODE)

        await note_waiting(bus, _answer_at_last(), [topology_on(NODE)], said.append)

    assert said == ["waiting for topology on n1, which is at work"]


async def test_device_operation_ends_with_the_name_of_the_service_that_hangs(server: MemoryNats, bus: Bus) -> None:
    """Its answer is not known, and it says whose."""
    topology = topology_on(NODE)
    request = OperateRequest(
        op_id="op", operation=DeviceOperation(device_class="gpu", device="gpu-0", verb=DeviceVerb.RETURN, who="ann")
    )
    await _hang(server, topology.ask.subject(**topology.parts), OPERATE.subject(node=NODE))
    said: list[str] = []

    answer = await _ask(bus, ChosenDevice(node=NODE, device_class="gpu", device="gpu-0"), request, said.append, "op")

    assert answer.reply is None
    assert answer.error.startswith("no answer from topology on n1 within 15 s")
    assert len(said) == 1
    assert "topology on n1 (no answer within 1 s)" in said[0]
