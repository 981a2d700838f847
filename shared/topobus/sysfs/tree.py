"""A hardware tree: /sys, /proc and /dev under one root, real or recorded, read as text.

No other module of Topobus opens a hardware path. Links are resolved inside the root, so a recorded
tree never leads out to the real machine.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from topobus.sysfs.answers import OpenFiles, StampedAnswers
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.filesystem import is_kernels
from topobus.sysfs.regular_file import inside_root, open_regular, read_all, read_regular
from topobus.values.errors import HardwareError

__all__ = ["HardwareSettings", "Tree", "natural_key"]

T = TypeVar("T")

# Linux gives up after as many links (MAXSYMLINKS, include/linux/namei.h).
_MAX_LINKS = 40
# The most that is read of one file. An attribute of sysfs has 4 KiB, a list of CPUs a little more;
# /proc/cpuinfo has 10 MB with 8,192 CPUs.
_LARGEST = {"sys": 1 << 20, "proc": 16 << 20, "dev": 1 << 20}
_BLANK = " \t\r\n\x00"


class HardwareSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the hardware is read.

    Paths of `sys`, `proc` and `dev` are below `root` unless they are absolute.
    """

    root: str = "/"
    """The folder that holds `sys`, `proc` and `dev`; a recorded machine's folder, or / for this
    machine."""
    sys: str = "sys"
    proc: str = "proc"
    dev: str = "dev"
    runtime_dev: str = "/dev"
    """Where the container runtime finds the device nodes: the host's own /dev, wherever this
    process sees that folder. A recorded machine whose nodes lie in a folder of its own (`machines
    build --device-nodes`) names that one, so that containers start on a machine without the
    hardware."""
    library_path: str = ""
    """A folder searched first for vendor libraries (NVML); empty: the system's own search."""
    driver_files: DriverFilesSettings = DriverFilesSettings()
    """The user-space files of a driver that containers need of the host;
    class gpu alone reads it."""
    rescan_s: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds between two looks at the tree, besides the kernel's own events. 5 s: what can change
    is read in milliseconds; discovery reads everything each five minutes."""
    honours_cpuset: bool = True
    """Whether CPUs and memory outside this process's own cpuset are left out of the machine. True:
    what this process may not use must not be allocated. Set it to false where discovery runs in a
    container whose cpuset differs from the node's (kubelet's static CPU manager shrinks it)."""


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts node2 before node10.

    >>> sorted(["node10", "node2"], key=natural_key)
    ['node2', 'node10']
    """
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


