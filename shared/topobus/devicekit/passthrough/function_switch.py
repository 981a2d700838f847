"""Makes the kernel move a PCI function from one driver to another, by sysfs: `driver_override`,
`unbind`, `bind`.

The kernel does not report the result of a probe, so its state is read after each write. Each act
may be repeated, and `restore` recovers from each state that a crash can leave. Everything here
blocks.
Source: Documentation/ABI/testing/sysfs-bus-pci (driver_override, bind, unbind),
Documentation/driver-api/vfio.rst.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from msgspec import Struct

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["FunctionDriver", "FunctionSwitch"]

_DRIVERS = "sys/bus/pci/drivers"
# What the kernel shows for a function without an override.
_NO_OVERRIDE = "(null)"
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05


class FunctionDriver(Struct, frozen=True, kw_only=True):
    """The kernel driver that has a function, and the only one that may have it."""

    name: str = ""
    """Empty: none has it."""
    override: str = ""
    """Empty: whichever knows it."""


class FunctionSwitch:
    """The switch of one tree's functions."""

    def __init__(self, tree: Tree, *, limit_s: float) -> None:
        """Take the tree. `limit_s` is how long a driver may take to release a function, or to bind
        it.
        """
        # A tree may cache answers, but each read here must be a fresh one.
        self.tree = Tree(tree.settings)
        self._limit_s = limit_s

    def present(self, address: PciAddress) -> FunctionDriver:
        """Read which driver has a function."""
        folder = pci_folder(address)
        override = self.tree.read(f"{folder}/driver_override") or ""
        return FunctionDriver(
            name=self.tree.link_name(f"{folder}/driver"), override="" if override == _NO_OVERRIDE else override
        )

    def has_driver(self, kernel_driver: str) -> bool:
        """Say whether a driver is loaded."""
        return self.tree.exists(f"{_DRIVERS}/{kernel_driver}")

    def give(self, address: PciAddress, kernel_driver: str) -> None:
        """Bind a function to a driver, from whichever has it.

        Errors: raises HardwareError with the kernel's own text, or when it takes too long; the
        function may be with either driver then, or with none.
        """
        self._write(f"{pci_folder(address)}/driver_override", kernel_driver)
        if self.present(address).name != kernel_driver:
            self.release(address)
            self._bind(address, kernel_driver)

    def restore(self, address: PciAddress, before: FunctionDriver) -> None:
        """Bind a function to the driver that it had before, whatever state it is in.

        A function that has left the bus is skipped.

        Errors: raises HardwareError.
        """
        if not self.tree.exists(pci_folder(address)):
            return
        now = self.present(address)
        if now.override != before.override:
            self._write(f"{pci_folder(address)}/driver_override", before.override)
        if now.name == before.name:
            return
        self.release(address)
        if before.name:
            self._bind(address, before.name)

    def release(self, address: PciAddress) -> None:
        """Take a function from the driver that has it, if one has.

        Errors: raises HardwareError as `give` does.
        """
        name = self.present(address).name
        if name:
            self._write(f"{_DRIVERS}/{name}/unbind", str(address))
            self.until(lambda: self.present(address).name != name, f"kernel driver {name} having let {address} go")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until a condition is true, as long as a driver may take.

        Errors: raises HardwareError.
        """
        deadline, pause_s = time.monotonic() + self._limit_s, _FIRST_LOOK_S
        while not is_so():
            if time.monotonic() >= deadline:
                raise HardwareError(f"{what} is not so after {self._limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _bind(self, address: PciAddress, kernel_driver: str) -> None:
        if not self.has_driver(kernel_driver):
            raise HardwareError(
                f"kernel driver {kernel_driver} is not loaded, so it cannot take {address}",
                next_step=f"load it: modprobe {kernel_driver}",
            )
        try:
            self._write(f"{_DRIVERS}/{kernel_driver}/bind", str(address))
        except HardwareError:
            # The driver may have bound it by itself since it was released.
            if self.present(address).name != kernel_driver:
                raise
        self.until(
            lambda: self.present(address).name == kernel_driver, f"kernel driver {kernel_driver} having {address}"
        )

    def _write(self, file: str, text: str) -> None:
        """Write an existing kernel file. No file is made.

        Errors: raises HardwareError with the kernel's own text.
        """
        path = self.tree.path(file)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(descriptor, f"{text}\n".encode("ascii"))
            finally:
                os.close(descriptor)
        except OSError as err:
            is_right = err.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            raise HardwareError(
                f"{path}: {text or 'nothing'} cannot be written: {err.strerror or err}",
                next_step="give this service the right to write there (docs/reference/rights.md)" if is_right else "",
                path=file,
                raw=text,
            ) from err
