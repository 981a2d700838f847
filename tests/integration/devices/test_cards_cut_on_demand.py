"""A real device service that cuts cards when claims get parts of them: what is published, and what
claims get, over a bus and over lives of the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.amd_kernel import AmdKernel
from support.device_bench import LIMIT_S, NODE, PROFILES, DeviceBench
from support.kernel_writes import KernelWrites
from support.looks import next_look
from support.sriov_kernel import SriovKernel
from support.sysfs_trees import write
from topobus.bus.bus import Bus
from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.devicekit.settings import FunctionRule, PartitionSettings
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.messages.catalogue import MACHINE, PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import HardwareSettings
from topobus.values.health import HealthState
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

CARD = "gpu-0000-05-00-0"


class CutBench(DeviceBench):
    """A gpu service on a machine whose cards obey."""

    async def publish(self, machine: Machine) -> None:
        """Do discovery's work for a machine that is no profile's."""
        await self.bus.put(MACHINE, msgspec.structs.replace(machine, node=NODE, generation=1), node=NODE)

    async def prepare(self, owner: str, device: str) -> Prepared | Refusal:
        """Ask until the answer is no more that the work goes on; each round is a round trip."""
        request = PrepareRequest(op_id="", owner=_owner(owner), devices=(device,))
        async with asyncio.timeout(LIMIT_S):
            while True:
                reply = await self.bus.ask(PREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu")
                if not isinstance(reply.result, Accepted):
                    return reply.result
                await next_look()

    async def unprepare(self, owner: str, device: str) -> None:
        """Give a device back."""
        request = UnprepareRequest(op_id="", owner=_owner(owner), devices=(device,))
        async with Bus.session(NatsSettings(url=self.url), name="gateway") as gateway:
            reply = await gateway.ask(UNPREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu")
        assert reply.refusal is None


def _owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.CLAIM, name=name, uid=f"uid-{name}")


@pytest.fixture
def bench(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> CutBench:
    """Give a bench whose hardware is below `cards`."""
    made = CutBench(bus, nats_server.url, build(PROFILES / "h100-pair.toml", tmp_path / "profile"))
    made.hardware = HardwareSettings(root=str(tmp_path / "cards"), rescan_s=0.2)
    return made


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[AmdKernel]:
    """Give two MI300X that obey."""
    kernel = AmdKernel(tmp_path / "cards", cards=2)
    with KernelWrites(tmp_path / "cards") as writes:
        kernel.follow(writes)
        yield kernel


def _amd() -> AmdDriver:
    driver = AmdDriver()
    driver.configure(GpuServices(leftovers=LeftoverSettings(check=False)))
    return driver


async def test_claims_get_parts_of_cards_that_are_cut_for_them(bench: CutBench, cards: AmdKernel) -> None:
    """Every way of each card is published once, within Kubernetes' limits.

    A claim cuts its card, and the slices and everybody's health stay as they were.
    """
    on_demand = PartitionSettings(on_demand=True)
    await bench.publish(cards.machine.machine)
    async with bench.service(_amd(), partitions=on_demand):
        before = await bench.inventory(lambda it: len(it.devices) == 2 * 15)
        part = await bench.prepare("a", f"{CARD}-cpx-3")
        whole = await bench.prepare("b", CARD)
    async with bench.service(_amd(), partitions=on_demand):
        await bench.hints_once_up()
        again = await bench.prepare("a", f"{CARD}-cpx-3")
        whole_again = await bench.prepare("b", CARD)
        await bench.unprepare("a", f"{CARD}-cpx-3")
        whole_at_last = await bench.prepare("b", CARD)
        after = await bench.inventory(lambda it: len(it.devices) == 2 * 15)

    assert [counter_set.name for counter_set in before.counter_sets] == [CARD, "gpu-0000-27-00-0"]
    assert [
        problem
        for each in slices_of_pool(before.node, [devices_of_class(before)])
        for problem in check_slice(each.spec)
    ] == []
    assert isinstance(part, Prepared)
    assert [node.path for node in part.edits[f"{CARD}-cpx-3"].device_nodes] == ["/dev/dri/card3", "/dev/dri/renderD131"]
    assert isinstance(again, Prepared)
    for refused in (whole, whole_again):
        assert isinstance(refused, Refusal)
        assert refused.reasons[0].code == "card-in-use"
    assert isinstance(whole_at_last, Prepared)
    assert {device.health.state for device in after.devices} == {HealthState.HEALTHY}
    assert {device.name: device.attributes for device in after.devices} == {
        device.name: device.attributes for device in before.devices
    }
    assert [switch[1:] for switch in cards.switches] == [("SPX", "CPX"), ("CPX", "SPX")]


def _drm_files(folder: str, index: int) -> dict[str, object]:
    return {
        f"{folder}/drm/renderD{129 + index}/dev": f"226:{129 + index}",
        f"{folder}/drm/renderD{129 + index}/uevent": "",
    }


async def test_claims_get_virtual_functions_that_are_made_for_them(bench: CutBench, tmp_path: Path) -> None:
    """A card is published whole and in its functions while it has none.

    The first claim makes them, and the last one takes them away where the rule says so.
    """
    root = tmp_path / "cards"
    kernel = SriovKernel(root, device=0x56C0, class_code=0x038000, driver="xe", files=_drm_files)
    rule = FunctionRule(where=(Condition(field="pci", equals="0000:3b:00.0"),), count=2, when_idle="remove")
    driver = IntelDriver()
    driver.configure(GpuServices(leftovers=LeftoverSettings(check=False)))
    write(root, {"proc/1/comm": "init"})
    await bench.publish(kernel.machine)
    with KernelWrites(root) as writes:
        kernel.follow(writes)
        async with bench.service(driver, partitions=PartitionSettings(virtual_functions=(rule,))):
            inventory = await bench.inventory(lambda it: len(it.devices) == 3)
            part = await bench.prepare("a", "gpu-0000-3b-02-1")
            whole = await bench.prepare("b", "gpu-0000-3b-00-0")
            await bench.unprepare("a", "gpu-0000-3b-02-1")
            writes.settle()

    assert [device.name for device in inventory.devices] == ["gpu-0000-3b-00-0", "gpu-0000-3b-02-0", "gpu-0000-3b-02-1"]
    assert [counter_set.name for counter_set in inventory.counter_sets] == ["gpu-0000-3b-00-0"]
    assert isinstance(part, Prepared)
    assert [node.path for node in part.edits["gpu-0000-3b-02-1"].device_nodes] == ["/dev/dri/renderD130"]
    assert isinstance(whole, Refusal)
    assert kernel.writes == [2, 0]
