"""A GPU that goes to a virtual machine, through the whole gpu service: what everybody sees of it
meanwhile, over a restart, and when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.device_bench import LIMIT_S, NODE, PROFILES, DeviceBench
from support.kernel_writes import KernelWrites
from support.looks import next_look
from support.passthrough_bench import ALLOWED, ASKED, OTHER, OWNER
from support.pci_drivers import PciDrivers
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER, PERFORM, PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.operation_messages import Operated, PerformRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.process.config import NatsSettings
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import HealthState
from topobus.values.ledger import Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal
from topobus.values.request import Owner

pytestmark = pytest.mark.integration


class _Node:
    """Two GPUs behind an IOMMU, and a gateway that asks."""

    def __init__(self, bench: DeviceBench, drivers: PciDrivers, gateway: Bus) -> None:
        self.bench, self.drivers, self.gateway = bench, drivers, gateway
        self.first, self.second = bench.recorded.pci("h100")
        self.width = 16

    @property
    def name(self) -> str:
        """Name the first GPU as a device."""
        return f"gpu-{self.first.replace(':', '-').replace('.', '-')}"

    async def prepare(self, owner: Owner, *, is_machine: bool) -> object:
        """Ask for the first GPU, again while work goes on."""
        config = (dict(ASKED),) if is_machine else ()
        request = PrepareRequest(op_id="", owner=owner, devices=(self.name,), config=config)
        async with asyncio.timeout(LIMIT_S):
            while True:
                reply = await self.gateway.ask(PREPARE, request, timeout_s=60, node=NODE, device_class="gpu")
                if not isinstance(reply.result, Accepted):
                    return reply.result
                await next_look()

    async def unprepare(self, owner: Owner) -> Refusal | None:
        """Give it back."""
        request = UnprepareRequest(op_id="", owner=owner, devices=(self.name,))
        return (await self.gateway.ask(UNPREPARE, request, timeout_s=60, node=NODE, device_class="gpu")).refusal

    async def look(self) -> Inventory:
        """Give what is published after a look that began after this call: it sees another width of
        the second GPU, and the drivers of now.
        """
        self.width -= 1
        self.bench.recorded.write(f"{self.bench.recorded.folder(self.second)}/max_link_width", str(self.width))
        await self.bench.publish_machine()
        return await self.bench.inventory(
            lambda inventory: self.width in [device.attributes.get("pcieMaxWidth") for device in inventory.devices]
        )


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelWrites]:
    """Give a kernel that obeys, and ends after the service."""
    build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    with KernelWrites(tmp_path / "machine") as kernel:
        yield kernel


@pytest_asyncio.fixture
async def node(bus: Bus, nats_server: NatsServer, kernel: KernelWrites) -> AsyncIterator[_Node]:
    """Give the node, whose machine is known."""
    recorded = RecordedMachine.open(kernel.root)
    drivers = PciDrivers(kernel)
    drivers.add_driver("vfio-pci")
    for group, address in enumerate(recorded.pci("h100")):
        shown = (f"{recorded.folder(address)}/drm", f"proc/driver/nvidia/gpus/{address}")
        drivers.add_function(
            address, "nvidia", group=group, shown=[path for path in shown if (kernel.root / path).exists()]
        )
    bench = DeviceBench(bus, nats_server.url, recorded)
    await bench.publish_machine()
    async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway:
        yield _Node(bench, drivers, gateway)


async def test_gpu_of_a_machine_stays_listed_as_it_was_and_nobody_is_told_that_it_is_sick(node: _Node) -> None:
    """Looks at the machine while VFIO has it, in this life of the service and in the next, change
    nothing.

    It returns the same, and the next claim's container gets its nodes.
    """
    async with node.bench.service(NvidiaDriver(), passthrough=ALLOWED):
        before = await node.bench.inventory(lambda inventory: len(inventory.devices) == 2)
        passed = await node.prepare(OWNER, is_machine=True)
        held = node.drivers.driver_of(node.first)
        during = await node.look()
    async with node.bench.service(NvidiaDriver(), passthrough=ALLOWED):
        after_restart = await node.look()
        again = await node.prepare(OWNER, is_machine=True)
        refused = await node.prepare(OTHER, is_machine=False)
        undone = await node.unprepare(OWNER)
        given = await node.prepare(OTHER, is_machine=False)
        after = await node.look()
        events = await node.bench.events(node.name)

    assert isinstance(passed, Prepared)
    assert again == passed
    assert held == "vfio-pci"
    for inventory in (during, after_restart, after):
        assert inventory.device(node.name) == before.device(node.name)
        assert (inventory.kept, inventory.warnings) == (before.kept, before.warnings)
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "device-passed-through"
    assert undone is None
    assert node.drivers.driver_of(node.first) == "nvidia"
    assert isinstance(given, Prepared)
    assert "/dev/nvidia0" in [device_node.path for device_node in given.edits[node.name].device_nodes]
    assert {event.health.state for event in events} <= {HealthState.HEALTHY}


async def test_gpu_is_bound_to_its_driver_again_and_nobody_is_told_that_it_is_sick(node: _Node) -> None:
    """Not while a machine has it; then the kernel's driver leaves it and takes it, once for one id."""
    async with (
        Bus.session(NatsSettings(url=node.bench.url), name="topology") as topology,
        node.bench.service(NvidiaDriver(), passthrough=ALLOWED),
    ):
        before = await node.bench.inventory(lambda inventory: len(inventory.devices) == 2)
        await node.bench.bus.put(LEDGER, Ledger(node=NODE), node=NODE)
        await node.prepare(OWNER, is_machine=True)
        held = await _rebind(topology, node.name, "op-1")
        await node.unprepare(OWNER)
        node.drivers.log.clear()
        done = await _rebind(topology, node.name, "op-2")
        again = await _rebind(topology, node.name, "op-2")
        after = await node.look()
        events = await node.bench.events(node.name)

    assert isinstance(held, Refusal)
    assert held.reasons[0].code == "device-held"
    assert isinstance(done, Operated)
    assert again == done
    assert node.drivers.log == [f"nvidia leaves {node.first}", f"nvidia takes {node.first}"]
    assert after.device(node.name) == before.device(node.name)
    assert {event.health.state for event in events} <= {HealthState.HEALTHY}


async def _rebind(topology: Bus, name: str, op_id: str) -> Operated | Refusal:
    operation = DeviceOperation(device_class="gpu", device=name, verb=DeviceVerb.REBIND, who="ada")
    request = PerformRequest(op_id=op_id, operation=operation, time="2026-01-02T03:04:05.000000Z")
    return (await topology.ask(PERFORM, request, timeout_s=60, node=NODE, device_class="gpu")).result
