"""Records a machine: copies the parts of /sys, /proc and /dev that Topobus reads into a folder that
reads like the machine itself.

The source is the live tree or a recorded one. Links stay links, so device folders keep their
places. The target of a link that is not copied becomes an empty folder, because only its name is
read (a driver, an IOMMU group). Files are copied as they are, at most 64 KiB each. Unreadable ones
are left out and reported. Device nodes become empty files, because only their names are read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from topobus.sysfs.boot import BOOT_ID_FILE
from topobus.sysfs.kernel_names import DISKS, disk_function
from topobus.sysfs.pci import PCI_DEVICES
from topobus.sysfs.regular_file import open_regular
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError

__all__ = ["Recording", "record"]

# Below these everything is taken; a link leads to the device's own folder, which is taken as well.
_FOLDERS = (
    "sys/devices/system/cpu",
    "sys/devices/system/node",
    PCI_DEVICES,
    "sys/class/net",
    "sys/class/infiniband",
    "sys/class/drm",
    "sys/class/kfd",
    "sys/class/fpga_region",
    "sys/class/fpga_manager",
    "sys/kernel/mm/hugepages",
    "proc/driver/nvidia",
)
_FILES = (
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/version",
    BOOT_ID_FILE,
)
# The node's own network (proc/net is that of the recording process).
_ROUTES = ("route", "ipv6_route")
# Folders and files that can be large, slow to read, dangerous to touch or always changing, and that
# Topobus does not read.
_SKIPPED = re.compile(
    r"(memory\d+|power|msi_irqs|queues|statistics|trace|events|cpufreq|cpuidle|thermal_throttle|microcode|crash_notes.*|firmware_node|"
    r"block|nvme|ata\d+|host\d+|usb\d+|hwmon|i2c-.*|ptp|pps|tty|rom|vpd|resource\d.*|remove|rescan|reset|uevent_helper|edid|debug)"
)
_LARGEST = 64 * 1024
# Configuration space beyond this is of no use, and reading it as root wakes devices.
_LARGEST_CONFIG = 4096
_NOT_HARDWARE = re.compile(
    r"(pts|shm|mqueue|hugepages|fd|block|disk|char|bus|mapper|cpu|(tty|pty|vcs|loop|ram|console|std).*)"
)


@dataclass
class Recording:
    """What was written, and what was not."""

    files: int = 0
    links: int = 0
    size_bytes: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Files that the kernel did not let us read, with its reason."""


def record(tree: Tree, into: Path, *, on_folder: Callable[[str], None] = lambda _: None) -> Recording:
    """Copy the machine that `tree` reads below `into`, an empty or absent folder.

    `on_folder` is called with each folder as it begins.

    Errors: raises OSError when `into` cannot be written, HardwareError when the source is no
    machine (no sys/devices).
    Cost: one read per file; about 15,000 files and 3 s on a 224-CPU machine.
    """
    if not tree.exists("sys/devices"):
        raise HardwareError(
            f"{tree.root} has no sys/devices: nothing to record", next_step="give the folder that holds sys and proc"
        )
    return _Recorder(tree, into, on_folder).run()


