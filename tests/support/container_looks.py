"""Observes the containers of a load from outside, many times a second: what the kernel allows each
process, and what its container was given, independent of Topobus and kubelet.

A container of a load describes itself by variables: STRESS_KIND, STRESS_NODE, STRESS_POD (the pod's
uid), STRESS_WANTS (`gpu=2,nic=1`: how many devices of a class it was promised), STRESS_INTERFACE
(an interface). All nodes' processes must be visible to this machine's kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from topobus.values.idset import CpuSet

__all__ = ["ContainerLooks", "Overlap"]

_LOOK_S = 0.02
_PROC = Path("/proc")


@dataclass(kw_only=True)
class Overlap:
    """CPUs that a running claim has for itself although another container has them as well.

    Seconds since 1970.
    """

    node: str
    since_s: float
    until_s: float
    text: str
    looks: int = 0

    @property
    def lasted_s(self) -> float:
        """How long it was seen."""
        return self.until_s - self.since_s


@dataclass(frozen=True, kw_only=True)
class _Process:
    """The first process of a container. `begin` distinguishes it from a later one with its pid."""

    pid: int
    begin: str
    node: str
    pod: str
    kind: str
    # Class and name.
    devices: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    @property
    def lives(self) -> bool:
        return _begin(self.pid) == self.begin

    @property
    def cpus(self) -> CpuSet:
        for line in (_PROC / str(self.pid) / "status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return CpuSet.parse(line.split()[1])
        raise LookupError(self.pid)

    def __str__(self) -> str:
        return f"{self.kind} of pod {self.pod[:8]} on {self.node}"


class ContainerLooks(threading.Thread):
    """The thread that looks, so that nothing else delays it much.

    `mistakes` are never allowed, `overlaps` are allowed while no gateway serves the runtime.
    """

    def __init__(self, exclusive: str, is_wrong: Callable[[str, str, list[str]], str] | None = None) -> None:
        """Look until `finish`; `exclusive` is the kind whose containers have their CPUs for
        themselves, `is_wrong` says of a node, a kind and its devices why they are not what was
        promised.
        """
        self._is_wrong = is_wrong
        super().__init__(daemon=True)
        self.looks = 0
        self.mistakes: list[str] = []
        self.overlaps: list[Overlap] = []
        self.seen: dict[str, set[str]] = {}
        self._exclusive = exclusive
        self._open: dict[tuple[_Process, _Process], Overlap] = {}
        self._processes: dict[int, _Process | None] = {}
        self._given: dict[tuple[str, str], frozenset[tuple[str, str]]] = {}
        self._is_over = threading.Event()

    def finish(self) -> None:
        """End, with what is still open among the overlaps."""
        self._is_over.set()
        self.join()
        self.overlaps += self._open.values()

    def run(self) -> None:
        """Look until the end."""
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        pids = {int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()}
        self._processes = {
            pid: process
            for pid, process in self._processes.items()
            if pid in pids and (process is None or process.lives)
        }
        for pid in pids - self._processes.keys():
            self._read(pid)
        living = [process for process in self._processes.values() if process is not None]
        self._look_at_devices(living)
        self._look_at_cpus(living)

    def _read(self, pid: int) -> None:
        """Learn what a process is.

        One that is no container of the load is not read again, but for one that may become it.
        """
        begin = _begin(pid)
        variables = _variables(pid)
        if variables is None or not begin:
            return
        if "STRESS_KIND" not in variables:
            # A container's process is the runtime's until it runs the container's program.
            with suppress(OSError):
                if not (_PROC / str(pid) / "comm").read_text().startswith(("runc", "containerd")):
                    self._processes[pid] = None
            return
        wanted = dict(word.split("=") for word in variables.get("STRESS_WANTS", "").split(",") if word)
        given = {name: _words(variables.get(f"TOPOBUS_{name.upper()}_DEVICES", "")) for name in wanted}
        process = _Process(
            pid=pid,
            begin=begin,
            node=variables["STRESS_NODE"],
            pod=variables["STRESS_POD"],
            kind=variables["STRESS_KIND"],
            devices=frozenset((name, device) for name, devices in given.items() for device in devices),
        )
        self._processes[pid] = process
        self.seen.setdefault(process.kind, set()).add(process.pod)
        for name, count in wanted.items():
            # A plus: some.
            if len(given[name]) != int(count) if count != "+" else not given[name]:
                self.mistakes.append(f"{process} was promised {count} {name}, and has {sorted(given[name])}")
        names = sorted(device for devices in given.values() for device in devices)
        if self._is_wrong is not None and (why := self._is_wrong(process.node, process.kind, names)):
            self.mistakes.append(f"{process} has {names}: {why}")
        if (
            (wanted_interface := variables["STRESS_INTERFACE"])
            and wanted_interface not in _interfaces(pid)
            and process.lives
        ):
            self.mistakes.append(f"{process} was promised interface {wanted_interface}")
        before = self._given.setdefault((process.pod, process.kind), process.devices)
        if before != process.devices:
            self.mistakes.append(
                f"{process} had {sorted(before)}, and has {sorted(process.devices)} after it was started anew"
            )

    def _look_at_devices(self, living: list[_Process]) -> None:
        owners: dict[tuple[str, str, str], _Process] = {}
        for process in living:
            for device in process.devices:
                other = owners.setdefault((process.node, *device), process)
                # Both at one moment: the other one still lives after this one was seen to.
                if other is not process and process.lives and other.lives and process.lives:
                    self.mistakes.append(f"{'/'.join(device)} is that of {other} and of {process}")

    def _look_at_cpus(self, living: list[_Process]) -> None:
        now_s = time.time()
        cpus: dict[_Process, CpuSet] = {}
        for process in living:
            with suppress(OSError, LookupError):
                cpus[process] = process.cpus
        claims = [process for process in cpus if process.kind == self._exclusive]
        pairs = {
            (claim, other)
            for claim in claims
            for other in cpus
            if other is not claim and other.node == claim.node and not cpus[claim].isdisjoint(cpus[other])
        }
        for pair in pairs:
            claim, other = pair
            text = f"{other} on CPUs {cpus[other]}, {claim} on {cpus[claim]}"
            overlap = self._open.setdefault(pair, Overlap(node=claim.node, since_s=now_s, until_s=now_s, text=text))
            overlap.until_s = now_s
            overlap.looks += 1
        for pair in self._open.keys() - pairs:
            self.overlaps.append(self._open.pop(pair))


def _begin(pid: int) -> str:
    """When a process began, in ticks since the kernel's start.

    Empty: it is gone, or dead and not yet reaped.
    """
    try:
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # proc(5): the state is the third field, the start the twenty-second.
    return "" if words[0] in "ZX" else words[19]


def _variables(pid: int) -> Mapping[str, str] | None:
    """A process's variables at its start; None: it is gone."""
    try:
        text = (_PROC / str(pid) / "environ").read_text(errors="replace")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)


def _interfaces(pid: int) -> list[str]:
    """Names of the interfaces in a process's network namespace; none when it is gone."""
    try:
        lines = (_PROC / str(pid) / "net/dev").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[0].strip() for line in lines if ":" in line]


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in text.split(",") if word)
