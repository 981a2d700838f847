"""What is known of one MPS control daemon: its GPUs and their previous compute modes, its limits,
its process.

It is written to `daemon.json` in the daemon's folder, as a whole and before each act. The next
start of the service reads it, and adopts the daemon or removes it. All functions block.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs

from topobus.devicekit.journal import durable_file
from topobus.formats.messages.codec import decode, encode
from topobus.values.errors import ContractError

__all__ = ["DaemonFolder", "DaemonState", "Limits", "Programs", "SharedGpu"]

_FILE = "daemon.json"
# The folder of logs of daemons that did not start. No device has this name, because device names
# begin with their class.
_FAILED = "failed"


class Programs(Struct, frozen=True, kw_only=True):
    """Where this service sees the driver's programs, and the libraries that they load."""

    control: str
    """`nvidia-cuda-mps-control`; the server is beside it."""
    smi: str = ""
    """`nvidia-smi`; empty where the compute mode is left alone."""
    libraries: dict[str, str] = {}
    """By name: the driver's own libraries, where the loader of this process does not find them by
    itself."""


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of a daemon's client, whatever its own variables are."""

    threads_percent: int = 0
    """0: all."""
    memory_mib: tuple[int, ...] = ()
    """By ordinal of the daemon's GPUs; 0, or none: all."""

    def raised_to(self, other: Limits) -> Limits:
        """Return limits that allow what either of the two allows. No limit allows most.

        >>> Limits(threads_percent=25, memory_mib=(100,)).raised_to(Limits(threads_percent=50, memory_mib=(80,)))
        Limits(threads_percent=50, memory_mib=(100,))
        """
        count = min(len(self.memory_mib), len(other.memory_mib))
        return Limits(
            threads_percent=_greater(self.threads_percent, other.threads_percent),
            memory_mib=tuple(
                _greater(*pair) for pair in zip(self.memory_mib[:count], other.memory_mib[:count], strict=True)
            ),
        )


class SharedGpu(Struct, frozen=True, kw_only=True):
    """One GPU of a daemon."""

    device: str
    uuid: str
    mode_before: str = ""
    """Its compute mode before the daemon; empty: it was not changed."""


class DaemonState(Struct, frozen=True, kw_only=True):
    """One daemon."""

    name: str
    """Of its folder: that of its first device."""
    owner: str = ""
    """The key of the owner that has all its GPUs; empty: its one GPU is
    shared by several owners."""
    gpus: tuple[SharedGpu, ...]
    """By ordinal, as its clients count them."""
    limits: Limits = Limits()
    programs: Programs
    pid: int = 0
    started: str = ""
    """Start time of the process, which distinguishes it from a later process with the same pid."""
    boot_id: str = ""
    """The boot in which it has that pid; empty while it was not started."""
    is_whole: bool = False
    """True: it was started, and answered."""
    is_ending: bool = False
    """True: it is being stopped, and a process that reads this continues the stop."""


class DaemonFolder:
    """The folder of one daemon."""

    def __init__(self, state_dir: Path, name: str) -> None:
        """Take its path. Nothing is made yet."""
        self.path = state_dir / name
        self.pipes = self.path / "pipe"
        self.logs = self.path / "log"
        self.libraries = self.path / "lib"
        self.failed_logs = state_dir / _FAILED / name

    def write(self, state: DaemonState) -> None:
        """Make a state durable."""
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        durable_file.write(self.path, _FILE, encode(state), mode=0o600)

    def read(self) -> DaemonState | None:
        """Read the state.

        None where the file is missing or cannot be read. Then the daemon's GPUs are not known, and
        only its processes can be ended.
        """
        try:
            return decode((self.path / _FILE).read_bytes(), DaemonState, where=str(self.path / _FILE))
        except (OSError, ContractError):
            return None

    def make(self, programs: Programs) -> None:
        """Make what the daemon needs: its pipes, its logs, links to the driver's libraries.

        A folder of pipes that exists is kept, because containers have it mounted.
        """
        for folder in (self.path, self.pipes, self.logs):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Clients of any user pass through, and an operator reads the logs, whatever this
            # process's umask is.
            folder.chmod(0o755)
        self.libraries.mkdir(exist_ok=True)
        for name, target in programs.libraries.items():
            link = self.libraries / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target)

    def clear_pipes(self) -> None:
        """Remove what a dead daemon left in its folder of pipes."""
        for left in self.pipes.iterdir() if self.pipes.is_dir() else ():
            left.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, the file with the state last."""
        for folder in (self.pipes, self.logs, self.libraries):
            _remove_tree(folder)
        for leftover in self.path.glob("*") if self.path.is_dir() else ():
            if leftover.name != _FILE:
                _remove_tree(leftover)
        durable_file.remove_leftovers(self.path, "*")
        if self.path.is_dir():
            durable_file.delete(self.path, _FILE)
            self.path.rmdir()

    @staticmethod
    def names(state_dir: Path) -> tuple[str, ...]:
        """List the names of the daemons that have a folder."""
        return (
            tuple(sorted(path.name for path in state_dir.iterdir() if path.is_dir() and path.name != _FAILED))
            if state_dir.is_dir()
            else ()
        )


def with_mode(state: DaemonState, uuid: str, mode_before: str) -> DaemonState:
    """Note a GPU's previous compute mode."""
    gpus = tuple(structs.replace(gpu, mode_before=mode_before) if gpu.uuid == uuid else gpu for gpu in state.gpus)
    return structs.replace(state, gpus=gpus)


def _greater(first: int, second: int) -> int:
    return 0 if 0 in (first, second) else max(first, second)


def _remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, or a file. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            _remove_tree(inner)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
