"""The PCI bus's drivers on a recorded machine: which function a driver binds and releases, by the
files that the kernel has for it.

It reacts to writes to `driver_override`, `bind`, `unbind` and `drivers_probe`. The results are
links between functions and drivers, and for drivers of VFIO the nodes of the group and of the
function. What a function shows only while its own driver has it (`net`, `drm`, a node in /dev) is
put aside meanwhile.
Source: drivers/pci/pci-driver.c (pci_match_device), drivers/base/bus.c (bind_store, unbind_store),
drivers/vfio/vfio_main.c (vfio-dev).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support.kernel_writes import KernelWrites

__all__ = ["PciDrivers"]

_BUS = "sys/bus/pci"
_ASIDE = ".unbound"
# What the kernel shows of a function without an override.
_NONE = "(null)\n"


@dataclass(kw_only=True)
class _Function:
    address: str
    own_driver: str
    """The one whose id table has it."""
    group: int | None
    shown: tuple[str, ...] = ()
    override: str = ""
    vfio: list[int] = field(default_factory=list)


class PciDrivers:
    """The driver core of one machine's PCI bus."""

    def __init__(self, kernel: KernelWrites) -> None:
        """Take the kernel that reacts to writes of this machine."""
        self._kernel = kernel
        self._root = kernel.root
        self._functions: dict[str, _Function] = {}
        self._loaded: set[str] = set()
        self._refusing: set[str] = set()
        self._numbers = 0
        self.log: list[str] = []
        """What drivers did, in order: `vfio-pci takes 0000:0a:00.0`."""
        (self._root / _BUS / "drivers").mkdir(parents=True, exist_ok=True)
        kernel.obey(f"{_BUS}/drivers_probe", lambda text: self._probe(text.strip()), is_write_only=True)

    def add_driver(self, name: str) -> None:
        """Load a driver."""
        folder = self._root / _BUS / "drivers" / name
        if name in self._loaded:
            return
        self._loaded.add(name)
        folder.mkdir(exist_ok=True)
        self._kernel.obey(f"{_BUS}/drivers/{name}/bind", partial(self._asked, name, self._bind), is_write_only=True)
        self._kernel.obey(f"{_BUS}/drivers/{name}/unbind", partial(self._asked, name, self._unbind), is_write_only=True)

    def refuse(self, name: str) -> None:
        """Let a driver bind nothing: its probe fails."""
        self._refusing.add(name)

    def accept(self, name: str) -> None:
        """Let it bind again."""
        self._refusing.discard(name)

    def add_function(self, address: str, own_driver: str, *, group: int | None, shown: Iterable[str] = ()) -> None:
        """Add a function that its own driver holds.

        Shapes: own_driver — empty: none knows it; group — of the IOMMU, None: there is no IOMMU;
        shown — paths below the root that are there while its own driver has it.
        """
        function = _Function(address=address, own_driver=own_driver, group=group, shown=tuple(shown))
        self._functions[address] = function
        folder = self._folder(address)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "driver_override").write_text(_NONE)
        self._kernel.obey(f"{_BUS}/devices/{address}/driver_override", partial(self._set_override, function))
        if group is not None:
            members = self._root / f"sys/kernel/iommu_groups/{group}/devices"
            members.mkdir(parents=True, exist_ok=True)
            _link(members / address, folder)
            _link(folder / "iommu_group", members.parent)
        (folder / "driver").unlink(missing_ok=True)
        if own_driver:
            self.add_driver(own_driver)
            self._take(own_driver, function)

    def driver_of(self, address: str) -> str:
        """Name the driver that has a function. Empty when none has."""
        link = self._folder(address) / "driver"
        return os.readlink(link).rpartition("/")[2] if link.is_symlink() else ""

    def override_of(self, address: str) -> str:
        """Name the driver that alone may have a function. Empty when there is no override."""
        return self._functions[address].override

    def _asked(self, driver: str, act: Callable[[str, _Function], None], text: str) -> None:
        function = self._functions.get(text.strip())
        if function is not None:
            act(driver, function)

    @staticmethod
    def _set_override(function: _Function, text: str) -> None:
        # The file is left as it was written, so a removed override shows nothing in place of
        # "(null)". If the file were replaced, text written meanwhile would be lost, and the text
        # put there would itself be taken for a write.
        function.override = text.split("\n")[0]

    def _probe(self, address: str) -> None:
        function = self._functions.get(address)
        if function is not None and (function.override or function.own_driver):
            self._bind(function.override or function.own_driver, function)

    def _bind(self, driver: str, function: _Function) -> None:
        is_match = driver == function.override if function.override else driver == function.own_driver
        is_able = driver not in self._refusing and (self._root / _BUS / "drivers" / driver).is_dir()
        if is_match and is_able and not self.driver_of(function.address):
            self._take(driver, function)

    def _unbind(self, driver: str, function: _Function) -> None:
        if self.driver_of(function.address) != driver:
            return
        self.log.append(f"{driver} leaves {function.address}")
        if driver == function.own_driver:
            self._put_aside(function)
        for number in function.vfio:
            (self._root / f"dev/vfio/devices/vfio{number}").unlink()
        function.vfio.clear()
        shutil.rmtree(self._folder(function.address) / "vfio-dev", ignore_errors=True)
        if not any(other.vfio for other in self._functions.values() if other.group == function.group):
            (self._root / f"dev/vfio/{function.group}").unlink(missing_ok=True)
        (self._root / _BUS / "drivers" / driver / function.address).unlink()
        (self._folder(function.address) / "driver").unlink()

    def _take(self, driver: str, function: _Function) -> None:
        self.log.append(f"{driver} takes {function.address}")
        folder = self._folder(function.address)
        _link(self._root / _BUS / "drivers" / driver / function.address, folder)
        _link(folder / "driver", self._root / _BUS / "drivers" / driver)
        if driver == function.own_driver:
            self._show(function)
        if driver.replace("_", "-").endswith("vfio-pci") and function.group is not None:
            function.vfio.append(self._numbers)
            (folder / f"vfio-dev/vfio{self._numbers}").mkdir(parents=True)
            for node in (f"dev/vfio/{function.group}", "dev/vfio/vfio", f"dev/vfio/devices/vfio{self._numbers}"):
                (self._root / node).parent.mkdir(parents=True, exist_ok=True)
                (self._root / node).touch()
            self._numbers += 1

    def _put_aside(self, function: _Function) -> None:
        for index, path in enumerate(function.shown):
            aside = self._root / _ASIDE / function.address / str(index)
            aside.parent.mkdir(parents=True, exist_ok=True)
            (self._root / path).rename(aside)

    def _show(self, function: _Function) -> None:
        for index, path in enumerate(function.shown):
            aside = self._root / _ASIDE / function.address / str(index)
            if aside.exists():
                aside.rename(self._root / path)

    def _folder(self, address: str) -> Path:
        return (self._root / _BUS / "devices" / address).resolve()


def _link(link: Path, target: Path) -> None:
    """Make a relative link, as sysfs does, which leads the same way wherever the tree lies."""
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
