"""Cards of a recorded machine behind an IOMMU, a kernel that obeys writes, and the hands of a
device service over them: one life after the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.kernel_writes import KernelWrites
from support.looks import other_threads
from support.pci_drivers import PciDrivers
from support.sysfs_trees import write
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import PassthroughRule, PassthroughSettings
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.messages import PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.process.clock import SystemClock
from topobus.process.readiness import Readiness
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

BUS = "sys/bus/pci"
# Two cards in groups of their own, and two functions of one slot that share a group.
FIRST, SECOND, THIRD, FOURTH = "0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0", "0000:0c:00.1"
GROUPS = {FIRST: 41, SECOND: 42, THIRD: 43, FOURTH: 43}
BRIDGE = "0000:00:01.0"
OWNER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="machine", uid="u1")
OTHER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="other", uid="u2")
LIMIT_S = 60.0
ALLOWED = PassthroughSettings(
    allow=(PassthroughRule(where=(Condition(field="name", glob="*"),)),), idle_s=LIMIT_S, switch_s=LIMIT_S
)
ASKED: Mapping[str, Any] = {"apiVersion": "topobus.dev/v1", "kind": "PassthroughParameters"}

_DRIVERS: Mapping[str, tuple[type[DeviceDriver], str, int, int]] = {
    "gpu": (IntelDriver, "i915", 0x8086, 0x038000),
    "nic": (PciNetdevDriver, "mlx5_core", 0x15B3, 0x020000),
    "fpga": (XilinxDriver, "xocl", 0x10EE, 0x120000),
}


class PassthroughBench:
    """Four functions of one class."""

    def __init__(self, root: Path, kernel: KernelWrites, device_class: str = "gpu") -> None:
        """Take the root of the machine, where nothing is yet."""
        make, self.own_driver, vendor, code = _DRIVERS[device_class]
        self.root, self.kernel, self.device_class = root, kernel, device_class
        self.driver = make()
        self.drivers = PciDrivers(kernel)
        self.drivers.add_driver("vfio-pci")
        write(root, {"dev/iommu": "", "dev/vfio/vfio": "", f"{BUS}/devices/{BRIDGE}/class": "0x060400"})
        functions = []
        for index, (address, group) in enumerate(GROUPS.items()):
            folder = f"{BUS}/devices/{address}"
            write(root, {f"{folder}/class": f"{code:#08x}", **_shown_files(device_class, folder, index)})
            self.drivers.add_function(address, self.own_driver, group=group, shown=_shown(device_class, folder))
            functions.append(
                PciDevice(
                    address=PciAddress.parse(address), vendor=vendor, device=1, class_code=code, driver=self.own_driver
                )
            )
        # Each group has the bridge above it, as groups without ACS have.
        self.drivers.add_function(BRIDGE, "pcieport", group=43)
        self.machine = Machine(
            node="n1",
            numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),),
            cpus=(),
            pci_devices=tuple(functions),
        )
        self.tree = Tree(HardwareSettings(root=str(root)))
        self.devices: dict[str, Device] = {
            device.name: device for device in self.driver.discover(self.tree, self.machine).devices
        }
        self.journal_folder = root.parent / "journal"
        self.hands: DeviceHands
        self.preparer: Preparer
        self.passthrough = ALLOWED

    def name(self, address: str) -> str:
        """Name the device of a function."""
        return f"{self.device_class}-{address}".replace(":", "-").replace(".", "-")

    @asynccontextmanager
    async def life(self, *, journal: Journal | None = None) -> AsyncIterator[None]:
        """Start a service that knows these devices, and end it."""
        isolated = {self.driver.name: IsolatedDriver(self.driver, timeout_s=LIMIT_S)}
        journal = journal or Journal(self.journal_folder)
        self.hands = DeviceHands(
            isolated,
            self.tree,
            self.devices.get,
            journal,
            clock=SystemClock(),
            passthrough=self.passthrough,
            wait_s=LIMIT_S,
        )
        self.preparer = Preparer(self.device_class, self.hands, self.devices.get)
        await self.hands.load(Readiness())
        running = asyncio.create_task(self.hands.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            journal.close()

    async def prepare(
        self, *addresses: str, owner: Owner = OWNER, config: Mapping[str, Any] | None = ASKED, **more: Any
    ) -> Any:
        """Ask as the gateway does, again while work continues, and return the result."""
        names = tuple(self.name(address) for address in addresses)
        request = PrepareRequest(
            op_id="", owner=owner, devices=names, config=(dict(config),) if config is not None else (), **more
        )
        async with asyncio.timeout(LIMIT_S):
            while isinstance(result := (await self.preparer.prepare(request)).result, Accepted):
                await other_threads()
        return result

    async def ask(self, address: str) -> Any:
        """Ask once, as `prepare` does."""
        request = PrepareRequest(op_id="", owner=OWNER, devices=(self.name(address),), config=(dict(ASKED),))
        return (await self.preparer.prepare(request)).result

    def look(self) -> None:
        """Let the service know the devices as they are now."""
        self.devices.update(
            {device.name: device for device in self.driver.discover(Tree(self.tree.settings), self.machine).devices}
        )

    async def unprepare(self, *addresses: str, owner: Owner = OWNER) -> Any:
        """Undo that; the refusal, or None."""
        names = tuple(self.name(address) for address in addresses)
        return (await self.preparer.unprepare(UnprepareRequest(op_id="", owner=owner, devices=names))).refusal

    def held_by(self) -> dict[str, str]:
        """Return the kernel driver of each function, after the kernel has done all that was
        requested.
        """
        self.kernel.settle()
        return {address: self.drivers.driver_of(address) for address in GROUPS}

    def overrides(self) -> dict[str, str]:
        """Say which functions are for one driver alone."""
        return {address: override for address in GROUPS if (override := self.drivers.override_of(address))}

    @property
    def is_home(self) -> bool:
        """Say whether each function is with its own driver, as if nothing had been."""
        return set(self.held_by().values()) == {self.own_driver} and not self.overrides()

    def journal_of(self, address: str) -> Mapping[str, Any] | None:
        """Read a device's journal as it is on the disk."""
        path = self.journal_folder / f"{self.name(address)}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def open_node(self, pid: int, program: str, node: str) -> None:
        """Let a process have a device node open."""
        write(self.root, {f"proc/{pid}/comm": program})
        (self.root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        (self.root / f"proc/{pid}/fd/3").symlink_to(f"/dev/{node}")

    def close_node(self, pid: int) -> None:
        """Let it close the node again."""
        (self.root / f"proc/{pid}/fd/3").unlink()


def nodes_of(edits: Any) -> list[str]:
    """Name the device nodes of a prepared claim, common ones last."""
    return [node.path for part in (*edits.edits.values(), edits.common) for node in part.device_nodes]


def codes(result: Any) -> list[str]:
    """Give a refusal's codes."""
    return [reason.code for reason in getattr(result, "reasons", ())]


def _shown(device_class: str, folder: str) -> tuple[str, ...]:
    return {"gpu": (f"{folder}/drm",), "nic": (f"{folder}/net",), "fpga": (f"{folder}/user_pf",)}[device_class]


def _shown_files(device_class: str, folder: str, index: int) -> dict[str, object]:
    if device_class == "gpu":
        return {
            f"{folder}/drm/renderD{128 + index}/dev": f"226:{128 + index}",
            f"{folder}/drm/renderD{128 + index}/uevent": f"DEVNAME=dri/renderD{128 + index}",
        }
    if device_class == "nic":
        return {
            f"{folder}/net/eth{index}/address": f"02:00:00:00:00:0{index}",
            f"{folder}/net/eth{index}/flags": "0x1003",
        }
    return {f"{folder}/user_pf": ""}
