"""A physical function that obeys what is written into its sriov_numvfs, as the PCI core and a NIC's
or GPU's driver do.

The thread of `KernelWrites` brings the writes. Folders of virtual functions appear with their
links, and what their driver shows: an interface, a render node, or nothing. A real one adds the
functions at once, binds their driver a moment later, and shows what that makes a moment after that.
Meanwhile the physical function's link comes up again. One that `is_slow` does each of these on
`go_on`, any other one does all in the write.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from support.kernel_writes import KernelWrites
from support.sysfs_trees import write
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

__all__ = ["PHYSICAL", "SriovKernel", "nic_files", "virtual_address"]

PHYSICAL = PciAddress.parse("0000:3b:00.0")
_OFFSET, _STRIDE = 16, 1


def nic_files(folder: str, index: int) -> dict[str, object]:
    """Give what a NIC's driver shows of a function; -1 is the physical one."""
    name = "ens1" if index < 0 else f"ens1v{index}"
    return {f"{folder}/net/{name}/flags": "0x1002", f"{folder}/net/{name}/address": f"02:00:00:00:00:{index + 1:02x}"}


def virtual_address(index: int) -> PciAddress:
    """Say where a virtual function comes."""
    return PciAddress(0, 0x3B, 2 + index // 8, index % 8)


class SriovKernel:
    """One card."""

    def __init__(
        self,
        root: Path,
        *,
        total: int = 8,
        vendor: int = 0x8086,
        device: int = 0x1592,
        class_code: int = 0x020000,
        driver: str = "ice",
        files: Callable[[str, int], dict[str, object]] = nic_files,
    ) -> None:
        """Write the card, without virtual functions."""
        self.root = root
        self.writes: list[int] = []
        """Each number that was obeyed."""
        self.is_stuck = False
        self.is_slow = False
        self.on_ready: Callable[[PciAddress], None] = lambda _address: None
        """Told of each virtual function that shows what its driver makes."""
        self._lock = threading.Lock()
        self._driver = driver
        self._files = files
        self._total = total
        self.physical = PciDevice(
            address=PHYSICAL,
            vendor=vendor,
            device=device,
            class_code=class_code,
            numa_node=0,
            root="pci0000:3a",
            driver=driver,
        )
        folder = self._folder(PHYSICAL)
        write(
            root,
            {
                f"{folder}/sriov_totalvfs": total,
                f"{folder}/sriov_numvfs": 0,
                f"{folder}/sriov_offset": _OFFSET,
                f"{folder}/sriov_stride": _STRIDE,
                f"{folder}/sriov_vf_device": "1889",
                f"{folder}/sriov_drivers_autoprobe": 1,
                f"sys/bus/pci/drivers/{driver}/module": "",
                **files(folder, -1),
            },
        )
        (root / folder / "driver").symlink_to(os.path.relpath(root / f"sys/bus/pci/drivers/{driver}", root / folder))

    @property
    def machine(self) -> Machine:
        """The machine as discovery published it before anything was cut: it learns of virtual
        functions later.
        """
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        return Machine(node="n1", numa_nodes=(node,), cpus=(), pci_devices=(self.physical,))

    @property
    def number(self) -> int:
        """The content of the file."""
        return int((self.root / self._folder(PHYSICAL) / "sriov_numvfs").read_text())

    def follow(self, writes: KernelWrites) -> None:
        """Obey writes from now on."""
        writes.obey(f"{self._folder(PHYSICAL)}/sriov_numvfs", self._take)

    def set_number(self, number: int) -> None:
        """Change the number as somebody else does, or a reboot."""
        with self._lock:
            write(self.root, {f"{self._folder(PHYSICAL)}/sriov_numvfs": number})
            self._change(number)
            while self.go_on():
                pass

    def _take(self, text: str) -> None:
        # Empty while a next write is under way: to sysfs no bytes are no write, and
        # the event of that write follows.
        if text:
            with self._lock:
                self._change(int(text))

    def _change(self, number: int) -> None:
        folder = self.root / self._folder(PHYSICAL)
        present = len(list(folder.glob("virtfn*")))
        if number == present or self.is_stuck:
            return
        self.writes.append(number)
        for index in range(present):
            (folder / f"virtfn{index}").unlink()
            shutil.rmtree(self.root / self._folder(virtual_address(index)))
        for index in range(number):
            virtual = self._folder(virtual_address(index))
            write(self.root, {f"{virtual}/vendor": "0x8086"})
            (self.root / virtual / "physfn").symlink_to(f"../{PHYSICAL}")
            (folder / f"virtfn{index}").symlink_to(f"../{virtual_address(index)}")
        self._set_carrier(0)
        while not self.is_slow and self.go_on():
            pass

    def go_on(self) -> bool:
        """Do what comes next for virtual functions that are not ready yet.

        False: nothing is left to do. It reads what is there, so that a
        copy of the process may do it.
        """
        folder = self.root / self._folder(PHYSICAL)
        parts = {index: self._folder(virtual_address(index)) for index in range(len(list(folder.glob("virtfn*"))))}
        if self.is_stuck or (folder / "sriov_drivers_autoprobe").read_text().strip() == "0":
            return False
        if driverless := [virtual for virtual in parts.values() if not (self.root / virtual / "driver").is_symlink()]:
            for virtual in driverless:
                (self.root / virtual / "driver").symlink_to(f"../../drivers/{self._driver}")
            return True
        shown = [self._files(virtual, index) for index, virtual in parts.items()]
        made = [index for index, files in enumerate(shown) if not all((self.root / path).exists() for path in files)]
        for index in made:
            write(self.root, shown[index])
            self.on_ready(virtual_address(index))
        self._set_carrier(1)
        return bool(made)

    def _set_carrier(self, carrier: int) -> None:
        for file in (self.root / self._folder(PHYSICAL)).glob("net/*/carrier"):
            file.write_text(f"{carrier}\n")

    def _folder(self, address: PciAddress) -> str:
        return f"sys/bus/pci/devices/{address}"
