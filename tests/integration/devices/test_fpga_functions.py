"""A claim for a function, through a real NATS server, the gateway and kubelet's calls: the card is
programmed once for all who want the function, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.bitstream_files import FUNCTION, gbs
from support.fpga_cards import BLANK, FileDflProgrammer, add, dfl_machine, port_file
from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, claim
from support.runtimes import runtime_of
from topobus.bus.bus import Bus
from topobus.devicekit.driver import Discovery
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import JournalSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.fpga.config import FpgaSettings, FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import ClaimReference
from topobus.values.device import Device, Inventory
from topobus.values.health import HealthState
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

CARD = "fpga-0000-16-00-0"
LIMIT_S = 60.0


class Node:
    """The node plane with a real fpga service on a recorded card."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.root = folder / "machine"
        self.store = folder / "store"
        dfl_machine(self.root)
        self.programmer = FileDflProgrammer(self.root)
        self.settings = FpgaSettings(
            node=NODE,
            hardware=HardwareSettings(root=str(self.root), rescan_s=0.2),
            health=HealthSettings(poll_s=0.05, hold_s=0.1),
            journal=JournalSettings(dir=str(folder / "journal")),
            functions=FunctionSettings(store=str(self.store)),
        )

    @asynccontextmanager
    async def service(self, driver: IntelDflDriver | None = None) -> AsyncIterator[None]:
        """Run the fpga service for the length of a block."""
        async with Bus.session(NatsSettings(url=self.rig.url), name="fpga") as bus:
            runtime = runtime_of("fpga", NODE, bus)
            registry = DriverRegistry(drivers=(driver or IntelDflDriver(self.programmer),))
            services = FpgaServices(functions=self.settings.functions, can_program=True)
            task = asyncio.create_task(
                serve_devices(self.settings, runtime, "fpga", registry=registry, host_services=services)
            )
            try:
                yield
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def show_machine(self) -> None:
        """Do discovery's work."""
        machine = read_machine(Tree(self.settings.hardware), NODE)
        await self.rig.bus.put(MACHINE, msgspec.structs.replace(machine, generation=2), node=NODE)

    async def inventory(self, wanted: Callable[[Inventory], bool]) -> Inventory:
        """Wait for an inventory as wanted."""
        async with asyncio.timeout(LIMIT_S):
            async for change in self.rig.bus.watch(INVENTORY, node=NODE, device_class="fpga"):
                if change.value is not None and wanted(change.value):
                    return change.value
        raise AssertionError("the watch ended")

    async def claim(self, name: str, function: str) -> ClaimReference:
        """Store a claim that was allocated the card, for a function."""
        made = claim(name, f"uid-{name}", CARD)
        config: list[dict[str, Any]] = [
            {
                "source": "FromClaim",
                "opaque": {
                    "driver": "topobus.dev",
                    "parameters": {
                        "apiVersion": "fpga.topobus.dev/v1",
                        "kind": "FunctionParameters",
                        "function": function,
                    },
                },
            }
        ]
        status = {"allocation": {"devices": {**made.status["allocation"]["devices"], "config": config}}}
        await self.rig.plane.store(msgspec.structs.replace(made, status=status))
        return ClaimReference(name=name, uid=f"uid-{name}", drivers=("topobus.dev",))

    async def prepare(self, reference: ClaimReference) -> str:
        """Prepare a claim as kubelet does; gives its error."""
        (prepared,) = await self.rig.kubelet.prepare_claims([reference])
        return prepared.error

    async def release(self, reference: ClaimReference) -> None:
        """Unprepare a claim as kubelet does when its pod has gone, and take its allocation back as
        the controller does when it is deleted.
        """
        assert await self.rig.kubelet.unprepare_claims([reference]) == {}
        await self.rig.plane.let_go(
            Owner(kind=OwnerKind.CLAIM, namespace="default", name=reference.name, uid=reference.uid)
        )

    def afu_id(self) -> str:
        """Give what the port shows."""
        return port_file(self.root, "dfl-port.0", "afu_id").read_text(encoding="ascii")