class Tree:
    """Reads below a root. Paths are relative: `sys/devices/system/node/online`.

    Errors: an absent file gives None or an empty result; one that exists and cannot be read raises
    HardwareError with the path.
    """

    def __init__(self, settings: HardwareSettings | None = None, *, is_revisited: bool = False) -> None:
        """Make a tree. With `is_revisited` the same files will be read repeatedly, so answers are
        kept as long as they are valid.
        """
        self.settings = settings or HardwareSettings()
        self.root = Path(self.settings.root)
        self._tops = {top: self.root / str(getattr(self.settings, top)) for top in ("sys", "proc", "dev")}
        # Text, because a path is resolved step by step and a Path object for each step costs more
        # than the system call.
        self._top_texts = {top: str(folder) for top, folder in self._tops.items()}
        self._is_live = self._tops["sys"] == Path("/sys")
        # Links of the kernel's own files are relative and lead nowhere else, so the kernel may
        # follow them itself. Those of a device folder may not. Where the system cannot find out,
        # the usual places count as the kernel's: its files' times mean nothing, and an answer kept
        # by them would never end.
        self._kernels = {
            top: top != "dev" and (folder == f"/{top}" or is_kernels(folder)) for top, folder in self._top_texts.items()
        }
        self._folders: dict[str, list[str]] | None = None
        self._stamps: dict[str, tuple[int, ...]] | None = None
        self._answers = StampedAnswers() if is_revisited else None
        self._open_files = OpenFiles() if is_revisited else None
        self._listed: dict[str, tuple[Sequence[str], tuple[str, ...]]] = {}
        """Names as the system listed them last, and in order: to order them costs ten times what it
        costs to list them."""

    def for_scan(self) -> Tree:
        """Give a tree for one look at many files: it resolves each folder's links once, and asks
        once for the times of each file or folder that answers depend on. It must not be kept,
        because folders come and go.
        """
        tree = Tree(self.settings)
        tree._folders, tree._stamps = {}, {}
        tree._answers, tree._open_files, tree._listed = self._answers, self._open_files, self._listed
        return tree

    @property
    def is_live(self) -> bool:
        """Return whether this is the running kernel's own tree (then uevents report changes)."""
        return self._is_live

    @property
    def is_recorded(self) -> bool:
        """Return whether this tree has ordinary files, and is not a kernel's, wherever that is
        mounted.
        """
        return not self._kernels["sys"]

    def path(self, path: str) -> Path:
        """Return the file's real path, every link resolved inside the tree (a missing tail stays as
        it is).
        """
        return Path(self._real_path(self._resolve(self._split(path))))

    def read(self, path: str) -> str | None:
        """Read a text file, stripped.

        None when it is absent (or a read gives ENODEV: the device went away meanwhile).
        """
        return self._ask("read", path, self._read)

    def read_bytes(self, path: str, limit: int = 4096) -> bytes | None:
        """Read the beginning of a binary file (PCI configuration space).

        None when it is absent or unreadable for us.
        """
        try:
            descriptor = open_regular(self.path(path))
            try:
                return os.read(descriptor, limit)
            finally:
                os.close(descriptor)
        except OSError:
            return None

    def read_mounted(self, path: str) -> str | None:
        """Read a file by its absolute path in the tree, wherever it is mounted (a cgroup's).

        Links stay inside the root. None when absent or unreadable.
        """
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        try:
            if parts and parts[0] in self._tops:
                return self.read("/".join(parts))
            return _text_of(read_regular(inside_root(self.root, "/".join(parts)), _LARGEST["sys"]))
        except (OSError, HardwareError):
            return None

    def read_int(self, path: str, base: int = 10) -> int | None:
        """Read one integer. `base` 0 also accepts 0x.

        None when absent.

        Errors: raises HardwareError when it is no number.
        """
        text = self.read(path)
        if text is None or not text:
            return None
        try:
            return int(text, base)
        except ValueError as err:
            raise HardwareError(
                f"{path} under {self.root}: got {text[:60]!r}, wanted a number", path=path, raw=text[:200]
            ) from err

    def names(self, path: str) -> tuple[str, ...]:
        """List a folder's names in natural order. Empty when absent."""
        return self._ask("names", path, self._list) or ()

    def exists(self, path: str) -> bool:
        """Say whether the file or folder is there."""
        return self._ask("exists", path, lambda text, _: os.path.exists(text) or None) is not None  # noqa: PTH110 - asked for many files at each look

    def is_link(self, path: str) -> bool:
        """Say whether the last part of the path is a link, dangling ones included."""
        folder, _, name = path.rpartition("/")
        return os.path.islink(f"{self._text(folder)}/{name}")  # noqa: PTH114 - asked for many files at each look

    def link_name(self, path: str) -> str:
        """Return the last part of a link's target.

        Empty when there is no such link (the target itself may be missing in a recording).
        """
        return self._ask("link", path, self._link, of_folder=True) or ""

    def identity(self, path: str) -> str:
        """Identify a folder, to detect that another one took its path. Empty when there is none.

        In a recorded tree the identity also changes with each file that comes, goes or is replaced
        in it. sysfs keeps no such time.
        """
        return self._ask("identity", path, self._identify) or ""

    def real(self, path: str) -> str | None:
        """Resolve all links and give the path relative to the tree (`sys/devices/pci0000:17/…`).

        None when absent.
        """
        return self._ask("real", path, self._real)

    def _ask(self, kind: str, path: str, ask: Callable[[str, str], T | None], *, of_folder: bool = False) -> T | None:
        """Read a path's answer, unless its last answer is still valid.

        None is the answer for what is absent. `of_folder`: the answer is about the name in its
        folder (a link), not about its target.
        """
        answers = self._answers
        if answers is None:
            return ask(self._text(path), path)
        kept = answers.find(kind, path, self._stamps)
        if kept is not None:
            item: T | None = kept.value
            return item
        began_ns = time.time_ns()
        text = self._text(path)
        value = ask(text, path)
        parts = self._split(path)
        if not self._kernels[parts[0]]:
            at = self._real_path(parts)
            if of_folder:
                at, text = at.rpartition("/")[0], self._text(path.rpartition("/")[0])
            elif value is None:
                # What is absent has no times. The nearest folder that exists has, and it changes first.
                top = self._top_texts[parts[0]]
                at, text = at.rpartition("/")[0], text.rpartition("/")[0]
                while len(at) > len(top) and not os.path.lexists(at):
                    at, text = at.rpartition("/")[0], text.rpartition("/")[0]
            answers.keep(kind, path, value, at=at, real=text, began_ns=began_ns)
        return value

    def _read(self, text: str, path: str) -> str | None:
        try:
            data = self._open_files.read(text) if self._open_files is not None else None
            if data is None:
                data = self._read_whole(text, path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as err:
            # Linux answers ENODEV, ENXIO, EINVAL or EOPNOTSUPP for attributes that the device does
            # not back (speed of a downed link, name of a port).
            if err.errno in (6, 19, 22, 95):
                return None
            raise HardwareError(f"cannot read {path} under {self.root}: {err.strerror}", path=path) from err
        return _text_of(data)

    def _read_whole(self, text: str, path: str) -> bytes:
        top = path.lstrip("/").partition("/")[0]
        limit = _LARGEST.get(top, _LARGEST["sys"])
        if not self._kernels.get(top, False):
            return read_regular(text, limit)
        descriptor = os.open(text, os.O_RDONLY | os.O_CLOEXEC)
        is_kept = False
        try:
            data = read_all(descriptor, text, limit)
            is_kept = (
                self._open_files is not None and self._is_of_a_device(text) and self._open_files.keep(text, descriptor)
            )
            return data
        finally:
            if not is_kept:
                os.close(descriptor)

    def _is_of_a_device(self, text: str) -> bool:
        """Return whether a file is in a device's own folder of sysfs: no link after the one that
        names the device, so that its name always means this file.
        """
        top = self._top_texts["sys"]
        if not self._kernels["sys"] or not text.startswith((f"{top}/devices/", f"{top}/bus/pci/devices/")):
            return False
        inside = (
            text.removeprefix(f"{top}/bus/pci/devices/")
            if text.startswith(f"{top}/bus/")
            else text.removeprefix(f"{top}/devices/")
        )
        return os.path.realpath(text).endswith(f"/{inside}")

    def _list(self, text: str, path: str) -> tuple[str, ...] | None:
        try:
            names = os.listdir(text)  # noqa: PTH208 - names only, no Path objects per entry
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise HardwareError(f"cannot list {path} under {self.root}: {err.strerror}", path=path) from err
        before, ordered = self._listed.get(text, ((), ()))
        if names != before:
            ordered = tuple(sorted(names, key=natural_key))
            if self._open_files is not None:
                self._listed[text] = (names, ordered)
        return ordered

    def _link(self, _: str, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        try:
            return os.readlink(f"{self._text(folder)}/{name}").rpartition("/")[2]
        except OSError:
            return None

    def _real(self, _: str, path: str) -> str | None:
        parts = self._resolve(self._split(path))
        return "/".join(parts) if os.path.exists(self._real_path(parts)) else None  # noqa: PTH110

    def _identify(self, text: str, path: str) -> str | None:
        try:
            stat = os.stat(text)  # noqa: PTH116 - asked for many folders at each look
        except OSError:
            return None
        is_kernels = self._kernels[path.partition("/")[0]]
        return f"{stat.st_dev}:{stat.st_ino}" if is_kernels else f"{stat.st_dev}:{stat.st_ino}:{stat.st_mtime_ns}"

    def _text(self, path: str) -> str:
        parts = self._split(path)
        if ".." in parts or len(parts) == 1:
            return self._real_path(self._resolve(parts))
        if self._kernels[parts[0]]:
            return self._real_path(parts)
        if self._folders is None:
            return self._real_path(self._resolve(parts))
        key = "/".join(parts[:-1])
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = self._resolve(parts[:-1])
        return self._real_path(self._resolve([parts[-1]], folder))

    def _split(self, path: str) -> list[str]:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts or parts[0] not in self._tops:
            raise ValueError(f"a hardware path begins with sys, proc or dev: got {path!r}")
        return parts

    def _resolve(self, parts: list[str], base: list[str] | None = None) -> list[str]:
        done: list[str] = list(base or ())
        todo = list(reversed(parts))
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                if len(done) > 1:
                    done.pop()
                continue
            here = "/".join([self._top_texts[done[0]], *done[1:], part] if done else [self._top_texts[part]])
            try:
                target = os.readlink(here)
            except OSError:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise HardwareError(
                    f"too many links at {'/'.join([*done, part])} under {self.root}", path="/".join([*done, part])
                )
            steps = [each_part for each_part in target.split("/") if each_part not in ("", ".")]
            if target.startswith("/"):
                # An absolute link of a recorded tree begins at the recorded root. In the live tree
                # that is the system's root.
                done = []
                if not steps or steps[0] not in self._tops:
                    raise HardwareError(f"the link {here} leads out of the tree: {target}", path=here)
            todo.extend(reversed(steps))
        return done

    def _real_path(self, parts: list[str]) -> str:
        return "/".join([self._top_texts[parts[0]], *parts[1:]]) if parts else str(self.root)


def _text_of(data: bytes) -> str:
    # Some kernels end a list with a NUL.
    return data.decode("utf-8", errors="replace").strip(_BLANK)
