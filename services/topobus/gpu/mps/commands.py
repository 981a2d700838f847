"""Finds and runs the programs of NVIDIA's driver that MPS needs: the control daemon, its client, and
nvidia-smi for compute modes.

Each call has a time limit. A failed one raises HardwareError with the program, its output and its
exit status.
Source: NVIDIA Multi-Process Service guide: environment variables, commands of the control program;
nvidia-smi(1).
"""

from __future__ import annotations

from pathlib import Path

from topobus.gpu.driver_root.programs import SEARCH_PATH, failure, run_program, search_programs
from topobus.gpu.mps.daemon_processes import MARK
from topobus.gpu.mps.daemon_state import DaemonFolder, DaemonState, Programs, SharedGpu
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal

__all__ = [
    "EXCLUSIVE",
    "PIPES_VARIABLE",
    "ask",
    "compute_mode",
    "find_programs",
    "limit_commands",
    "set_compute_mode",
    "spawn",
]

PIPES_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
EXCLUSIVE = "EXCLUSIVE_PROCESS"

_CONTROL, _SERVER, _SMI = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi"

# Both are far more than it takes: a command is answered at once, and nvidia-smi initialises a GPU
# first, which takes a second or two. They end a hang. An undoing has less in all.
_ASK_S = 10.0
_SMI_S = 10.0


def find_programs(settings: DriverFilesSettings, version: str, *, wants_smi: bool) -> Programs | Refusal:
    """Find the programs of MPS in the driver root, and the driver's libraries that they load."""
    wanted = (_CONTROL, _SERVER, *((_SMI,) if wants_smi else ()))
    programs = search_programs(settings, version, wanted, "mps-program-missing")
    if isinstance(programs, Refusal):
        return programs
    return Programs(control=programs.paths[_CONTROL], smi=programs.paths.get(_SMI, ""), libraries=programs.libraries)


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
        done = run_program([state.programs.control, "-d"], variables, limit_s, stdout=log)
    if done.returncode != 0:
        raise _failed(
            [state.programs.control, "-d"], done.returncode, output.read_text(encoding="utf-8", errors="replace")
        )


def ask(folder: DaemonFolder, programs: Programs, command: str, limit_s: float = _ASK_S) -> str:
    """Send a command to the control daemon, and return its answer.

    Errors: raises HardwareError when no daemon answers.
    """
    # Without the mark: this is a client, and must not count as a process of a daemon.
    done = run_program([programs.control], _variables(folder, programs), limit_s, stdin=f"{command}\n".encode())
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
    done = run_program(command, _variables(folder, programs), _SMI_S)
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0 or not text:
        raise _failed(command, done.returncode, text)
    return text.upper().replace(" ", "_")


def set_compute_mode(folder: DaemonFolder, programs: Programs, gpu: SharedGpu, mode: str) -> None:
    """Set a GPU's compute mode, which only root may.

    Errors: raises HardwareError when nvidia-smi fails or takes too long.
    """
    command = [programs.smi, "-i", gpu.uuid, "-c", mode]
    done = run_program(command, _variables(folder, programs), _SMI_S)
    if done.returncode != 0:
        raise _failed(command, done.returncode, done.stdout.decode("utf-8", "replace"))


def _variables(folder: DaemonFolder, programs: Programs) -> dict[str, str]:
    libraries = {"LD_LIBRARY_PATH": str(folder.libraries)} if programs.libraries else {}
    # The daemon starts its server by name, so the driver's own folder comes first.
    path = f"{Path(programs.control).parent}:{SEARCH_PATH}"
    return {"PATH": path, PIPES_VARIABLE: str(folder.pipes), "CUDA_MPS_LOG_DIRECTORY": str(folder.logs), **libraries}


def _failed(command: list[str], status: int, output: str) -> HardwareError:
    return HardwareError(failure(command, status, output), path=command[0])
