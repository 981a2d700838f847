"""Reads from /proc which processes use a GPU, whose they are, and ends one that a pod left behind.

Flows in: the node names of a GPU, or pids that a driver names. Flows out: processes with
their pod, program and start time, by which a pid that was given out again is told from
the one before. A process whose open files we may not read is counted, not guessed:
whoever asks says that it was blind.
Source: proc(5): fd, comm, stat (field 22, starttime), cgroup, environ; the kubelet's cgroup names,
pkg/kubelet/cm/pod_container_manager_linux.go.
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

__all__ = ["GpuProcess", "Holders", "end_process", "holders_of", "own_processes", "pod_of", "process_of"]

# kubelet names a pod's cgroup `pod<uid>` with cgroupfs and `kubepods-…-pod<uid>.slice` with
# systemd, dashes as underscores there.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
# The name stands after what kubelet and the runtime set, within the first few variables.
_ENVIRONMENT_BYTES = 1 << 16


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
    """As the pod's containers are told by HOSTNAME; empty where we may not read it."""
    used_bytes: int | None = None
    """None: not known."""

    def __str__(self) -> str:
        pod = f" of pod {self.pod_name or self.pod_uid}" if self.pod_uid else ""
        used = f" with {self.used_bytes >> 20} MiB" if self.used_bytes else ""
        return f"process {self.pid} ({self.program or '?'}){pod}{used}"


class Holders(Struct, frozen=True, kw_only=True):
    """Who has a node open."""

    processes: tuple[GpuProcess, ...] = ()
    unseen: int = 0
    """Processes whose open files we may not read."""


def holders_of(tree: Tree, nodes: Collection[str]) -> Holders:
    """Find the processes that have one of these nodes open, by the last part of its name
    (`nvidia0`, `renderD128`).

    Cost: one readlink for each open file of the node: a tenth of a second and more.
    """
    # A tree that remembers what it listed would keep each process for ever.
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
    """Name those that are this service, or run in its pod: NVML itself opens the nodes, and so does
    a daemon that the service started.
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
    """Kill a process; why not, or nothing.

    Only the very process that was seen is meant, never another one with its pid.
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
        # Also when this process has a pid namespace of its own: then the
        # number means somebody else here.
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
        # Closed meanwhile, or not ours to follow.
        return ""


def _text(tree: Tree, pid: int | str, name: str) -> str:
    return (tree.read_bytes(f"proc/{pid}/{name}", _ENVIRONMENT_BYTES) or b"").decode("utf-8", "replace")


def _started(stat: str) -> str:
    """Give field 22; the program's name in brackets before may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _own_pid(tree: Tree) -> int:
    stat = _text(tree, "self", "stat").partition(" ")[0]
    return int(stat) if stat.isdecimal() else -1
