"""Reads which processes use a GPU and which pods they are in, from /proc and, of an AMD GPU, from
KFD, and ends a process that a pod left behind.

A process has a start time, which distinguishes it from a later process with the same pid. A process
whose open files may not be read is counted, not guessed, so that the caller can report it. KFD has
a file for each GPU in each process that has opened it, with 0 for a GPU that the process does not
use. A GPU in parts has several KFD nodes.
Source: proc(5): fd, comm, stat (field 22, starttime), cgroup, environ; the kubelet's cgroup names,
pkg/kubelet/cm/pod_container_manager_linux.go; drivers/gpu/drm/amd/amdkfd/kfd_process.c, sysfs files
`vram_<gpu id>`; gpu_id in kfd_topology.c.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError

__all__ = [
    "GpuProcess",
    "Holders",
    "end_process",
    "holders_of",
    "kfd_processes",
    "own_processes",
    "pod_of",
    "process_of",
]

# kubelet names a pod's cgroup `pod<uid>` with cgroupfs and `kubepods-…-pod<uid>.slice` with
# systemd, dashes as underscores there.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
# The pod's name comes after what kubelet and the runtime set, within the first few variables.
_ENVIRONMENT_BYTES = 1 << 16
_KFD = "sys/class/kfd/kfd"


class GpuProcess(Struct, frozen=True, kw_only=True):
    """One process that uses a GPU."""

    pid: int
    started: str = ""
    """Start time in clock ticks since boot; empty for a process that we cannot see (it has ended,
    or is in another namespace)."""
    program: str = ""
    pod_uid: str = ""
    """Empty: it is in no pod."""
    pod_name: str = ""
    """From the HOSTNAME of the pod's containers; empty where it cannot be read."""
    used_bytes: int | None = None
    """None: not known."""

    def __str__(self) -> str:
        pod = f" of pod {self.pod_name or self.pod_uid}" if self.pod_uid else ""
        used = f" with {self.used_bytes >> 20} MiB" if self.used_bytes else ""
        return f"process {self.pid} ({self.program or '?'}){pod}{used}"


class Holders(Struct, frozen=True, kw_only=True):
    """The processes that have a node open."""

    processes: tuple[GpuProcess, ...] = ()
    unseen: int = 0
    """Processes whose open files we may not read."""


def holders_of(tree: Tree, nodes: Collection[str]) -> Holders:
    """Find the processes that have one of these nodes open.

    Shapes: nodes — the last parts of their names (`nvidia0`, `renderD128`).
    Cost: one readlink for each open file of the node: a tenth of a second and more.
    """
    # A tree that caches its listings would keep each process.
    tree = Tree(tree.settings)
    wanted = frozenset(nodes)
    processes: list[GpuProcess] = []
    unseen = 0
    for name in tree.names("proc") if wanted else ():
        if not name.isdecimal():
            continue
        try:
            files = tree.names(f"proc/{name}/fd")
            is_holder = any(_node(tree, f"proc/{name}/fd/{file}") in wanted for file in files)
        except HardwareError:
            unseen += 1
            continue
        if is_holder:
            processes.append(process_of(tree, int(name)))
    return Holders(processes=tuple(processes), unseen=unseen)


def process_of(tree: Tree, pid: int, used_bytes: int | None = None) -> GpuProcess:
    """Describe a process, as far as it can be seen."""
    tree = Tree(tree.settings)
    pod_uid = pod_of(tree, pid)
    environment = _text(tree, pid, "environ") if pod_uid else ""
    variables = {name: value for name, _, value in (variable.partition("=") for variable in environment.split("\0"))}
    return GpuProcess(
        pid=pid,
        started=_started(_text(tree, pid, "stat")),
        program=_text(tree, pid, "comm").strip(),
        pod_uid=pod_uid,
        pod_name=variables.get("HOSTNAME", ""),
        used_bytes=used_bytes,
    )


def pod_of(tree: Tree, pid: int | str) -> str:
    """Name the pod that a process is in, by its uid.

    Empty when it is in none, or cannot be seen.
    """
    uid = _POD.search(_text(tree, pid, "cgroup"))
    return uid.group(1).replace("_", "-") if uid is not None else ""


def own_processes(tree: Tree, processes: Collection[GpuProcess]) -> frozenset[int]:
    """List the pids of this service, or of processes in its pod: NVML itself opens the nodes, and
    so does a daemon that the service started.
    """
    tree = Tree(tree.settings)
    if tree.is_recorded:
        return frozenset()
    own_pod = pod_of(tree, "self")
    own_start = _started(_text(tree, "self", "stat"))
    return frozenset(
        process.pid
        for process in processes
        if (own_pod and process.pod_uid == own_pod) or (process.pid == _own_pid(tree) and process.started == own_start)
    )


def end_process(tree: Tree, process: GpuProcess) -> str:
    """Kill a process, and return why it was not killed, or "".

    Another process that has its pid by now is never killed.
    """
    if tree.is_recorded:
        return "it is a recorded machine's"
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as err:
        return "" if isinstance(err, ProcessLookupError) else (err.strerror or str(err))
    try:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            stat = ""
        # The times also differ where this service has its own pid namespace: there the pid belongs
        # to another process.
        if not process.started or _started(stat) != process.started:
            return "the pid is another process here (the service needs the host's pid namespace)"
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    except OSError as err:
        return err.strerror or str(err)
    finally:
        os.close(handle)
    return ""


def _node(tree: Tree, path: str) -> str:
    try:
        return tree.link_name(path)
    except HardwareError:
        # It was closed meanwhile, or this process may not follow it.
        return ""


def _text(tree: Tree, pid: int | str, name: str) -> str:
    return (tree.read_bytes(f"proc/{pid}/{name}", _ENVIRONMENT_BYTES) or b"").decode("utf-8", "replace")


def _started(stat: str) -> str:
    """Return field 22. The program's name in brackets before it may contain anything."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _own_pid(tree: Tree) -> int:
    stat = _text(tree, "self", "stat").partition(" ")[0]
    return int(stat) if stat.isdecimal() else -1


def kfd_processes(tree: Tree, nodes: Collection[int]) -> dict[int, int]:
    """Find the processes with memory on any of these nodes: pid to bytes.

    Errors: raises HardwareError when a file is no number.
    """
    ids = [tree.read_int(f"{_KFD}/topology/nodes/{node}/gpu_id") for node in sorted(nodes)]
    processes: dict[int, int] = {}
    for name in tree.names(f"{_KFD}/proc"):
        if name.isdecimal():
            used = sum(tree.read_int(f"{_KFD}/proc/{name}/vram_{gpu_id}") or 0 for gpu_id in ids if gpu_id)
            if used:
                processes[int(name)] = used
    return processes