class _Recorder:
    def __init__(self, tree: Tree, into: Path, on_folder: Callable[[str], None]) -> None:
        self._tree = tree
        self._into = into
        self._on_folder = on_folder
        self._done = Recording()
        self._folders: set[str] = set()
        self._left: list[str] = []

    def run(self) -> Recording:
        self._left = [*_FOLDERS, *self._folders_with_cpus()]
        while self._left:
            self._folder(self._left.pop())
        for path in _FILES:
            self._file(path)
        self._disks()
        for name in _ROUTES:
            for source in (f"proc/1/net/{name}", f"proc/net/{name}"):
                if self._file(source, f"proc/net/{name}"):
                    break
        self._nodes("dev")
        for top in ("sys", "proc", "dev"):
            (self._into / top).mkdir(parents=True, exist_ok=True)
        return self._done

    def _disks(self) -> None:
        """Copy the names of disks, which is all that is read of them."""
        for name in self._names(DISKS):
            if disk_function(self._tree, name) is not None:
                (self._into / DISKS).mkdir(parents=True, exist_ok=True)
                self._link(f"{DISKS}/{name}")

    def _folders_with_cpus(self) -> list[str]:
        """Name the PMU folders that list the CPUs of each kind (cpu_core, cpu_atom)."""
        return [
            f"sys/devices/{name}"
            for name in self._tree.names("sys/devices")
            if self._tree.exists(f"sys/devices/{name}/cpus")
        ]

    def _folder(self, path: str) -> None:
        """Copy one folder and all below it, once."""
        real = self._tree.real(path)
        if real is None or real in self._folders:
            return
        self._folders.add(real)
        self._on_folder(real)
        (self._into / real).mkdir(parents=True, exist_ok=True)
        if path != real:
            # Named by a path with links in it: the class folder's own link was made by its parent.
            self._way(path)
        for name in self._names(real):
            if _SKIPPED.fullmatch(name):
                continue
            here = f"{real}/{name}"
            try:
                kind = os.lstat(self._tree.path(real) / name).st_mode
            except OSError:
                continue  # gone meanwhile, as a virtual interface may
            if stat.S_ISLNK(kind):
                self._link(here)
            elif stat.S_ISDIR(kind):
                self._folder(here)
            elif not stat.S_ISREG(kind):
                self._done.unreadable.append(f"{here}: it is no regular file")
            elif kind & 0o444:
                self._file(here)

    def _names(self, path: str) -> tuple[str, ...]:
        try:
            return self._tree.names(path)
        except HardwareError as err:
            self._done.unreadable.append(err.message)
            return ()

    def _way(self, path: str) -> None:
        """Make the folders above a path that was named directly."""
        parent = path.rpartition("/")[0]
        if (real := self._tree.real(parent)) is not None:
            (self._into / real).mkdir(parents=True, exist_ok=True)

    def _link(self, path: str) -> None:
        """Copy a link as the kernel made it: relative. Devices that a list names are copied too.

        Of others the name is enough.
        """
        target = self._tree.real(path)
        at = self._into / path
        if target is None:
            # It dangles (in a recording, what it leads to was left out); its name is what is read.
            aim = os.readlink(self._tree.path(path.rpartition("/")[0]) / at.name)
            if not aim.startswith("/") and not at.is_symlink():
                at.symlink_to(aim)
                self._done.links += 1
            return
        if not at.is_symlink():
            at.symlink_to(os.path.relpath(self._into / target, at.parent))
            self._done.links += 1
        folder, _, name = path.rpartition("/")
        is_listed = folder in _FOLDERS and folder != "sys/devices/system/node"
        if is_listed or name in ("physfn", "device") or name.startswith(("virtfn", "lower_", "upper_")):
            self._left.append(target)
        elif self._tree.path(target).is_dir():
            (self._into / target).mkdir(parents=True, exist_ok=True)
        else:
            self._file(target)

    def _file(self, path: str, where: str = "") -> bool:
        """Copy one file's text. False when there is nothing to copy."""
        source = self._tree.path(path)
        limit = _LARGEST_CONFIG if path.endswith("/config") else _LARGEST
        try:
            # The kernel's own files are opened as they are: only the kernel can have put them
            # there.
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC) if self._tree.is_live else open_regular(source)
            try:
                data = _read_all(descriptor, limit)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return False
        except OSError as err:
            # An attribute without a value right now (speed of a downed link): its reader takes it
            # as absent, and so does the reader of the copy.
            if err.errno not in (6, 19, 22, 95):
                self._done.unreadable.append(f"{path}: {err.strerror}")
            return False
        at = self._into / (where or path)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(data)
        self._done.files += 1
        self._done.size_bytes += len(data)
        return True

    def _nodes(self, folder: str) -> None:
        """Record the character devices, as an empty file each.

        A recorded tree's own empty files count as the nodes that they represent.
        """
        for name in self._names(folder):
            if _NOT_HARDWARE.fullmatch(name):
                continue
            source = self._tree.path(folder) / name
            try:
                kind = os.lstat(source).st_mode
            except OSError:
                continue
            if stat.S_ISDIR(kind):
                self._nodes(f"{folder}/{name}")
            elif stat.S_ISCHR(kind) or (stat.S_ISREG(kind) and not self._tree.is_live):
                at = self._into / folder / name
                at.parent.mkdir(parents=True, exist_ok=True)
                at.write_bytes(b"")
                self._done.files += 1


def _read_all(file: int, limit: int) -> bytes:
    """Read to the end or the limit. /proc gives a page at a time."""
    parts: list[bytes] = []
    left = limit
    while left > 0 and (part := os.read(file, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
