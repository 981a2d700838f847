"""The nic, fpga and cpu services as real processes on recorded machines: inventory, health events,
prepare, stopping.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

import pytest
import pytest_asyncio

from support.device_bench import PROFILES
from support.reading import Reader
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, MACHINE, PREPARE
from topobus.formats.messages.messages import HealthEvent, Prepared, PrepareRequest
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

NODE = "demo-node"
# The promise to a supervisor: SIGTERM ends the process within so many seconds.
STOP_LIMIT_S = 60.0


class Services:
    """Service processes on one tree and one server; all end with the test."""

    def __init__(self, url: str, root: Path) -> None:
        self._environment = {
            **os.environ,
            "TOPOBUS_ALL__NODE": NODE,
            "TOPOBUS_ALL__NATS__URL": url,
            "TOPOBUS_ALL__HARDWARE__ROOT": str(root),
            "TOPOBUS_ALL__LOG__FORMAT": "json",
            "TOPOBUS_NIC__HEALTH__POLL_S": "0.1",
            "TOPOBUS_NIC__HEALTH__HOLD_S": "0.3",
            # The usual folder is that of a service which may run on this very machine.
            **{f"TOPOBUS_{name}__JOURNAL__DIR": str(root.parent / "journal" / name) for name in ("NIC", "CPU", "FPGA")},
        }
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._logs: dict[str, Reader[str]] = {}
        self._stack = AsyncExitStack()

    async def start(self, name: str) -> None:
        """Start one service; whether it serves, its inventory tells."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"topobus.{name}.main",
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._running[name] = process
        self._logs[name] = await self._stack.enter_async_context(Reader(_lines(process)))

    async def logged(self, name: str, event: str) -> None:
        """Wait until a service has logged an event."""
        await self._logs[name].until(lambda lines: any(f'"{event}"' in line for line in lines))

    async def stop(self, name: str) -> int:
        """Tell a service to stop; its exit status. TimeoutError when it is too slow."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_LIMIT_S):
            return await process.wait()

    async def end(self) -> None:
        """End all that still run."""
        for process in self._running.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self._stack.aclose()


async def _lines(process: asyncio.subprocess.Process) -> AsyncGenerator[str, None]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield line.decode("utf-8", "replace")


@pytest_asyncio.fixture
async def services(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Services]:
    """Services on the tree `machine` below the test's folder."""
    made = Services(nats_server.url, tmp_path / "machine")
    yield made
    await made.end()


async def inventory(bus: Bus, device_class: str, *, timeout_s: float = 30.0) -> Inventory:
    """Wait for a class's first inventory."""
    async with Reader(bus.watch(INVENTORY, node=NODE, device_class=device_class)) as reader:
        changes = await reader.until(
            lambda items: any(change.value is not None for change in items), timeout_s=timeout_s
        )
    return next(change.value for change in changes if change.value is not None)


async def test_device_services_publish_what_the_recorded_machine_has_and_stop_when_told(
    bus: Bus, services: Services, tmp_path: Path
) -> None:
    """Real processes find the demo machine's NICs, FPGAs and CPUs, started in any order, and stop
    cleanly on SIGTERM.
    """
    build("dgx", tmp_path / "machine")
    for name in ("nic", "cpu", "fpga", "discovery"):
        await services.start(name)

    nics, fpgas, cpus = [await inventory(bus, name) for name in ("nic", "fpga", "cpu")]
    exits = {name: await services.stop(name) for name in ("nic", "fpga", "cpu")}

    assert [(device.attributes["rdma"], device.health.state) for device in nics.devices] == [
        (True, HealthState.HEALTHY)
    ] * 8
    assert [str(device.numa_nodes) for device in nics.devices] == ["0"] * 4 + ["1"] * 4
    assert len({device.pcie_switch for device in nics.devices}) == 4
    assert [(str(device.numa_nodes), device.vendor) for device in fpgas.devices] == [("0", "Xilinx")] * 2
    assert (
        len(cpus.devices),
        len({device.core for device in cpus.devices}),
        len({device.socket for device in cpus.devices}),
    ) == (
        224,
        112,
        2,
    )
    assert exits == {"nic": 0, "fpga": 0, "cpu": 0}


