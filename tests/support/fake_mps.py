"""NVIDIA's programs of MPS in a driver root, as real processes: compiled from tests/data/fake_mps,
which documents their behaviour.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from topobus.gpu.mps.daemon_processes import MARK

__all__ = ["FakeMps", "is_alive", "is_cut", "needs_gcc"]

_SOURCES = Path(__file__).parent.parent / "data" / "fake_mps"
_LIMIT_S = 60.0

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: the control daemon of MPS for tests cannot be built"
)


@cache
def _kept() -> TemporaryDirectory[str]:
    """Make a folder that goes with this process."""
    return TemporaryDirectory(prefix="topobus-mps-")


@cache
def _compiled(name: str) -> Path:
    target = Path(_kept().name) / name
    subprocess.run(
        ["gcc", "-O1", "-o", str(target), str(_SOURCES / f"{name}.c")], check=True, capture_output=True, timeout=120
    )
    return target


class FakeMps:
    """A driver root with the programs, and what a test can see of those that run."""

    def __init__(self, root: Path, state_dir: Path) -> None:
        """Install them below a folder; `state_dir` is where the service has the folders of its
        daemons.
        """
        self.root, self.state_dir = root, state_dir
        self.programs = root / "usr" / "bin"
        (self.programs / "modes").mkdir(parents=True)
        for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            shutil.copy(_compiled(name), self.programs / name)
        shutil.copy(_SOURCES / "nvidia-smi", self.programs / "nvidia-smi")

    def behave(self, how: str = "") -> None:
        """Let the programs misbehave from now on: `fails`, `mute`, `deaf`, `powerless`.

        Nothing: as they should.
        """
        written = self.programs / "behaviour.new"
        written.write_text(f"{how}\n", encoding="utf-8")
        written.replace(self.programs / "behaviour")

    def add_gpu(self, uuid: str, mode: str = "Default") -> None:
        """Let nvidia-smi know a GPU."""
        (self.programs / "modes" / uuid).write_text(f"{mode}\n", encoding="utf-8")

    def reset_modes(self) -> None:
        """Put all GPUs into the usual compute mode."""
        for path in (self.programs / "modes").iterdir():
            path.write_text("Default\n", encoding="utf-8")

    def modes(self) -> set[str]:
        """Give the compute modes that GPUs are in."""
        return {
            path.read_text(encoding="utf-8").strip()
            for path in (self.programs / "modes").iterdir()
            if not path.name.endswith(".new")
        }

    def pids(self, name: str = "") -> list[int]:
        """Find the processes that were started for a daemon's folder, or for any.

        Those that have ended and are not collected are none.
        """
        wanted = f"{MARK}={self.state_dir}{f'/{name}' if name else ''}".encode()
        pids = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):  # noqa: PTH208 - names only
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if command == "nvidia-cuda-mps" and any(variable.startswith(wanted) for variable in environment):
                pids.append(pid)
        return pids

    def ask(self, name: str, command: str) -> str:
        """Give a daemon a command, by its own program."""
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(self.state_dir / name / "pipe")}
        done = subprocess.run(
            [str(self.programs / "nvidia-cuda-mps-control")],
            input=f"{command}\n",
            env=variables,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
        return done.stdout.strip()

    def client(self, name: str) -> socket.socket:
        """Give a client's connection; it ends when its daemon does."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_LIMIT_S)
        connection.connect(str(self.state_dir / name / "pipe" / "control"))
        connection.sendall(b"client\n")
        assert connection.recv(100) == b"ready\n"
        return connection

    def folders(self) -> list[str]:
        """Name the daemons' folders, that of kept logs not among them."""
        return (
            sorted(path.name for path in self.state_dir.iterdir() if path.name != "failed")
            if self.state_dir.is_dir()
            else []
        )

    def kill(self, pid: int) -> None:
        """Kill a process, and wait until it has ended."""
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            wait_for_end(handle)
        finally:
            os.close(handle)

    def end_all(self) -> None:
        """Kill what a test has left."""
        for pid in self.pids():
            try:
                self.kill(pid)
            except ProcessLookupError:
                continue


def is_alive(connection: socket.socket) -> bool:
    """Return whether a client's connection is still open."""
    return not select.select([connection], [], [], 0)[0] or connection.recv(1, socket.MSG_PEEK) != b""


def is_cut(connection: socket.socket) -> bool:
    """Wait for the end of a client's connection."""
    return connection.recv(1) == b""


def wait_for_end(handle: int) -> None:
    """Wait until the process of a handle has ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(_LIMIT_S * 1000), "it does not end"
