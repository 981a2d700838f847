"""What people graph of GPUs: NVML through the real pynvml, and the files of amdgpu, i915 and xe."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml
import pytest

from support.fake_nvml import GIB, IDLE_BYTES, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.kfd_machines import NODES, KfdMachine, folder
from support.mig_node import mig_node
from support.sysfs_trees import write
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import PartitionSettings
from topobus.gpu.nvml.nvml import Nvml, load_nvml
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading

FIRST = PciAddress.parse("0000:18:00.0")
FOLDER = f"sys/bus/pci/devices/{FIRST}"
DEVICE = Device(name="gpu-0000-18-00-0", device_class="gpu", pci=FIRST)


def _values(readings: Sequence[Reading]) -> dict[str, float]:
    assert len({(reading.quantity, reading.part) for reading in readings}) == len(readings)
    return {f"{reading.quantity} {reading.part}".strip(): round(reading.value, 6) for reading in readings}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[FakeNvml]:
    """A busy GPU with NVLinks."""
    busy = FakeGpu(
        address=str(FIRST),
        use=(87, 41),
        power=(613_400, 5_000_000),
        temperature=(66, 81),
        frequency=(1980, 2619),
        pcie=(7_000_000_000, 9_000),
        nvlink=(3, 2),
        ecc=(5, 1),
    )
    with fake_nvml(tmp_path / "lib", busy) as fake:
        yield fake


def _session(library: FakeNvml) -> Nvml:
    nvml = load_nvml(Tree(HardwareSettings(root=str(library.folder), library_path=str(library.folder))))
    nvml.describe([FIRST])
    return nvml


@needs_gcc
def test_nvml_readings_have_plain_units_when_the_gpu_tells_all(library: FakeNvml) -> None:
    """Shares, watts, joules, hertz and bytes, in place of percent, milliwatts, MHz and KiB."""
    assert _values(_session(library).readings(FIRST)) == {
        "utilization_ratio": 0.87,
        "memory_utilization_ratio": 0.41,
        "memory_used_bytes": IDLE_BYTES,
        "memory_size_bytes": 80 * GIB,
        "power_watts": 613.4,
        "energy_joules_total": 5000,
        "temperature_celsius core": 66,
        "temperature_celsius memory": 81,
        "clock_hertz core": 1.98e9,
        "clock_hertz memory": 2.619e9,
        "sent_bytes_total pcie": 7_000_000_000,
        "received_bytes_total pcie": 9_000,
        "sent_bytes_total nvlink": 3072,
        "received_bytes_total nvlink": 2048,
        "memory_errors_total corrected": 5,
        "memory_errors_total uncorrected": 1,
    }


@needs_gcc
def test_nvml_reading_is_absent_when_the_gpu_does_not_support_it(library: FakeNvml) -> None:
    """A card for workstations without ECC, NVLink and counters of PCIe: none of these is 0."""
    library.set(str(FIRST), use=None, power=None, temperature=None, frequency=None, pcie=None, nvlink=None, ecc=None)

    assert set(_values(_session(library).readings(FIRST))) == {"memory_used_bytes", "memory_size_bytes"}


@needs_gcc
def test_nvml_gives_no_readings_when_the_session_is_no_longer_valid(library: FakeNvml) -> None:
    """The last ones are old by then."""
    nvml = _session(library)
    library.end_session(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    nvml.observe([FIRST])

    assert nvml.readings(FIRST) == []


@needs_gcc
@pytest.mark.parametrize("on_demand", [False, True], ids=["static", "made for a claim"])
def test_mig_instance_has_the_reading_of_its_memory_alone(tmp_path: Path, on_demand: bool) -> None:
    """A GPU before Hopper tells nothing else of an instance. One that is not made yet has no
    reading.
    """
    with mig_node(tmp_path) as node:
        node.driver.configure(HostServices(partitions=PartitionSettings(on_demand=on_demand)))
        name = f"{node.parent}-mig-3g-40gb-4"
        node.make("3g.40gb", 4)
        devices = node.discover()

        seen = node.driver.measure(node.tree, list(devices.values()))

        instances = {each: set(_values(readings)) for each, readings in seen.items() if each.startswith(node.parent)}
        assert instances == {name: {"memory_used_bytes", "memory_size_bytes"}}
        assert seen[name][1].value < 41 * GIB


@needs_gcc
def test_mig_instance_has_its_use_from_the_second_reading_on(tmp_path: Path) -> None:
    """NVML compares two samples of a GPU instance. Compute instances that are parts of one have no
    use of their own, and another instance in its place begins again.
    """
    with mig_node(tmp_path) as node:
        whole, cut = node.make("3g.40gb", 4), node.make("2g.20gb", 0, computes=(0, 0))
        node.library.set(node.first, instances=((whole, 2, 75), (cut, 0, 30)))
        devices = list(node.discover().values())
        names = [f"{node.parent}-mig-3g-40gb-4", *(device.name for device in devices if "1c-2g" in device.name)]

        first = [_values(node.driver.measure(node.tree, devices)[name]) for name in names]
        second = [_values(node.driver.measure(node.tree, devices)[name]) for name in names]
        state = node.library.folder / "mig-state"
        state.write_text(re.sub(r"(?m)^(ci .*) \d+$", r"\1 4711", state.read_text()))
        others = node.discover()
        third = [_values(node.driver.measure(node.tree, list(others.values()))[names[0]]) for _ in range(2)]

    assert len(names) == 3
    assert others[names[0]].uuid != next(device.uuid for device in devices if device.name == names[0])
    assert [each.get("utilization_ratio") for each in third] == [None, 0.75]
    assert [each["memory_errors_total uncorrected"] for each in first] == [2, 0, 0]
    assert [each.get("utilization_ratio") for each in (*first, *second)] == [None, None, None, 0.75, None, None]


def test_nvidia_driver_gives_no_readings_without_nvml(tmp_path: Path) -> None:
    """Sysfs and /proc have none."""
    assert NvidiaDriver().measure(write(tmp_path, {}), [DEVICE]) == {}


def test_amd_readings_come_from_the_files_of_amdgpu(tmp_path: Path) -> None:
    """The files of an MI210: `edge` is the core, and `junction` is not a second one."""
    tree = write(
        tmp_path,
        {
            f"{FOLDER}/gpu_busy_percent": 99,
            f"{FOLDER}/mem_busy_percent": 12,
            f"{FOLDER}/mem_info_vram_used": 10_854_400,
            f"{FOLDER}/mem_info_vram_total": 68_702_699_520,
            f"{FOLDER}/ras/umc_err_count": "ue: 1\nce: 7",
            f"{FOLDER}/hwmon/hwmon6/power1_average": 91_000_000,
            f"{FOLDER}/hwmon/hwmon6/temp1_input": 45_000,
            f"{FOLDER}/hwmon/hwmon6/temp1_label": "edge",
            f"{FOLDER}/hwmon/hwmon6/temp2_input": 52_000,
            f"{FOLDER}/hwmon/hwmon6/temp2_label": "junction",
            f"{FOLDER}/hwmon/hwmon6/temp3_input": 58_000,
            f"{FOLDER}/hwmon/hwmon6/temp3_label": "mem",
            f"{FOLDER}/hwmon/hwmon6/freq1_input": 1_700_000_000,
            f"{FOLDER}/hwmon/hwmon6/freq1_label": "sclk",
        },
    )

    assert _values(AmdDriver().measure(tree, [DEVICE])[DEVICE.name]) == {
        "utilization_ratio": 0.99,
        "memory_utilization_ratio": 0.12,
        "memory_used_bytes": 10_854_400,
        "memory_size_bytes": 68_702_699_520,
        "memory_errors_total corrected": 7,
        "memory_errors_total uncorrected": 1,
        "power_watts": 91,
        "temperature_celsius core": 45,
        "temperature_celsius memory": 58,
        "clock_hertz core": 1.7e9,
    }


def _table(minor: int, begin: int, size: int, *busy: tuple[int, ...]) -> bytes:
    """A card's `gpu_metrics` with the percents of each partition's dies, and no other number."""
    parts = b"".join(struct.pack(f"<{len(dies)}I", *dies).ljust(size, b"\xff") for dies in busy)
    table = begin * b"\xff" + parts.ljust(8 * size, b"\xff") + 8 * b"\xff"
    return struct.pack("<HBB", len(table), 1, minor) + table[4:]


@pytest.mark.parametrize(
    ("minor", "begin", "size", "total"), [(6, 312, 168, 1664), (7, 344, 232, 2208), (8, 344, 376, 3360)]
)
def test_amd_partition_has_its_own_use_and_memory(
    tmp_path: Path, minor: int, begin: int, size: int, total: int
) -> None:
    """The use is the mean of its dies, where there is one. Its memory in use is what processes have
    of it. Nothing of the card is shown of a partition: eight would show eight times its power.
    """
    machine = KfdMachine(tmp_path, "mi308x-cpx", mode="CPX", memory_mode="NPS1", most_cards=1)
    card = folder(machine.addresses[0])
    table = _table(minor, begin, size, (50,), (100, 0), (), (0,))
    machine.write({f"{card}/gpu_busy_percent": 5, f"sys/class/kfd/kfd/proc/11/vram_{_gpu_id(machine, 1)}": 3 * GIB})
    tree = machine.write({f"sys/class/kfd/kfd/proc/12/vram_{_gpu_id(machine, number)}": GIB for number in (0, 1)})
    (machine.root / card / "gpu_metrics").write_bytes(table)
    driver = AmdDriver()
    devices = driver.discover(tree, machine.machine).devices

    readings = [_values(driver.measure(tree, devices)[device.name]) for device in devices]

    assert len(table) == total
    assert [each.get("utilization_ratio") for each in readings] == [0.5, 0.5, None, 0]
    assert [each["memory_used_bytes"] for each in readings] == [GIB, 4 * GIB, 0, 0]
    assert [each["memory_size_bytes"] for each in readings] == [device.capacity["memory"] for device in devices]
    assert {name for each in readings for name in each} == {
        "utilization_ratio",
        "memory_used_bytes",
        "memory_size_bytes",
    }


@pytest.mark.parametrize(
    "table", [b"", b"\x01", _table(5, 312, 168, (50,)), _table(9, 344, 376, (50,)), _table(6, 312, 168, (50,))[:320]]
)
def test_amd_partition_has_no_use_when_the_table_of_the_card_has_none(tmp_path: Path, table: bytes) -> None:
    """Nor has it memory in use where KFD lists no processes, or a partition that is gone anything."""
    machine = KfdMachine(tmp_path, "mi308x-cpx", mode="CPX", memory_mode="NPS1", most_cards=1)
    (machine.root / folder(machine.addresses[0]) / "gpu_metrics").write_bytes(table)
    driver = AmdDriver()
    devices = driver.discover(machine.tree, machine.machine).devices
    machine.remove_nodes(keep=3)

    assert {name: set(_values(each)) for name, each in driver.measure(machine.tree, devices).items()} == {
        device.name: {"memory_size_bytes"} for device in devices[:3]
    }


def _gpu_id(machine: KfdMachine, number: int) -> str:
    """The id that KFD gives the node of a partition."""
    nodes = machine.root / NODES
    return sorted((each / "gpu_id").read_text().strip() for each in nodes.iterdir() if (each / "gpu_id").exists())[
        number
    ]


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param("tile0/gt0/freq0/act_freq", id="xe"),
        pytest.param("drm/card0/gt/gt0/rps_act_freq_mhz", id="i915"),
    ],
)
def test_intel_readings_come_from_the_files_of_its_drivers(tmp_path: Path, clock: str) -> None:
    """The first energy is the card's, and stands for its power. A sensor that refuses, as that of a
    sleeping card does, costs its own reading alone.
    """
    tree = write(
        tmp_path,
        {
            f"{FOLDER}/drm/card0/dev": "226:0",
            f"{FOLDER}/{clock}": 1550,
            f"{FOLDER}/hwmon/hwmon4/energy1_input": 70_500_000,
            f"{FOLDER}/hwmon/hwmon4/energy2_input": 60_000_000,
            f"{FOLDER}/hwmon/hwmon4/temp2_input": 51_000,
            f"{FOLDER}/hwmon/hwmon4/temp2_label": "pkg",
            f"{FOLDER}/hwmon/hwmon4/temp3_input": "asleep",
            f"{FOLDER}/hwmon/hwmon4/temp3_label": "vram",
            f"{FOLDER}/hwmon/hwmon4/temp9_input": 99_000,
            f"{FOLDER}/hwmon/hwmon4/temp9_label": "pcie",
        },
    )
    device = Device(name=DEVICE.name, device_class="gpu", pci=FIRST, capacity={"memory": 16 * GIB})

    assert _values(IntelDriver().measure(tree, [device])[device.name]) == {
        "clock_hertz core": 1.55e9,
        "memory_size_bytes": 16 * GIB,
        "energy_joules_total": 70.5,
        "temperature_celsius core": 51,
    }
