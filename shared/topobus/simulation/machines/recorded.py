"""A machine on disk that is read like a real one, and whose changes and faults look like a real
kernel's.

Every change is what a kernel would do to /sys: a device folder is removed by one rename, files are
replaced in one step, links that would dangle are removed. Changes may come from another process
than the one that built the tree (`RecordedMachine.open`).
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from topobus.process.own_folder import objection_to_folder
from topobus.simulation.machines.content import (
    DEVICE_NODES,
    Content,
    place,
    unplace,
)
from topobus.simulation.machines.functions import function_contents, locality_content
from topobus.simulation.machines.layout import PlacedFunction, lay_out
from topobus.simulation.machines.processors import (
    all_threads,
    cpu_content,
    numa_content,
    proc_content,
)
from topobus.simulation.machines.profile import Fault, Profile, load_profile
from topobus.sysfs.regular_file import read_regular
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet
from topobus.values.pci import PciAddress

__all__ = ["RecordedMachine", "build", "content_of"]

# Beside the tree, in the same file system, so that a device folder
# leaves and returns by one rename.
_STORE = ".topobus"
# The name of a profile, or the path of one.
_LARGEST_MARK = 64 * 1024
_WHO_MAY = "device nodes are made by root, outside of unprivileged containers, in a file system without nodev"


@dataclass
class RecordedMachine:
    """A built tree. `root` is the value for `hardware.root`."""

    root: Path
    profile: Profile
    functions: tuple[PlacedFunction, ...] = field(repr=False, default=())
    _played_to_s: float = -1.0
    _is_again: bool = False

    @classmethod
    def open(cls, root: Path) -> RecordedMachine:
        """Take over a tree that another process built.

        Errors: raises ConfigError for a folder that is no such tree.
        """
        mark = root / _STORE / "profile"
        try:
            name = read_regular(mark, _LARGEST_MARK).decode("utf-8", "replace").strip()
        except OSError as err:
            raise ConfigError(
                f"{root} is not a recorded machine", next_step="make one: topobus profile build dgx DIR"
            ) from err
        profile = load_profile(name)
        return cls(root, profile, lay_out(profile))

    @property
    def addresses(self) -> tuple[str, ...]:
        """All PCI addresses of the profile, sorted, removed ones included."""
        return tuple(str(function.address) for function in self.functions)

    def pci(self, card: str) -> tuple[str, ...]:
        """Addresses of a card's functions (`h100`), sorted: the physical ones, no VFs."""
        return tuple(
            str(function.address) for function in self.functions if function.card == card and function.physfn is None
        )

    def folder(self, address: str) -> str:
        """The device folder of a function, relative to the tree."""
        return self._at(address).folder

    def remove_pci(self, address: str) -> None:
        """Remove a function and all below it, as a surprise removal does. Its VFs are removed with
        it.

        Twice is no error.
        """
        top = self._at(address)
        gone = self._below(top)
        target = self.root / _STORE / "removed"
        target.mkdir(parents=True, exist_ok=True)
        for placed_function in gone:
            # What is below leaves inside its parent's folder. Only VFs are beside their physical
            # function.
            if (placed_function is top or placed_function.physfn == top.address) and (
                self.root / placed_function.folder
            ).exists():
                (self.root / placed_function.folder).rename(target / str(placed_function.address))
        contents = function_contents(self.profile, self.functions)
        inside = tuple(f"{placed_function.folder}/" for placed_function in gone)
        outside = [
            path
            for placed_function in gone
            for path in (*contents[placed_function.address].links, *contents[placed_function.address].texts)
            if not path.startswith(inside)
        ]
        unplace(self.root, outside)

    def restore_pci(self, address: str) -> None:
        """Bring a removed function and all below it back, as it was. Twice is no error.

        Errors: raises ConfigError while the bridge above it (or a VF's
        physical function) is away itself.
        """
        top = self._at(address)
        parent = (self.root / top.folder).parent
        if not parent.exists() or (top.physfn is not None and not (parent / str(top.physfn)).exists()):
            raise ConfigError(f"cannot restore {address}: what it sits on is away", next_step="restore that first")
        back = self._below(top)
        for placed_function in back:
            stored = self.root / _STORE / "removed" / str(placed_function.address)
            if stored.exists():
                stored.rename(self.root / placed_function.folder)
        contents = function_contents(self.profile, self.functions)
        local = locality_content(self.profile, self.functions, self.online_cpus)
        for placed_function in back:
            content = contents[placed_function.address]
            outside = Content(
                {
                    path: text
                    for path, text in content.texts.items()
                    if not path.startswith(f"{placed_function.folder}/")
                },
                {
                    path: target
                    for path, target in content.links.items()
                    if not path.startswith(f"{placed_function.folder}/")
                },
            )
            outside.add(local[placed_function.address])
            place(self.root, outside)

    @property
    def online_cpus(self) -> CpuSet:
        """The CPUs that are online in the tree."""
        return CpuSet.parse(self.read("sys/devices/system/cpu/online"))

    def set_cpu_online(self, cpu: int, is_online: bool) -> None:
        """Bring a CPU online or offline. All lists that name it follow.

        Errors: raises ConfigError for a CPU that the machine does not have.
        """
        threads = CpuSet.of(thread.cpu for thread in all_threads(self.profile))
        if cpu not in threads:
            raise ConfigError(f"{self.profile.name} has no CPU {cpu}", next_step=f"it has CPUs {threads}")
        old = self.online_cpus
        new = old | CpuSet(cpu) if is_online else old - CpuSet(cpu)
        before, after = self._cpu_state(old), self._cpu_state(new)
        changed = Content(
            {path: text for path, text in after.texts.items() if before.texts.get(path) != text},
            {path: target for path, target in after.links.items() if before.links.get(path) != target},
        )
        # What the machine lacks at the moment (a removed device) must not come back as a folder
        # with one file.
        for path in [path for path in changed.texts if "/pci" in path and not (self.root / path).exists()]:
            del changed.texts[path]
        place(self.root, changed)
        unplace(
            self.root,
            [path for path in (*before.texts, *before.links) if path not in after.texts and path not in after.links],
        )

    def read(self, path: str) -> str:
        """Read a file of the tree, stripped."""
        return (self.root / path).read_text(encoding="utf-8").strip()

    def write(self, path: str, text: str) -> None:
        """Replace a file of the tree in one step, and make its folders."""
        place(self.root, Content({path: text if text.endswith("\n") else f"{text}\n"}, {}))

    def set_carrier(self, address: str, is_up: bool) -> None:
        """Plug or pull the cable of a network function."""
        placed_function = self._at(address)
        changed = Content()
        for path, value in function_contents(self.profile, self.functions)[placed_function.address].texts.items():
            name = path.rpartition("/")[2]
            down = {
                "carrier": "0",
                "operstate": "down",
                "speed": "-1",
                "state": "1: DOWN",
                "phys_state": "3: Disabled",
            }.get(name)
            if down is not None and ("/net/" in path or "/ports/" in path):
                changed.texts[path] = value if is_up else f"{down}\n"
        place(self.root, changed)

    def apply(self, fault: Fault, *, is_undo: bool = False) -> None:
        """Make a fault happen, or heal."""
        target = fault.target
        if fault.what == "remove-pci":
            (self.restore_pci if is_undo else self.remove_pci)(target)
        elif fault.what == "cpu-offline":
            self.set_cpu_online(int(target), is_undo)
        elif fault.what == "carrier-down":
            self.set_carrier(target, is_undo)
        elif fault.what == "link-narrow":
            folder = self.folder(target)
            self.write(f"{folder}/current_link_width", self.read(f"{folder}/max_link_width") if is_undo else "1")
        elif fault.what == "write":
            self._write_fault(fault, is_undo=is_undo)
        else:
            kind = fault.what.removeprefix("aer-")
            path = f"{self.folder(target)}/aer_dev_{kind}"
            lines = [line.split() for line in self.read(path).splitlines()]
            count = 0 if is_undo else 1
            # The last line is the total; the fault counts as one malformed TLP (fatal) or
            # one receiver error (correctable).
            name = "MalfTLP" if kind == "fatal" else "RxErr"
            self.write(
                path,
                "\n".join(
                    f"{key} {count if key == name or key.startswith('TOTAL') else value}" for key, value in lines
                ),
            )

    def advance(self, to_s: float) -> tuple[str, ...]:
        """Apply all scripted faults due up to `to_s` seconds after the start.

        Return what was done, in order.
        """
        done: list[str] = []
        for at_s, fault, is_undo in self._script():
            if self._played_to_s < at_s <= to_s:
                self.apply(fault, is_undo=is_undo)
                done.append(f"{at_s:g} s: {'healed ' if is_undo else ''}{fault.what} {fault.target}")
        self._played_to_s = max(self._played_to_s, to_s)
        return tuple(done)

    async def play(
        self,
        *,
        speed: float = 1.0,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> tuple[str, ...]:
        """Play the script in real time (`speed` 2: twice as fast). Ends after the last step.

        Tests pass a `wait` of their own. `say` is called with each step when it is done.
        """
        done: list[str] = []
        now_s = 0.0
        for at_s, _, _ in self._script():
            if at_s > now_s:
                await wait((at_s - now_s) / speed)
                now_s = at_s
            for step in self.advance(at_s):
                say(step)
                done.append(step)
        return tuple(done)

    async def play_again(self, *, wait: Callable[[float], Awaitable[None]], say: Callable[[str], None]) -> None:
        """Play the script once more in real time, without the steps that it does not heal, because
        these are done already.
        """
        self._played_to_s, self._is_again = -1.0, True
        await self.play(wait=wait, say=say)

    def _script(self) -> list[tuple[float, Fault, bool]]:
        steps = [(fault.at_s, fault, False) for fault in self.profile.faults if fault.for_s or not self._is_again]
        steps += [(fault.at_s + fault.for_s, fault, True) for fault in self.profile.faults if fault.for_s]
        return sorted(steps, key=lambda step: (step[0], step[1].target, step[2]))

    def _write_fault(self, fault: Fault, *, is_undo: bool) -> None:
        saved = self.root / _STORE / "saved" / fault.target
        if is_undo:
            self.write(fault.target, saved.read_text(encoding="utf-8"))
            return
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(self.read(fault.target), encoding="utf-8")
        self.write(fault.target, fault.text)

    def _cpu_state(self, online: CpuSet) -> Content:
        content = cpu_content(self.profile, online)
        content.add(numa_content(self.profile, online))
        content.add(proc_content(self.profile, online, _boot_id(self.profile)))
        for other_content in locality_content(self.profile, self.functions, online).values():
            content.add(other_content)
        return content

    def _whole_content(self) -> Content:
        """All files and links of the machine as it is at first: every CPU online, every function
        there.
        """
        content = self._cpu_state(CpuSet.of(thread.cpu for thread in all_threads(self.profile)))
        for function_content in function_contents(self.profile, self.functions).values():
            content.add(function_content)
        _add_shared_nodes(content)
        return content

    def _at(self, address: str) -> PlacedFunction:
        wanted = PciAddress.parse(address)
        for function in self.functions:
            if function.address == wanted:
                return function
        raise ConfigError(
            f"{self.profile.name} has no PCI function {address}", next_step=f"it has {', '.join(self.addresses)}"
        )

    def _below(self, top: PlacedFunction) -> list[PlacedFunction]:
        functions = [
            function
            for function in self.functions
            if function is top or function.folder.startswith(f"{top.folder}/") or function.physfn == top.address
        ]
        return sorted(functions, key=lambda placed_function: placed_function.folder.count("/"))


def content_of(profile: str | Path) -> Content:
    """Return all that `build` writes of a profile's machine, except what marks the folder as one.

    Nothing is written.

    Errors: raises ConfigError for a malformed profile.
    """
    what = load_profile(profile)
    return RecordedMachine(Path(), what, lay_out(what))._whole_content()


def build(profile: str | Path, into: Path, *, has_device_nodes: bool = False) -> RecordedMachine:
    """Write a profile's machine below `into`, which must be empty or absent, or an older machine
    (it is replaced).

    `has_device_nodes` puts real character devices (of the null device's number) below `dev`, so
    that a container runtime can give them to containers: set `hardware.runtime_dev` to that folder.
    Errors: raises ConfigError when `into` holds anything else, or may be written by others, and
    when nodes are wanted by a user who may not make them.
    """
    what = load_profile(profile)
    objection = objection_to_folder(into.stat()) if into.exists() else ""
    if objection:
        raise ConfigError(f"{into} {objection}", next_step="give a folder that does not exist yet, in one of yours")
    if into.exists() and any(into.iterdir()):
        if not (into / _STORE / "profile").is_file():
            raise ConfigError(f"{into} is not empty and not a recorded machine", next_step="give an empty folder")
        shutil.rmtree(into)
    machine = RecordedMachine(into, what, lay_out(what))
    content = machine._whole_content()
    content.text(f"{_STORE}/profile", profile if str(profile) == what.name else Path(profile).resolve())
    if has_device_nodes:
        content.text(DEVICE_NODES, "")
    try:
        place(into, content, is_fresh=True)
    except PermissionError as err:
        raise ConfigError(
            f"cannot write {err.filename or into}: {err.strerror}",
            next_step=_WHO_MAY if has_device_nodes else "give a folder of yours",
        ) from err
    return machine


def _add_shared_nodes(content: Content) -> None:
    """Add the device nodes that belong to a driver rather than to one of its devices."""
    content.text("dev/null", "")
    shared = {"dev/nvidia0": ("nvidiactl", "nvidia-uvm"), "dev/infiniband/uverbs0": ("infiniband/rdma_cm",)}
    for path, names in shared.items():
        if path in content.texts:
            for name in names:
                content.text(f"dev/{name}", "")
    if any(path.startswith("sys/devices/virtual/kfd") for path in content.texts):
        content.text("dev/kfd", "")
        content.link("sys/class/kfd/kfd", "sys/devices/virtual/kfd/kfd")


def _boot_id(profile: Profile) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"topobus/boot/{profile.name}"))
