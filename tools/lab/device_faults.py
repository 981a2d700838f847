"""One recorded fault for each sign that a device is sick: what a kernel writes then, to which
device, and what can be seen of it.

The devices are those that the drivers find on the machine of `faulty_machine.toml`. Each fault has
a card of its own, and can be taken back. A test triggers all of them and checks every output.
`python -m lab.bench health` triggers one after another and measures the times. The codes are those
of docs/reference/health-reasons.md.

Faults that no file of a machine can show are not here: those that NVML reports, and those that the
service itself detects (a driver that hangs, a device that is being cleaned).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.net import function_ports
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.pci import PciAddress

__all__ = ["FAULTS", "PlacedFault", "RecordedFault", "build_faulty", "place_faults"]

_PROFILE = Path(__file__).parent / "faulty_machine.toml"
_EDAC = "sys/devices/system/edac/mc"
_COUNTERS = ("rx_crc_errors", "rx_errors", "rx_frame_errors", "rx_length_errors", "tx_carrier_errors", "tx_errors")

Act = Literal[
    "write", "remove", "unbind", "unbind-parent", "forget-parent", "give-up", "give-up-parent", "offline", "tell"
]
"""`tell`: the kernel sends an event and writes nothing. `give-up`: the function was reset, and has no
base addresses any more."""
Reach = Literal["device", "card", "core", "socket"]
"""What it affects: the device, all virtual functions of a card, all CPUs of a core or of a
socket."""


@dataclass(frozen=True)
class RecordedFault:
    """A fault before it is assigned to a card."""

    device_class: str
    driver: str
    code: str
    state: HealthState
    files: Mapping[str, str] = field(default_factory=dict)
    """Path to text. Both may name the card's folders (`_folders`), a text also the file's present
    `{text}`."""
    act: Act = "write"
    reach: Reach = "device"
    is_rise: bool = False
    """A counter rose: the sign is over with the next observation."""


@dataclass(frozen=True, kw_only=True)
class PlacedFault:
    """A fault with its card."""

    fault: RecordedFault
    machine: RecordedMachine
    devices: tuple[Device, ...]
    """The devices that it affects."""
    _undo: list[Callable[[], object]] = field(default_factory=list)
    """What takes it back, the last first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices that it affects."""
        return tuple(device.name for device in self.devices)

    def strike(self) -> None:
        """Cause the fault, as a kernel would."""
        first, act, machine = self.devices[0], self.fault.act, self.machine
        folders = _folders(machine, first)
        if act == "remove":
            # Of an Alveo only the user function, which is the device's own.
            machine.remove_pci(str(first.pci))
            self._undo.append(partial(machine.restore_pci, str(first.pci)))
        elif act in ("unbind", "unbind-parent"):
            self._unlink(machine.root / folders["folder" if act == "unbind" else "parent"] / "driver")
        elif act == "forget-parent":
            self._unlink(machine.root / pci_folder(folders["parent"].rpartition("/")[2]))
        elif act in ("give-up", "give-up-parent"):
            self._lose_addresses(machine.root / folders["folder" if act == "give-up" else "parent"] / "config")
        elif act == "offline":
            machine.set_cpu_online(int(folders["cpu"]), is_online=False)
            self._undo.append(partial(machine.set_cpu_online, int(folders["cpu"]), is_online=True))
        elif act == "tell":
            self._undo.append(partial(_make_again, machine.root / folders["folder"] / "drm"))
        for template, text in self.fault.files.items():
            path = template.format(**folders)
            is_there = (machine.root / path).exists()
            present = machine.read(path) if is_there else ""
            self._undo.append(partial(machine.write, path, present) if is_there else (machine.root / path).unlink)
            machine.write(path, text.format(text=present))

    def heal(self) -> None:
        """Take the fault back: the machine is as it was before. A counter falls, as one that was
        reset does.

        A sign that is sticky stays until an operator forgives it; twice is no error.
        """
        while self._undo:
            self._undo.pop()()

    def _lose_addresses(self, config: Path) -> None:
        before = config.read_bytes()
        self._undo.append(partial(config.write_bytes, before))
        config.write_bytes(before[:0x10] + bytes(6 * 4) + before[0x28:])

    def _unlink(self, link: Path) -> None:
        self._undo.append(partial(link.symlink_to, link.readlink()))
        link.unlink()


def _make_again(folder: Path) -> None:
    """Replace a folder by its copy, as a driver that is bound again makes it again: the event about
    the earlier folder no longer counts.
    """
    earlier = folder.with_name(f"{folder.name}.earlier")
    folder.rename(earlier)
    shutil.copytree(earlier, folder, symlinks=True)
    shutil.rmtree(earlier)


_BAD, _MILD, _BLIND = HealthState.UNHEALTHY, HealthState.DEGRADED, HealthState.UNKNOWN
_NVIDIA, _AMD, _INTEL = ("gpu", "nvidia"), ("gpu", "amd-gpu"), ("gpu", "intel-gpu")
_NETDEV, _LINUX, _XILINX, _DFL = ("nic", "pci-netdev"), ("cpu", "linux-cpu"), ("fpga", "xilinx"), ("fpga", "intel-dfl")


FAULTS: tuple[RecordedFault, ...] = (
    RecordedFault(*_NVIDIA, "fell-off-bus", _BAD, act="remove"),
    RecordedFault(*_NVIDIA, "no-kernel-driver", _BAD, act="unbind"),
    RecordedFault(*_NVIDIA, "aer-fatal", _BAD, {"{folder}/aer_dev_fatal": "TOTAL_ERR_FATAL 1"}, is_rise=True),
    RecordedFault(*_NVIDIA, "aer-nonfatal", _MILD, {"{folder}/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 1"}, is_rise=True),
    RecordedFault(
        *_NVIDIA, "aer-correctable-storm", _MILD, {"{folder}/aer_dev_correctable": "TOTAL_ERR_COR 100"}, is_rise=True
    ),
    RecordedFault(*_NVIDIA, "link-narrow", _MILD, {"{folder}/current_link_width": "4"}),
    RecordedFault(
        *_NVIDIA,
        "gpu-excluded",
        _BAD,
        {"proc/driver/nvidia/gpus/{pci}/information": "{text}\nGPU Excluded:\t Yes"},
    ),
    RecordedFault(*_AMD, "ras-uncorrected", _BAD, {"{folder}/ras/umc_err_count": "ue: 1\nce: 4"}, is_rise=True),
    RecordedFault(*_AMD, "ras-uncorrected", _BAD, {"{folder}/ras/gfx_err_count": "ue: 3\nce: 0"}, is_rise=True),
    RecordedFault(*_AMD, "too-hot", _BAD, {"{folder}/hwmon/hwmon3/temp2_input": "105000"}),
    RecordedFault(*_INTEL, "too-hot", _BAD, {"{folder}/hwmon/hwmon1/temp1_input": "100000"}),
    RecordedFault(*_INTEL, "survivability-mode", _BAD, {"{folder}/survivability_mode": "Survivability mode: Boot"}),
    RecordedFault(*_INTEL, "health-indicator", _BAD, {"{folder}/gpu_health": "critical"}),
    RecordedFault(*_INTEL, "wedged", _BAD, act="tell"),
    RecordedFault(*_NETDEV, "link-slow", _MILD, {"{folder}/current_link_speed": "8.0 GT/s PCIe"}),
    RecordedFault(*_NETDEV, "recovery-failed", _BAD, {"{folder}/aer_dev_fatal": "TOTAL_ERR_FATAL 1"}, act="give-up"),
    RecordedFault(*_NETDEV, "carrier-lost", _BAD, {"{net}/carrier": "0"}),
    RecordedFault(*_NETDEV, "rdma-port-down", _BAD, {"{rdma}/state": "1: DOWN"}),
    RecordedFault(*_NETDEV, "speed-dropped", _MILD, {"{net}/speed": "1000"}),
    RecordedFault(*_NETDEV, "half-duplex", _MILD, {"{net}/duplex": "half"}),
    RecordedFault(*_NETDEV, "link-errors", _MILD, {"{net}/statistics/rx_errors": "100"}, is_rise=True),
    RecordedFault(*_NETDEV, "parent-gone", _BAD, act="forget-parent", reach="card"),
    RecordedFault(*_NETDEV, "parent-no-kernel-driver", _BAD, act="unbind-parent", reach="card"),
    *(
        RecordedFault(*_NETDEV, code, state, {f"{{parent}}/{file}": text}, reach="card", is_rise=file.startswith("aer"))
        for code, state, file, text in (
            ("parent-aer-fatal", _BAD, "aer_dev_fatal", "TOTAL_ERR_FATAL 1"),
            ("parent-aer-nonfatal", _MILD, "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1"),
            ("parent-aer-correctable-storm", _MILD, "aer_dev_correctable", "TOTAL_ERR_COR 100"),
            ("parent-link-narrow", _MILD, "current_link_width", "1"),
            ("parent-link-slow", _MILD, "current_link_speed", "2.5 GT/s PCIe"),
        )
    ),
    RecordedFault(
        *_NETDEV,
        "parent-recovery-failed",
        _BAD,
        {"{parent}/aer_dev_fatal": "TOTAL_ERR_FATAL 1"},
        act="give-up-parent",
        reach="card",
    ),
    RecordedFault(*_NETDEV, "parent-carrier-lost", _BAD, {"{parent_net}/carrier": "0"}, reach="card"),
    RecordedFault(*_LINUX, "device-gone", _BAD, act="offline"),
    RecordedFault(
        *_LINUX,
        "throttled",
        _MILD,
        {"{cpu_folder}/thermal_throttle/core_throttle_count": "9"},
        reach="core",
        is_rise=True,
    ),
    RecordedFault(
        *_LINUX, "memory-errors", _MILD, {f"{_EDAC}/mc{{socket}}/ue_count": "1"}, reach="socket", is_rise=True
    ),
    RecordedFault(
        *_LINUX,
        "memory-corrected-storm",
        _MILD,
        {f"{_EDAC}/mc{{socket}}/ce_count": "103"},
        reach="socket",
        is_rise=True,
    ),
    RecordedFault(
        *_LINUX,
        "memory-pages-lost",
        _MILD,
        {"sys/devices/system/node/node{socket}/memory_failure/total": "1"},
        reach="socket",
        is_rise=True,
    ),
    RecordedFault(*_XILINX, "device-offline", _BAD, {"{folder}/dev_offline": "1"}),
    RecordedFault(*_XILINX, "shell-not-ready", _BAD, {"{folder}/ready": "0x0"}),
    RecordedFault(*_XILINX, "firewall-tripped", _BAD, {"{folder}/firewall.u.1/detected_level": "2"}),
    RecordedFault(*_XILINX, "tree-unreadable", _BLIND, {"{folder}/dev_offline": "nonsense"}),
    RecordedFault(*_XILINX, "user-function-missing", _BAD, act="remove"),
    RecordedFault(*_DFL, "function-crashed", _BAD, {"{port}/afu_id": "f" * 32}),
    RecordedFault(*_DFL, "port-error", _BAD, {"{port}/errors/errors": "0x4"}),
    RecordedFault(*_DFL, "engine-fatal-error", _BAD, {"{engine}/errors/catfatal_errors": "0x1"}),
    RecordedFault(*_DFL, "engine-error", _MILD, {"{engine}/errors/pcie0_errors": "0x1"}),
    RecordedFault(*_DFL, "too-hot", _BAD, {"{engine}/hwmon/hwmon9/temp1_crit_alarm": "1"}),
    RecordedFault(*_DFL, "power-stopped", _BAD, {"{port}/power_state": "0x6"}),
    RecordedFault(*_DFL, "power-throttled", _MILD, {"{port}/power_state": "0x1"}),
    RecordedFault(*_DFL, "power-limited", _MILD, {"{engine}/hwmon/hwmon9/power1_max_alarm": "1"}),
)


def build_faulty(into: Path) -> RecordedMachine:
    """Build the machine, with all files in which its faults will show, and no fault yet."""
    machine = build(_PROFILE, into)
    for function in machine.functions:
        ground: dict[str, str] = {}
        if function.function.nic is not None:
            net = next(iter((into / function.folder / "net").iterdir())).name
            ground = {f"net/{net}/statistics/{name}": "0" for name in _COUNTERS}
        elif function.card == "mi210":
            ground = {"ras/umc_err_count": "ue: 0\nce: 4", "ras/gfx_err_count": "ue: 2\nce: 0"}
            ground |= {"hwmon/hwmon3/temp2_input": "60000", "hwmon/hwmon3/temp2_crit": "105000"}
        elif function.card == "iris-xe":
            ground = {"hwmon/hwmon1/temp1_input": "50000", "hwmon/hwmon1/temp1_crit": "100000", "gpu_health": "ok"}
        for name, text in ground.items():
            machine.write(f"{function.folder}/{name}", text)
    for cpu in machine.online_cpus:
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle/core_throttle_count", "7")
    for socket in range(machine.profile.cpu.sockets):
        for name, text in {"mc_name": "F19h_M01h", "ue_count": "0", "ce_count": "3"}.items():
            machine.write(f"{_EDAC}/mc{socket}/{name}", text)
        # Each socket of it is a NUMA node.
        machine.write(f"sys/devices/system/node/node{socket}/memory_failure/total", "0")
    return machine


def place_faults(
    machine: RecordedMachine, devices: Sequence[Device], faults: Iterable[RecordedFault]
) -> tuple[PlacedFault, ...]:
    """Assign each fault to a card of its own, so that all of them may be triggered at once.

    At least one card of each driver stays healthy.

    Errors: raises ValueError when there are more faults than cards.
    """
    free: dict[tuple[str, str], list[tuple[Device, ...]]] = {
        ("device", driver): [
            (device,)
            for device in devices
            if device.driver == driver and not device.attributes.get("sriovVf") and device.cpu is None
        ]
        for driver in {device.driver for device in devices}
    }
    virtual = [device for device in devices if device.attributes.get("sriovVf")]
    free["card", "pci-netdev"] = [
        tuple(device for device in virtual if device.parent == parent)
        for parent in sorted({device.parent for device in virtual})
    ]
    # By number: the driver reads the file of a core's first CPU.
    cpus = sorted((device for device in devices if device.cpu is not None), key=lambda device: device.cpu or 0)
    sockets = [
        tuple(cpu for cpu in cpus if cpu.socket == socket) for socket in sorted({cpu.socket or 0 for cpu in cpus})
    ]
    free["socket", "linux-cpu"] = sockets[:-1]
    # The last unit of a kind is never assigned.
    single = sockets[-2] if len(sockets) > 1 else ()
    cores = [tuple(cpu for cpu in single if cpu.core == core) for core in sorted({cpu.core or 0 for cpu in single})]
    free["core", "linux-cpu"], free["device", "linux-cpu"] = cores[:2], [(cpu,) for cpu in reversed(single)]
    placed: list[PlacedFault] = []
    for fault in faults:
        units = free[fault.reach, fault.driver]
        if len(units) < 2:
            raise ValueError(f"{fault.code}: no {fault.reach} of {fault.driver} is left")
        placed.append(PlacedFault(fault=fault, machine=machine, devices=units.pop(0)))
    return tuple(placed)


def _folders(machine: RecordedMachine, device: Device) -> dict[str, str]:
    """Map the names of a card's folders to their present paths."""
    if device.cpu is not None:
        cpu_folder = f"sys/devices/system/cpu/cpu{device.cpu}"
        return {"cpu": str(device.cpu), "cpu_folder": cpu_folder, "socket": str(device.socket)}
    tree = Tree(HardwareSettings(root=str(machine.root)))
    address = str(device.pci)
    folder = machine.folder(address)
    folders = {"folder": folder, "pci": address}
    if device.pci is not None and (own := function_ports(tree, device.pci).first) is not None:
        folders["net"] = f"{folder}/net/{own.name}"
    if rdma := tree.names(f"{folder}/infiniband"):
        folders["rdma"] = f"{folder}/infiniband/{rdma[0]}/ports/1"
    if parent := tree.real(f"{folder}/physfn"):
        folders["parent"] = parent
        port = function_ports(tree, PciAddress.parse(parent.rpartition("/")[2])).first
        folders["parent_net"] = f"{parent}/net/{port.name if port is not None else ''}"
    if region := tree.names(f"{folder}/fpga_region"):
        parts = tree.names(f"{folder}/fpga_region/{region[0]}")
        for key, prefix in (("engine", "dfl-fme."), ("port", "dfl-port.")):
            folders[key] = f"{folder}/fpga_region/{region[0]}/{next(part for part in parts if part.startswith(prefix))}"
    return folders
