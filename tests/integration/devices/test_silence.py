"""A device service that dies or hangs, as a real process: its devices are Unknown, its neighbours'
are not, and nothing is released.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.running import NODE, Service, service
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import ADOPT, HINT, INVENTORY, LEDGER, MACHINE, PLACE
from topobus.formats.messages.messages import Adopted, AdoptRequest, HintsReply, HintsRequest, PlaceRequest
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, Inventory
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

QUICK = {
    "TOPOBUS_TOPOLOGY__SILENCE__EVERY_S": "0.1",
    "TOPOBUS_TOPOLOGY__SILENCE__TIMEOUT_S": "0.5",
    "TOPOBUS_TOPOLOGY__SILENCE__GONE_S": "0.5",
    "TOPOBUS_TOPOLOGY__SILENCE__HUNG_S": "1.5",
}


class Node:
    """A running node whose services can be hurt."""

    def __init__(self, bus: Bus, running: dict[str, Service], settings: dict[str, str]) -> None:
        self.bus = bus
        self.running = running
        self.settings = settings

    async def place(self, name: str, **devices: int) -> Placement | Refusal:
        """Place a pod of one container."""
        request = PlaceRequest(op_id=f"op-{name}", pod=pod(name, container(**devices)))
        return (await ask_patiently(self.bus, PLACE, request, node=NODE)).result

    async def until(self, event: str) -> None:
        """Wait until topology says that it hears the gpu service, or does not."""
        await self.running["topology"].logged(event, where=lambda line: line["device_class"] == "gpu")


@pytest_asyncio.fixture
async def node(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Node]:
    """Discovery, two device services and a topology service that is quick to judge."""
    build("dgx", tmp_path / "machine")
    settings = {"TOPOBUS_ALL__HARDWARE__ROOT": str(tmp_path / "machine"), **QUICK}
    async with AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(service(name, nats_server.url, settings))
            for name in ("discovery", "gpu", "nic")
        }
        for each_service in running.values():
            await each_service.until_ready()
        # After the others: its first look at the inventories finds them all.
        running["topology"] = await stack.enter_async_context(service("topology", nats_server.url, settings))
        await running["topology"].until_ready()
        yield Node(bus, running, settings)


async def test_pods_are_refused_until_it_is_back_when_a_device_service_is_killed(
    node: Node, nats_server: NatsServer
) -> None:
    """GPUs are refused as service-silent, NICs are placed, what is held stays held and can be
    adopted.

    A new start ends it.
    """
    first = await node.place("first", gpu=1)
    assert isinstance(first, Placement)
    node.running["gpu"].process.kill()
    await node.until("class.silent")

    refused, neighbour = await node.place("second", gpu=1), await node.place("third", nic=1)
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="u-1")
    inventory = await node.bus.get(INVENTORY, node=NODE, device_class="gpu")
    assert inventory is not None
    free = next(
        device.name for device in inventory.value.devices if (device.name,) != first.containers[0].devices["gpu"]
    )
    adopted = await node.bus.ask(
        ADOPT, AdoptRequest(op_id="op-adopt", owner=owner, devices={"gpu": (free,)}), node=NODE
    )
    entry = await node.bus.get(LEDGER, node=NODE)

    assert isinstance(refused, Refusal)
    assert [(reason.code, reason.facts["resource"]) for reason in refused.reasons] == [("service-silent", "gpu")]
    assert refused.to_free == ()
    assert isinstance(neighbour, Placement)
    assert isinstance(adopted.result, Adopted)
    assert entry is not None
    assert {allocation.owner.name for allocation in entry.value.allocations.values()} == {
        "first",
        "third",
        "topobus.dev/gpu",
    }

    async with service("gpu", nats_server.url, node.settings):
        await node.until("class.heard")
        assert isinstance(await node.place("fourth", gpu=1), Placement)


async def test_pods_are_refused_until_it_goes_on_when_a_device_service_hangs(node: Node) -> None:
    """A stopped process counts as silent after the longer time, and is
    heard again when it goes on.
    """
    gpu = node.running["gpu"].process
    assert isinstance(await node.place("first", gpu=1), Placement)
    gpu.send_signal(signal.SIGSTOP)
    try:
        await node.until("class.silent")
        refused = await node.place("second", gpu=1)
    finally:
        gpu.send_signal(signal.SIGCONT)
    await node.until("class.heard")

    assert isinstance(refused, Refusal)
    assert [reason.code for reason in refused.reasons] == ["service-silent"]
    assert isinstance(await node.place("third", gpu=1), Placement)
    entry = await node.bus.get(LEDGER, node=NODE)
    assert entry is not None
    assert len(entry.value.allocations) == 2


async def test_operators_see_unknown_when_a_device_service_is_silent(nats_server: NatsServer, bus: Bus) -> None:
    """`topobus inventory`, `health` and `doctor` show the devices of a dead service Unknown, with
    the reason, and those of its neighbour as they are.
    """
    for device_class in ("gpu", "nic"):
        devices = (Device(name=f"{device_class}-0", device_class=device_class),)
        await bus.put(
            INVENTORY,
            Inventory(node=NODE, device_class=device_class, generation=1, devices=devices),
            node=NODE,
            device_class=device_class,
        )

    async def never(_request: HintsRequest) -> HintsReply:
        raise AssertionError("a sign of life asks for no hints")

    async def topobus(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "topobus.cli.main",
            *arguments,
            "--nats",
            nats_server.url,
            stdout=asyncio.subprocess.PIPE,
        )
        return (await process.communicate())[0].decode()

    await bus.answer(HINT, never, node=NODE, device_class="nic")
    listed, health, text, doctor = await asyncio.gather(
        topobus("inventory", "--json"),
        topobus("health", "--all", "--json"),
        topobus("health"),
        topobus("doctor", "--json"),
    )

    gpu, nic = json.loads(listed)["inventories"]
    states = {device["device"]: device["health"]["state"] for device in json.loads(health)["devices"]}
    finding = next(
        each_finding
        for each_finding in json.loads(doctor)["findings"]
        if each_finding["what"] == f"{NODE}: inventory gpu"
    )
    assert gpu["devices"][0]["health"]["conditions"][0]["reason"] == "service-silent"
    assert gpu["warnings"][0].startswith("service-silent: no service answers there")
    assert nic["warnings"] == []
    assert states == {"gpu-0": "unknown", "nic-0": "healthy"}
    assert "1 of class gpu" in text
    assert "1 devices are well" in text
    assert (finding["level"], "service-silent" in finding["found"]) == ("fail", True)


async def test_machine_is_drawn_with_unknown_devices_when_their_service_is_silent(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """The drawing does not show the last word of a service that is gone as if it were the state of
    its devices.
    """
    machine = read_machine(Tree(HardwareSettings(root=str(build("laptop", tmp_path / "laptop").root))), NODE)
    devices = (Device(name="gpu-0", device_class="gpu"),)
    await bus.put(MACHINE, machine, node=NODE)
    await bus.put(
        INVENTORY,
        Inventory(node=NODE, device_class="gpu", generation=1, devices=devices),
        node=NODE,
        device_class="gpu",
    )

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.cli.main", "machine", "--nats", nats_server.url, stdout=asyncio.subprocess.PIPE
    )
    drawing = (await process.communicate())[0].decode()

    assert "?gpu-0 service-silent" in drawing, drawing
