"""Each sign of a sick GPU, as one recorded fault: it flips exactly its device, in the inventory, by an event and in the metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.device_bench import PROFILES, DeviceBench, states
from support.fake_nvml import FakeGpu, FakeNvml, fake_nvml, needs_gcc
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.health import HealthSettings
from topobus.domain.device import Device, Inventory
from topobus.domain.health import HealthState
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.runtime.bus import Bus
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree

pytestmark = pytest.mark.integration

_LINKS = ("switch 5 0", "switch 5 0")
_FABRIC_OK, _ROUTE_UNHEALTHY, _DEGRADED_BW = 0x2A, 0x1A, 0x29


@dataclass(frozen=True)
class Fault:
    """One recorded fault: what stands there before, what is written, and what is to be seen."""

    reason: str
    state: HealthState
    changes: dict[str, object]
    before: dict[str, object]


def _nvml(reason: str, state: HealthState, before: dict[str, object] | None = None, **changes: object) -> object:
    return pytest.param(Fault(reason, state, changes, before or {}), id=f"{reason}-{state}", marks=needs_gcc)


@pytest.mark.parametrize(
    "fault",
    [
        _nvml("ecc-uncorrected", HealthState.UNHEALTHY, ecc=(0, 2)),
        _nvml("page-retirement-pending", HealthState.DEGRADED, {"retired": 0}, retired=1),
        _nvml("row-remap-pending", HealthState.DEGRADED, rows=(0, 1, 1, 0)),
        _nvml("row-remap-failed", HealthState.UNHEALTHY, rows=(0, 1, 0, 1)),
        _nvml("recovery-advised", HealthState.UNHEALTHY, recovery=1),
        _nvml("thermal-slowdown", HealthState.DEGRADED, clocks=0x40),
        _nvml("nvlink-down", HealthState.DEGRADED, {"links": _LINKS}, links=("switch 5 0", "down")),
        _nvml("nvlink-errors", HealthState.DEGRADED, {"links": _LINKS}, links=("switch 5 0", "switch 5 1")),
        _nvml("nvlink-errors", HealthState.DEGRADED, {"links": _LINKS}, links=("switch 105 0", "switch 5 0")),
        _nvml("fabric-not-ready", HealthState.UNHEALTHY, {"fabric": (3, 0, _FABRIC_OK)}, fabric=(2, 0, 0)),
        _nvml("fabric-failed", HealthState.UNHEALTHY, {"fabric": (3, 0, _FABRIC_OK)}, fabric=(3, 999, _FABRIC_OK)),
        _nvml("fabric-failed", HealthState.UNHEALTHY, {"fabric": (3, 0, _FABRIC_OK)}, fabric=(3, 0, _ROUTE_UNHEALTHY)),
        _nvml("fabric-degraded", HealthState.DEGRADED, {"fabric": (3, 0, _FABRIC_OK)}, fabric=(3, 0, _DEGRADED_BW)),
        _nvml("xid", HealthState.UNHEALTHY, events=((1, 8, 79),)),
        _nvml("gpu-lost", HealthState.UNHEALTHY, error=15),
        _nvml("unmonitored", HealthState.UNKNOWN, error=999),
    ],
)
async def test_sign_of_nvml_flips_its_gpu_alone(bus: Bus, nats_server: NatsServer, tmp_path: Path, fault: Fault) -> None:
    """What NVML tells of the first GPU is its condition, event and count; the second one stays Healthy without an event."""
    recorded = build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    addresses = recorded.pci("h100")
    with ExitStack() as stack:
        gpus = [FakeGpu(address=address, minor=minor, uuid=f"GPU-{minor}", **fault.before) for minor, address in enumerate(addresses)]  # type: ignore[arg-type]  # fields of FakeGpu
        library: FakeNvml = stack.enter_context(fake_nvml(tmp_path / "lib", *gpus))
        bench = DeviceBench(bus, nats_server.url, recorded)
        bench.hardware = HardwareSettings(root=str(recorded.root), rescan_s=0.2, library_path=str(library.folder))

        await _check(bench, NvidiaDriver(), addresses[0], fault, lambda: library.set(addresses[0], **fault.changes))


def _write(recorded: RecordedMachine, address: str, files: dict[str, object]) -> None:
    for path, text in files.items():
        recorded.write(f"sys/bus/pci/devices/{address}/{path}", str(text))


_AMD = [
    Fault("ras-uncorrected", HealthState.UNHEALTHY, {"ras/umc_err_count": "ue: 1\nce: 4"}, {"ras/umc_err_count": "ue: 0\nce: 4"}),
    Fault("ras-uncorrected", HealthState.UNHEALTHY, {"ras/gfx_err_count": "ue: 3\nce: 0"}, {"ras/gfx_err_count": "ue: 2\nce: 0"}),
    Fault(
        "too-hot",
        HealthState.UNHEALTHY,
        {"hwmon/hwmon3/temp2_input": 105000},
        {"hwmon/hwmon3/temp2_input": 60000, "hwmon/hwmon3/temp2_crit": 105000},
    ),
]


@pytest.mark.parametrize("fault", _AMD, ids=["umc", "gfx", "hwmon"])
async def test_sign_of_amdgpu_flips_its_gpu_alone(bus: Bus, nats_server: NatsServer, tmp_path: Path, fault: Fault) -> None:
    """A rise of uncorrected errors in any block, and a sensor at its critical temperature; what stood there before is no news."""
    recorded = build(PROFILES / "mi210-pair.toml", tmp_path / "machine")
    addresses = [device.pci for device in _devices(AmdDriver(), recorded)]
    for address in addresses:
        _write(recorded, str(address), fault.before)
    bench = DeviceBench(bus, nats_server.url, recorded)

    await _check(bench, AmdDriver(), str(addresses[0]), fault, lambda: _write(recorded, str(addresses[0]), fault.changes))


_INTEL = [
    Fault("survivability-mode", HealthState.UNHEALTHY, {"survivability_mode": "Survivability mode: Boot"}, {}),
    Fault("too-hot", HealthState.UNHEALTHY, {"hwmon/hwmon1/temp1_input": 100000}, {"hwmon/hwmon1/temp1_crit": 100000}),
]


@pytest.mark.parametrize("fault", _INTEL, ids=["survivability", "hwmon"])
async def test_sign_of_xe_flips_its_gpu(bus: Bus, nats_server: NatsServer, tmp_path: Path, fault: Fault) -> None:
    """The file of the mode is there in this mode alone."""
    recorded = build("laptop", tmp_path / "machine")
    (device,) = _devices(IntelDriver(), recorded)
    _write(recorded, str(device.pci), fault.before)
    bench = DeviceBench(bus, nats_server.url, recorded)

    await _check(bench, IntelDriver(), str(device.pci), fault, lambda: _write(recorded, str(device.pci), fault.changes))


def _devices(driver: DeviceDriver, recorded: RecordedMachine) -> Sequence[Device]:
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    return driver.discover(tree, read_machine(tree, "n1"))


async def _check(bench: DeviceBench, driver: DeviceDriver, address: str, fault: Fault, strike: Callable[[], None]) -> None:
    """Start with all well, strike, and look at all that tells of it."""
    sick = f"gpu-{address.replace(':', '-').replace('.', '-')}"
    await bench.publish_machine()
    # Once sick it stays so for the length of the test: a rise is seen at one look alone.
    async with bench.service(driver, timeout_s=60.0, health=HealthSettings(poll_s=0.05, hold_s=3600.0)):
        await bench.inventory(_all_are_well)
        strike()
        event = await bench.event(lambda event: event.device == sick and event.health.state is fault.state)
        inventory = await bench.inventory(lambda inventory: inventory.generation >= event.inventory_generation)
        healthy = bench.metrics.get_sample_value("topobus_gpu_devices", {"state": "healthy"})
        others = [name for name in states(inventory) if name != sick]
        states_told = [event.health.state for name in others for event in await bench.events(name)]

    assert event.health.worst is not None
    assert event.health.worst.reason == fault.reason
    # Silence is no evidence; everything else has some.
    assert event.health.worst.evidence or fault.state is HealthState.UNKNOWN
    assert states_told == [HealthState.HEALTHY] * len(others)
    assert {states(inventory)[name] for name in others} <= {HealthState.HEALTHY}
    # A mild sign that is a rise is over with the next look; all others last.
    assert healthy == len(others) or fault.reason == "nvlink-errors"


def _all_are_well(inventory: Inventory) -> bool:
    return bool(inventory.devices) and set(states(inventory).values()) == {HealthState.HEALTHY}