async def test_nic_service_tells_of_a_lost_carrier_and_of_its_return(
    bus: Bus, services: Services, tmp_path: Path
) -> None:
    """A pulled cable becomes an Unhealthy event with its reason, and the plugged one a Healthy
    event, both complete and in order.
    """
    machine = build(PROFILES / "driver-cards.toml", tmp_path / "machine")
    address = machine.pci("connectx-7")[0]
    await services.start("discovery")
    await services.start("nic")
    victim = next(device.name for device in (await inventory(bus, "nic")).devices if str(device.pci) == address)

    def states(items: list[HealthEvent]) -> list[HealthState]:
        return [health_event.health.state for health_event in items]

    async with AsyncExitStack() as stack:
        source = bus.follow(HEALTH, node=NODE, device_class="nic", device=victim)
        reader = await stack.enter_async_context(Reader(source))
        await reader.until(
            lambda items: states([received_event.value for received_event in items]) == [HealthState.HEALTHY]
        )
        machine.set_carrier(address, is_up=False)
        await reader.until(lambda items: items[-1].value.health.state is HealthState.UNHEALTHY)
        machine.set_carrier(address, is_up=True)
        received = await reader.until(
            lambda items: len(items) > 2 and items[-1].value.health.state is HealthState.HEALTHY
        )

    events = [received_event.value for received_event in received]
    # The recording pulls the cable file by file, so the reason may change on
    # the way: what counts is the road.
    assert [state for state, _ in groupby(states(events))] == [
        HealthState.HEALTHY,
        HealthState.UNHEALTHY,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]
    assert "carrier-lost" in {condition.reason for event in events for condition in event.health.conditions}
    assert [event.generation for event in events] == sorted({event.generation for event in events})


async def test_nic_service_prepares_rdma_nodes_when_asked_over_the_bus(
    bus: Bus, services: Services, tmp_path: Path
) -> None:
    """The edits that a gateway gets name the card's own verbs node and the list of devices."""
    build(PROFILES / "driver-cards.toml", tmp_path / "machine")
    await services.start("discovery")
    await services.start("nic")
    device = (await inventory(bus, "nic")).devices[0]
    request = PrepareRequest(op_id="op-1", owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"), devices=(device.name,))

    reply = await bus.ask(PREPARE, request, node=NODE, device_class="nic")

    assert isinstance(reply.result, Prepared)
    assert [device_node.path for device_node in reply.result.edits[device.name].device_nodes] == [
        "/dev/infiniband/uverbs0"
    ]
    assert [device_node.path for device_node in reply.result.common.device_nodes] == ["/dev/infiniband/rdma_cm"]
    assert reply.result.common.env["TOPOBUS_NIC_DEVICES"] == device.name
    assert reply.result.common.env["TOPOBUS_NIC_PCI_ADDRESSES"] == str(device.pci)


@pytest.mark.parametrize("device_class", ["nic", "fpga", "cpu"])
async def test_device_service_publishes_an_empty_inventory_and_says_so_when_the_machine_has_none(
    bus: Bus, services: Services, tmp_path: Path, device_class: str
) -> None:
    """No device is made up: the inventory is there, empty, and the log says it."""
    (tmp_path / "machine/sys").mkdir(parents=True)
    cpus = (Cpu(id=0, online=False),)
    await bus.put(
        MACHINE, Machine(node=NODE, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=1),), cpus=cpus), node=NODE
    )
    await services.start(device_class)

    found_inventory = await inventory(bus, device_class)
    await services.logged(device_class, "inventory.empty")
    status = await services.stop(device_class)

    assert (found_inventory.devices, bool(found_inventory.drivers), status) == ((), True, 0)
