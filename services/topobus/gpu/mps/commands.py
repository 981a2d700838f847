"""Runs the programs of NVIDIA's driver that MPS needs: the control daemon, its client, and
nvidia-smi for compute modes.

Each call has a time limit. A failed one raises HardwareError with the program, its output and its
exit status.
Source: NVIDIA Multi-Process Service guide: environment variables, commands of the control program;
nvidia-smi(1).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from topobus.gpu.mps.daemon_processes import MARK
from topobus.gpu.mps.daemon_state import DaemonFolder, DaemonState, Programs, SharedGpu
from topobus.values.errors import HardwareError

__all__ = ["EXCLUSIVE", "PIPES_VARIABLE", "ask", "compute_mode", "limit_commands", "set_compute_mode", "spawn"]

PIPES_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
EXCLUSIVE = "EXCLUSIVE_PROCESS"

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Both are far more than it takes: a command is answered at once, and nvidia-smi initialises a GPU
# first, which takes a second or two. They end a hang. An undoing has less in all.
_ASK_S = 10.0
_SMI_S = 10.0
# The end of a command's output, in characters, that an error quotes.
_QUOTED = 300


def spawn(folder: DaemonFolder, state: DaemonState, limit_s: float) -> None:
    """Start the control daemon, and return when it is in the background. It may not answer yet.

    Errors: raises HardwareError when the program fails or takes too long.
    """
    variables = {
        **_variables(folder, state.programs),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in state.gpus),
        MARK: str(folder.path),
    }
    output = folder.logs / "start.log"
    with output.open("wb") as log:
        # Never a pipe: the daemon would inherit it, and reading it would wait for the daemon's end.
        done = _run([state.programs.control, "-d"], variables, limit_s, stdout=log)
    if done.returncode != 0:
        raise _failed(
            [state.programs.control, "-d"], done.returncode, output.read_text(encoding="utf-8", errors="replace")
        )


def ask(folder: DaemonFolder, programs: Programs, command: str, limit_s: float = _ASK_S) -> str:
    """Send a command to the control daemon, and return its answer.

    Errors: raises HardwareError when no daemon answers.
    """
    # Without the mark: this is a client, and must not count as a process of a daemon.
    done = _run([programs.control], _variables(folder, programs), limit_s, stdin=f"{command}\n".encode())
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0:
        raise _failed([programs.control, command], done.returncode, text)
    return text


def limit_commands(state: DaemonState, servers: str) -> tuple[str, ...]:
    """List the commands by which a daemon gets its limits, for later servers and for those that
    run.

    Shapes: servers — pids of those that run, as the daemon lists them.

    >>> from topobus.gpu.mps.daemon_state import Limits
    >>> gpus = (SharedGpu(device="gpu-0", uuid="GPU-1"),)
    >>> limits = Limits(threads_percent=25, memory_mib=(1024,))
    >>> limit_commands(DaemonState(name="gpu-0", gpus=gpus, limits=limits, programs=Programs(control="c")), "71")[:2]
    ('set_default_active_thread_percentage 25', 'set_active_thread_percentage 71 25')
    """
    pids = [word for word in servers.split() if word.isdecimal()]
    commands: list[str] = []
    if percent := state.limits.threads_percent:
        commands += [
            f"set_default_active_thread_percentage {percent}",
            *(f"set_active_thread_percentage {pid} {percent}" for pid in pids),
        ]
    for ordinal, mib in enumerate(state.limits.memory_mib):
        if mib:
            commands += [f"set_default_device_pinned_mem_limit {ordinal} {mib}M"]
            commands += [f"set_device_pinned_mem_limit {pid} {ordinal} {mib}M" for pid in pids]
    return tuple(commands)


def compute_mode(folder: DaemonFolder, programs: Programs, gpu: SharedGpu) -> str:
    """Read a GPU's compute mode, in the word that sets it, such as `DEFAULT`.

    Errors: raises HardwareError when nvidia-smi fails or takes too long.
    """
    command = [programs.smi, "-i", gpu.uuid, "--query-gpu=compute_mode", "--format=csv,noheader"]
    done = _run(command, _variables(folder, programs), _SMI_S)
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0 or not text:
        raise _failed(command, done.returncode, text)
    return text.upper().replace(" ", "_")


def set_compute_mode(folder: DaemonFolder, programs: Programs, gpu: SharedGpu, mode: str) -> None:
    """Set a GPU's compute mode, which only root may.

    Errors: raises HardwareError when nvidia-smi fails or takes too long.
    """
    command = [programs.smi, "-i", gpu.uuid, "-c", mode]
    done = _run(command, _variables(folder, programs), _SMI_S)
    if done.returncode != 0:
        raise _failed(command, done.returncode, done.stdout.decode("utf-8", "replace"))


def _variables(folder: DaemonFolder, programs: Programs) -> dict[str, str]:
    libraries = {"LD_LIBRARY_PATH": str(folder.libraries)} if programs.libraries else {}
    # The daemon starts its server by name, so the driver's own folder comes first.
    path = f"{Path(programs.control).parent}:{_PATH}"
    return {"PATH": path, PIPES_VARIABLE: str(folder.pipes), "CUDA_MPS_LOG_DIRECTORY": str(folder.logs), **libraries}


def _run(
    command: list[str],
    variables: Mapping[str, str],
    limit_s: float,
    *,
    stdin: bytes = b"",
    stdout: int | BinaryIO = subprocess.PIPE,
) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(
            command,
            env=dict(variables),
            timeout=limit_s,
            check=False,
            cwd="/",
            stdout=stdout,
            stderr=subprocess.STDOUT,
            input=stdin,
        )
    except subprocess.TimeoutExpired as err:
        raise HardwareError(f"{' '.join(command)} did not end within {limit_s:g} s", path=command[0]) from err
    except OSError as err:
        raise HardwareError(f"{command[0]} cannot be started: {err.strerror or err}", path=command[0]) from err
    return done


def _failed(command: list[str], status: int, output: str) -> HardwareError:
    text = " ".join(output.split())[-_QUOTED:] or "none"
    return HardwareError(f"{' '.join(command)} ended with status {status}; its output: {text}", path=command[0])
