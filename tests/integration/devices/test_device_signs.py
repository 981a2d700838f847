"""Each sign of docs/reference/health-reasons.md, as one recorded fault: it flips exactly its
device, in the events, the metric, kubelet's lists and pod status, and the slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from lab.device_faults import FAULTS, build_faulty, place_faults
from support.fake_nvml import FakeGpu, fake_nvml, needs_gcc
from support.nvml_faults import NVML_FAULTS
from support.sick_devices import Outputs, SickNode, sick_node
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.gpu.wedge_events import WedgeEvents
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.sysfs.uevent import Uevent
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.device import Device
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

_KUBELETS_WORD = {HealthState.UNHEALTHY: "Unhealthy", HealthState.UNKNOWN: "Unknown"}


class Kernel:
    """Sends what the test says to who listens for wedged GPUs."""

    def __init__(self) -> None:
        self._sent: list[Uevent] = []

    def pending(self) -> list[Uevent]:
        """Give what was sent, once."""
        sent, self._sent = self._sent, []
        return sent

    def give_up(self, folder: str) -> None:
        """Say that the driver gave up the card in this folder of sysfs."""
        path = f"/{folder.removeprefix('sys/')}/drm/card0"
        self._sent.append(Uevent(action="change", path=path, subsystem="drm", wedged="rebind,bus-reset"))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as running:
        yield running


def _found(drivers: Sequence[DeviceDriver], root: Path) -> list[Device]:
    """What there is, as drivers of the same kind find it."""
    tree = Tree(HardwareSettings(root=str(root)))
    machine = read_machine(tree, "n")
    return [device for driver in drivers for device in type(driver)().discover(tree, machine).devices]


async def _check(node: SickNode, expected: dict[str, tuple[str, HealthState]]) -> None:
    """Wait for what these devices' signs are to say everywhere, and see that nothing is said of
    others.
    """
    kept_back = {name: _KUBELETS_WORD[state] for name, (_, state) in expected.items() if state in _KUBELETS_WORD}

    outputs = await node.outputs({name: reason for name, (reason, _) in expected.items()}, kept_back)

    counts = Counter(expected.values())
    # A function that the kernel gave up is told of its fatal error first.
    counts.update(
        (reason.replace("recovery-failed", "aer-fatal"), state)
        for reason, state in expected.values()
        if reason.endswith("recovery-failed")
    )
    assert outputs == Outputs(
        events=expected, pod_status=kept_back, unlisted=frozenset(kept_back), tainted=frozenset(kept_back)
    )
    assert await node.counts(dict(counts)) == counts


@pytest.mark.parametrize("device_class", ["gpu", "nic", "fpga", "cpu"])
async def test_each_recorded_fault_flips_its_devices_alone_on_every_road(
    nats_server: NatsServer, server: ApiServerSimulator, tmp_path: Path, device_class: str
) -> None:
    """All faults of a class at once, each on a card of its own: what is told is what was struck,
    and no more.
    """
    machine, kernel = build_faulty(tmp_path / "machine"), Kernel()
    drivers: dict[str, list[DeviceDriver]] = {
        "gpu": [NvidiaDriver(), AmdDriver(), IntelDriver(WedgeEvents(lambda _: kernel))],
        "nic": [PciNetdevDriver()],
        "fpga": [IntelDflDriver(), XilinxDriver()],
        "cpu": [LinuxCpuDriver()],
    }
    all_devices = _found(drivers[device_class], machine.root)
    placed = place_faults(machine, all_devices, [fault for fault in FAULTS if fault.device_class == device_class])
    async with sick_node(nats_server.url, server, machine.root, tmp_path, drivers[device_class]) as node:
        assert len(await node.inventory_of(len(all_devices))) == len(all_devices)
        for placed_fault in placed:
            placed_fault.strike()
            if placed_fault.fault.act == "tell":
                kernel.give_up(machine.folder(str(placed_fault.devices[0].pci)))

        await _check(
            node,
            {
                name: (placed_fault.fault.code, placed_fault.fault.state)
                for placed_fault in placed
                for name in placed_fault.names
            },
        )


@needs_gcc
async def test_each_sign_of_nvml_flips_its_gpu_alone_on_every_road(
    nats_server: NatsServer, server: ApiServerSimulator, tmp_path: Path
) -> None:
    """The same for what NVML tells, each of another GPU, by a library of a profile and the real
    pynvml.
    """
    machine = build_faulty(tmp_path / "machine")
    addresses = machine.pci("h100")
    names = [f"gpu-{address.replace(':', '-').replace('.', '-')}" for address in addresses]
    with ExitStack() as stack:
        before = [fault.before for fault in NVML_FAULTS]
        before += [{} for _ in addresses[len(before) :]]
        gpus = [
            FakeGpu(address=at, minor=minor, uuid=f"GPU-{minor}", **before[minor]) for minor, at in enumerate(addresses)
        ]
        library = stack.enter_context(fake_nvml(tmp_path / "lib", *gpus))
        async with sick_node(
            nats_server.url, server, machine.root, tmp_path, [NvidiaDriver()], library_path=str(library.folder)
        ) as node:
            await node.inventory_of(len(addresses))
            for address, fault in zip(addresses, NVML_FAULTS, strict=False):
                library.set(address, **fault.after)

            await _check(
                node, {name: (fault.code, fault.state) for name, fault in zip(names, NVML_FAULTS, strict=False)}
            )
