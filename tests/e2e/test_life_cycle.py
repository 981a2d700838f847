"""Services come and go in any order, alone and together, and so does NATS: everything comes back by
itself.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import pytest

from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.running import LIMIT_S, NODE, SERVICES, all_services, service, system_settings, until_all_ready
from topobus.bus.bus import Bus, ChangeKind, Start
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, LEDGER, PLACE
from topobus.formats.messages.messages import HealthEvent, PlaceReply, PlaceRequest
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEVICES = {"cpu": 224, "fpga": 2, "gpu": 8, "nic": 8}


async def place(bus: Bus, op_id: str, request: PodRequest) -> PlaceReply:
    """Place as soon as topology can be reached and knows the node."""
    return await ask_patiently(bus, PLACE, PlaceRequest(op_id=op_id, pod=request), node=NODE)


async def until_inventories(bus: Bus) -> None:
    """Wait until all devices of the demo machine stand in the bucket."""
    counts: dict[str, int] = {}
    async with asyncio.timeout(LIMIT_S), aclosing(bus.watch(INVENTORY, node=NODE)) as changes:
        async for change in changes:
            if change.kind is ChangeKind.PUT and change.value is not None:
                counts[change.parts["device_class"]] = len(change.value.devices)
            if counts == DEVICES:
                return


async def health_events(bus: Bus) -> dict[str, list[int]]:
    """Generations of all health events in the stream, by device, in order."""
    generations: dict[str, list[int]] = {}
    async with asyncio.timeout(LIMIT_S), aclosing(bus.follow(HEALTH, start=Start.ALL, node=NODE)) as events:
        async for received_event in events:
            value: HealthEvent = received_event.value
            generations.setdefault(f"{value.device_class}/{value.device}", []).append(value.generation)
            if len(generations) == sum(DEVICES.values()):
                return generations
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", SERVICES)
async def test_service_waits_for_nats_and_stops_when_there_is_none(name: str, short_folder: Path) -> None:
    """Alone in the world a service says what it waits for, is not ready, and ends by itself at
    SIGTERM: after 4.5 s it would end with status 70.
    """
    async with service(name, f"nats://127.0.0.1:{free_port()}", system_settings(short_folder)) as alone:
        line = await alone.logged("bus.waiting")
        is_ready = await alone.is_ready()
        status = await alone.stop()

    assert "nats://" in line["url"]
    assert not is_ready
    assert status == 0
    assert not [line for line in alone.raw if "Traceback" in line]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(tuple(reversed(SERVICES)), id="reversed"),
        # The whole system once with nothing but what each service imports itself.
        pytest.param(
            ("gateway", "topology", "cpu", "controller", "gpu", "discovery", "nic", "fpga"),
            marks=pytest.mark.real_start,
            id="mixed",
        ),
    ],
)
async def test_system_becomes_ready_when_started_in_any_order_before_nats(
    order: tuple[str, ...], server: NatsServer, short_folder: Path
) -> None:
    """Eight services that were there before NATS find it, and each other, and are ready without
    help.
    """
    await server.stop()
    async with all_services(server.url, short_folder, order=order) as running:
        for each_service in running.values():
            await each_service.logged("bus.waiting")
        await server.start()

        await until_all_ready(running)


async def test_system_comes_back_when_nats_lost_its_store(server: NatsServer, client: Bus, short_folder: Path) -> None:
    """After NATS came back empty, machine, inventories, ledger and health stand in it again, and
    what is held stays held.

    Who published the events before counts them on, so that a subscriber who
    saw the first takes the second.
    """
    async with all_services(server.url, short_folder) as running:
        await until_all_ready(running)
        first = await place(client, "op-1", pod("a", container(cpus=4, gpu=6)))
        # What was never published begins at 1, then, too.
        assert set(map(tuple, (await health_events(client)).values())) == {(1,)}
        await server.stop()
        shutil.rmtree(server.store)
        await server.start()
        await until_inventories(client)
        await until_all_ready(running)
        second = await place(client, "op-2", pod("b", container(gpu=3)))
        events = await health_events(client)
        entry = await client.get(LEDGER, node=NODE)

    assert isinstance(first.result, Placement)
    assert isinstance(second.result, Refusal)
    assert second.result.reasons[0].code == "not-enough-devices"
    assert entry is not None
    assert entry.value.epoch == 2
    assert set(map(tuple, events.values())) == {(2,)}


async def test_system_loses_and_repeats_nothing_when_each_service_is_killed(
    server: NatsServer, client: Bus, short_folder: Path
) -> None:
    """Kill -9 of every service in turn: holdings stay, and no health event is told again."""
    async with all_services(server.url, short_folder) as running:
        await until_all_ready(running)
        await until_inventories(client)
        await place(client, "op-1", pod("a", container(cpus=4, gpu=6)))
        before = await health_events(client)
        for each_service in running.values():
            each_service.process.kill()
            await each_service.process.wait()
        async with all_services(server.url, short_folder) as again:
            await until_all_ready(again)
            second = await place(client, "op-2", pod("b", container(gpu=3)))
            after = await health_events(client)

    assert isinstance(second.result, Refusal)
    assert after == before
    assert set(map(tuple, after.values())) == {(1,)}


async def test_twin_is_named_in_both_logs_when_topology_runs_twice(
    server: NatsServer, client: Bus, short_folder: Path
) -> None:
    """A second topology or device service of a node is found, and both say so."""
    settings = system_settings(short_folder)
    for name in ("topology", "gpu"):
        async with service("discovery", server.url, settings), service(name, server.url, settings) as first:
            await first.until_ready()
            async with service(name, server.url, settings) as second:
                logged = await second.logged("twin.found")
                heard = await first.logged("twin.found")

        assert logged["twin"].startswith(f"{name}-")
        assert heard["twin"].startswith(f"{name}-")
    assert client.is_connected


async def test_gateway_waits_when_another_one_runs_on_the_node(
    server: NatsServer, client: Bus, short_folder: Path
) -> None:
    """Two gateways never share a checkpoint: the second stands by, ready to go on and saying so,
    and takes over when the first is killed.
    """
    async with all_services(server.url, short_folder) as running:
        await until_all_ready(running)
        async with service("gateway", server.url, system_settings(short_folder)) as second:
            logged = await second.logged("twin.found")
            await second.until_ready()
            has_begun = [line for line in second.lines if line.get("event") == "twin.gone"]
            running["gateway"].process.kill()
            await second.logged("twin.gone")
            await second.until_ready()

    assert logged["process"] == str(running["gateway"].process.pid)
    assert has_begun == []
    assert client.is_connected
