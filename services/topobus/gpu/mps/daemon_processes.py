"""Finds the processes of an MPS daemon that this service has started, by a variable in their
environment, and ends them by handle and start time.

The pids are not read from the daemon's own files, which a crash may truncate. A process inherits
its environment, so every process that was started for a folder is found as long as it lives.
Processes in other pods are left out: a tenant may set any variable.
Source: proc(5): environ, cmdline, stat (state, field 22 starttime); pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from topobus.gpu.processes import pod_of
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError

__all__ = ["MARK", "DaemonProcess", "control_of", "end_all", "end_folder", "find_processes", "is_alive", "wait_gone"]

MARK = "TOPOBUS_MPS_FOLDER"
"""The variable: the daemon's folder."""

_PROC = Path("/proc")
# Control daemon and server. The kernel cuts a program's name to 15 characters.
_COMMAND = b"nvidia-cuda-mps"
_CONTROL = "nvidia-cuda-mps-control"
# Seconds after SIGKILL until a process has gone: the driver frees a GPU's memory meanwhile. An
# undoing waits less in all, and is repeated.
_KILL_S = 10.0
# A daemon starts a server, and a program that goes into the background starts itself once more.
# Nothing of NVIDIA's starts more.
_ROUNDS = 5
# The kernel sets name and environment of a new program some microseconds apart (fs/exec.c,
# begin_new_exec; fs/binfmt_elf.c, create_elf_tables).
_EXEC_LOOKS, _EXEC_LOOK_S = 20, 0.001


class DaemonProcess(Struct, frozen=True, kw_only=True):
    """A process of a daemon."""

    pid: int
    started: str
    is_control: bool = False


def find_processes(folder: Path) -> tuple[DaemonProcess, ...]:
    """Find the processes that were started for a folder, by pid."""
    wanted = f"{MARK}={folder}".encode()
    tree = Tree()
    own_pod = pod_of(tree, "self")
    seen: list[DaemonProcess] = []
    for name in os.listdir(_PROC):  # noqa: PTH208 - names only
        if not name.isdecimal() or (_read(name, "comm") or b"").strip() != _COMMAND:
            continue
        started = _started(name)
        if not started or wanted not in _environment(name).split(b"\0") or pod_of(tree, int(name)) not in ("", own_pod):
            continue
        program = (_read(name, "cmdline") or b"").split(b"\0")[0].decode("utf-8", "replace")
        seen.append(DaemonProcess(pid=int(name), started=started, is_control=program.rpartition("/")[2] == _CONTROL))
    return tuple(sorted(seen, key=lambda process: process.pid))


def control_of(processes: Sequence[DaemonProcess]) -> DaemonProcess | None:
    """Choose the control daemon: the oldest process, because a client of the same program has the
    same name.
    """
    return min(
        (process for process in processes if process.is_control),
        key=lambda process: (int(process.started), process.pid),
        default=None,
    )


def is_alive(pid: int, started: str) -> bool:
    """Return whether the very process that was started still runs."""
    return pid > 0 and started != "" and _started(str(pid)) == started


def wait_gone(processes: Sequence[DaemonProcess], limit_s: float) -> tuple[DaemonProcess, ...]:
    """Wait until processes have ended, and return those that have not."""
    deadline = time.monotonic() + limit_s
    left = []
    for process in processes:
        if (handle := _open(process)) is not None:
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                # The handle of a process that ended is readable, even before its exit status is
                # collected.
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    left.append(process)
            finally:
                os.close(handle)
    return tuple(left)


def end_all(processes: Sequence[DaemonProcess]) -> None:
    """Kill processes, and wait until they have gone.

    Another process that has one of their pids by now is not killed.

    Errors: raises HardwareError for a process that does not end (it is inside the kernel), or that
    this service may not end.
    """
    for process in processes:
        if (handle := _open(process)) is not None:
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except OSError as err:
                raise HardwareError(
                    f"process {process.pid} of an MPS daemon cannot be ended: {err.strerror}", pid=process.pid
                ) from err
            finally:
                os.close(handle)
    if left := wait_gone(processes, _KILL_S):
        raise HardwareError(f"process {left[0].pid} of an MPS daemon was killed and has not gone yet", pid=left[0].pid)


def end_folder(folder: Path) -> None:
    """Kill all processes that were started for a folder, and those that they start meanwhile.

    Errors: as `end_all`.
    """
    for _ in range(_ROUNDS):
        if not (processes := find_processes(folder)):
            return
        end_all(processes)
    raise HardwareError(f"processes of the MPS daemon of {folder} keep starting others", path=str(folder))


def _open(process: DaemonProcess) -> int | None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    except OSError as err:
        raise HardwareError(f"process {process.pid} of an MPS daemon: {err.strerror}", pid=process.pid) from err
    # Checked after the handle is taken: from here on the pid cannot become another process's.
    if not is_alive(process.pid, process.started):
        os.close(handle)
        return None
    return handle


def _read(pid: str, name: str) -> bytes | None:
    try:
        return (_PROC / pid / name).read_bytes()
    except OSError:
        return None


def _environment(pid: str) -> bytes:
    """Read a process's environment.

    A process that is just becoming another program has the new name already and no environment yet,
    so wait for it.
    """
    for _ in range(_EXEC_LOOKS):
        environment = _read(pid, "environ")
        if environment != b"":
            return environment or b""
        time.sleep(_EXEC_LOOK_S)
    return b""


def _started(pid: str) -> str:
    """Return the start time of a process that runs.

    Empty for one that has ended, collected or not.
    """
    fields = (_read(pid, "stat") or b"").decode("utf-8", "replace").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""
