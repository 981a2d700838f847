"""A plugin with thousands of devices behind the gateway: it is served, and neither its going nor a
restart ends anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, WatchedReadiness, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.kubelet_plugins import device as listed
from support.laws import share
from support.node_plane import NODE, device
from support.runtimes import runtime_of
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.host import host
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.gateway.config import ForeignSettings
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import HardwareSettings
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, Machine, NumaNode

pytestmark = pytest.mark.integration

RESOURCE = "acme.example/widget"
CLASS = "widget-acme"
# Ends a test that hangs; thousands of devices take seconds on a busy machine.
_LIMIT_S = 120.0


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node with two NUMA nodes; a gateway with a folder for others' plugins."""
    async with make_rig(nats_server.url) as made:
        nodes = tuple(NumaNode(id=node, cpus=CpuSet(), memory_bytes=1) for node in (0, 1))
        await made.bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=()), node=NODE)
        folder = made.root / "others"
        folder.mkdir()
        made.settings = msgspec.structs.replace(made.settings, foreign=ForeignSettings(dir=str(folder)))
        yield made


async def inventory(rig: Rig, count: int, state: HealthState) -> Inventory:
    """Wait until the class has so many devices, all in one state."""
    async for change in rig.bus.watch(INVENTORY, node=NODE, device_class=CLASS):
        if (
            change.value is not None
            and [each_device.health.state for each_device in change.value.devices] == [state] * count
        ):
            return change.value
    raise AssertionError("the watch ended")


async def test_last_good_list_stays_when_a_newer_one_cannot_be_published(rig: Rig) -> None:
    """A plugin that lists what no reader takes ends nothing: kubelet keeps the list before,
    readiness says why, and the next good list counts again.
    """
    good = [listed("w-0", 0)]
    async with rig.kubelet, rig.gateway() as gateway:
        await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
        async with TrivialPlugin(Path(rig.settings.foreign.dir), RESOURCE, good, socket="p.sock") as plugin:
            assert await plugin.register() == ""
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
            plugin.show([*good, listed("x" * 70_000, 1)])
            said = await rig.readiness.until(lambda report: "cannot be published" in report.get("foreign-plugins", ""))
            standing = await rig.bus.get(INVENTORY, node=NODE, device_class=CLASS)
            await rig.plane.show("gpu", device("gpu-0", 0))
            await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
            plugin.show([*good, listed("w-1", 1)])
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
            await rig.readiness.until(lambda report: report.get("foreign-plugins") == "ready")
        assert not gateway.done()

    assert said["foreign-plugins"].startswith(f"ready: {RESOURCE}: 2 devices cannot be published: ")
    assert standing is not None
    assert [each_device.name for each_device in standing.value.devices] == [f"{CLASS}--w-0"]


async def test_gateway_goes_on_when_the_device_host_of_a_plugin_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a plugin's devices do to the host that serves them, the doors of all other classes
    stay open, and the plugin and readiness hear what ended.
    """

    async def broken(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(host, "serve_devices", broken)
    async with rig.kubelet, rig.gateway() as gateway:
        await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
        async with TrivialPlugin(
            Path(rig.settings.foreign.dir), RESOURCE, [listed("w-0", 0)], socket="p.sock"
        ) as plugin:
            assert (
                await plugin.register()
                == f"{RESOURCE} is not served now, and tried again: its device host ended: a defect"
            )
            await rig.readiness.until(
                lambda report: "its device host ended: a defect" in report.get("foreign-plugins", "")
            )
        await rig.plane.show("gpu", device("gpu-0", 0))
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
        assert not gateway.done()


async def test_cpu_service_goes_on_when_a_machine_has_4096_cpus(rig: Rig) -> None:
    """Each CPU is a device.

    The class's inventory is published whole, and gives all of them back to a reader.
    """
    nodes = tuple(
        NumaNode(id=node, cpus=CpuSet.of(range(node * 512, node * 512 + 512)), memory_bytes=1) for node in range(8)
    )
    cpus = tuple(
        Cpu(id=cpu, online=True, core=cpu // 2 * 2, socket=cpu // 2048, numa_node=cpu // 512, l3=cpu // 16 * 16)
        for cpu in range(4096)
    )
    await rig.bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=cpus), node=NODE)
    readiness = WatchedReadiness()
    settings = DeviceServiceSettings(node=NODE, hardware=HardwareSettings(root=str(rig.root / "machine")))
    runtime = runtime_of("cpu", NODE, rig.bus, readiness=readiness)
    service = asyncio.create_task(
        serve_devices(settings, runtime, "cpu", registry=DriverRegistry(drivers=(LinuxCpuDriver(),)))
    )
    try:
        await readiness.until(lambda report: report.get("inventory") == "ready", timeout_s=_LIMIT_S)
        found_inventory: Inventory | None = None
        # On a busy machine the first one says that the driver is slow, and has no devices.
        async with (
            asyncio.timeout(_LIMIT_S),
            contextlib.aclosing(rig.bus.watch(INVENTORY, node=NODE, device_class="cpu")) as changes,
        ):
            async for change in changes:
                found_inventory = change.value
                if found_inventory is not None and found_inventory.devices:
                    break
        assert not service.done()
    finally:
        service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service

    assert found_inventory is not None
    assert len(found_inventory.devices) == 4096


@pytest.mark.law
@pytest.mark.parametrize("count", share([1_200, 6_000]))
async def test_gateway_goes_on_when_a_plugin_lists_thousands_of_devices(rig: Rig, count: int) -> None:
    """All are offered at both doors and one is allocated.

    Gone, they are Unknown, over a restart without the plugin as well; back, they are offered again.
    """
    devices = [listed(f"Widget-{number:032x}", number % 2) for number in range(count)]
    pod = Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={RESOURCE: 1}),))
    async with rig.kubelet:
        async with rig.gateway() as first:
            await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
            async with TrivialPlugin(Path(rig.settings.foreign.dir), RESOURCE, devices, socket="p.sock") as plugin:
                assert await plugin.register() == ""
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=count, timeout_s=_LIMIT_S)
                admitted = await rig.kubelet.admit(pod)
                await rig.kubelet.wait_for_driver(DRIVER)
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0, timeout_s=_LIMIT_S)
            unknown = await inventory(rig, count, HealthState.UNKNOWN)
            assert not first.done()
        async with rig.gateway() as second:
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0, timeout_s=_LIMIT_S)
            await rig.readiness.until(
                lambda report: "waiting for the device plugin" in report.get("foreign-plugins", ""), timeout_s=_LIMIT_S
            )
            assert not second.done()
            async with TrivialPlugin(Path(rig.settings.foreign.dir), RESOURCE, devices, socket="p.sock") as plugin:
                assert await plugin.register() == ""
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=count, timeout_s=_LIMIT_S)
                await inventory(rig, count, HealthState.HEALTHY)
            assert not second.done()

    assert isinstance(admitted, Admission), admitted
    assert len({each_device.name for each_device in unknown.devices}) == count