@pytest_asyncio.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    """A node with a card that has another function, its services, the gateway, and a kubelet that
    knows the driver.
    """
    async with make_rig(nats_server.url, classes=()) as rig:
        made = Node(rig, tmp_path)
        add(made.store, gbs(), "matrix", ("default",))
        add(made.store, gbs("0123456789abcdef" * 2), "secret", ("another",))
        await made.show_machine()
        # The node plane's own rights name no nodes of real drivers; the class's own do.
        async with made.service(), rig.kubelet, rig.gateway(edits={}):
            await rig.kubelet.wait_for_driver("topobus.dev")
            await made.inventory(lambda inventory: any(device.name == CARD for device in inventory.devices))
            yield made


async def test_card_is_programmed_once_when_two_claims_want_one_function(node: Node) -> None:
    """The first claim's card is programmed; its port is reset after it.

    The second claim finds the function loaded. The container gets the port, and never the engine.
    """
    before = node.afu_id()
    first_claim, second_claim = await node.claim("one", "matrix"), await node.claim("two", FUNCTION)

    first = await node.prepare(first_claim)
    after_first = node.afu_id()
    spec = "".join(path.read_text(encoding="utf-8") for path in node.rig.cdi_dir.iterdir())
    seen = await node.inventory(lambda inventory: "function" in inventory.devices[0].attributes)
    await node.release(first_claim)
    second = await node.prepare(second_claim)

    assert (before, first, after_first) == (BLANK, "", FUNCTION)
    assert seen.devices[0].attributes["function"] == "matrix"
    assert ("/dev/dfl-port.0" in spec, "dfl-fme" in spec) == (True, False)
    assert second == ""
    assert node.programmer.calls == ["program", "reset"]


async def test_claim_says_why_when_its_function_is_not_for_it(node: Node) -> None:
    """Kubelet gets the words of the refusal, and the card stays as it is for the next claim."""
    secret = await node.claim("one", "secret")
    refused = await node.prepare(secret)
    await node.release(secret)
    unknown = await node.prepare(await node.claim("two", "nothing"))

    assert "function secret is not for claims of namespace 'default'" in refused
    assert "the node's bitstream store has none of that name or id" in unknown
    assert (node.afu_id(), node.programmer.calls) == (BLANK, [])


async def test_card_is_out_of_use_until_it_is_whole_when_programming_fails(node: Node) -> None:
    """Everybody sees that the card is dirty.

    Once it can be programmed again it is made whole by itself, and a claim gets it.
    """
    node.programmer.error = 5
    first_claim = await node.claim("one", "matrix")
    refused = await node.prepare(first_claim)
    sick = await node.inventory(lambda inventory: inventory.devices[0].health.state is HealthState.UNHEALTHY)
    node.programmer.error = 0
    await node.inventory(lambda inventory: inventory.devices[0].health.state is HealthState.HEALTHY)

    await node.release(first_claim)

    assert "programming" in refused
    worst = sick.devices[0].health.worst
    assert worst is not None
    assert worst.reason in ("dirty", "function-crashed")
    assert node.afu_id() == FUNCTION
    assert await node.prepare(await node.claim("two", "matrix")) == ""


class RememberingDflDriver(IntelDflDriver):
    """A driver that notes what it is told, and when it looks."""

    def __init__(self, programmer: FileDflProgrammer) -> None:
        super().__init__(programmer)
        self.said: list[str] = []
        self.has_looked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def remember(self, devices: Sequence[Device]) -> None:
        """Note the names."""
        self.said += [f"remember {device.name}" for device in devices]

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Note that it looked."""
        self.said.append("discover")
        self._loop.call_soon_threadsafe(self.has_looked.set)
        return super().discover(tree, machine)


async def test_driver_hears_of_the_earlier_run_before_it_looks(nats_server: NatsServer, tmp_path: Path) -> None:
    """Names may depend on what a card had before the restart: the inventory of that run is the
    memory.

    The first run has nothing to remember.
    """
    async with make_rig(nats_server.url, classes=()) as rig:
        made = Node(rig, tmp_path)
        await made.show_machine()
        first = RememberingDflDriver(made.programmer)
        async with made.service(first):
            await made.inventory(lambda inventory: any(device.name == CARD for device in inventory.devices))
        second = RememberingDflDriver(made.programmer)
        async with made.service(second), asyncio.timeout(LIMIT_S):
            await second.has_looked.wait()

    assert first.said[0] == "discover"
    assert second.said[:2] == [f"remember {CARD}", "discover"]
