"""The wall clocks of the processes under test, which can be moved while these run.

Their monotonic clocks stay as they are. Environment variables for each process make libfaketime
give it a wall clock of its own, and there is a clock for clients on the same machine. Without
libfaketime (Debian: `libfaketime`) no clock is moved, and the harness reports that. A nats-server
does not read the time through the C library: its clock is never moved.

Source: https://github.com/wolfcw/libfaketime.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from topobus.process.clock import SystemClock

__all__ = ["MovedClock", "WallClocks", "find_libfaketime"]

_LIBRARY = "faketime/libfaketimeMT.so.1"
_FOLDERS = (Path("/usr/lib"), Path("/usr/local/lib"))
# Where the library leaves a file and a semaphore of each process that was killed.
_SHARED_MEMORY = Path("/dev/shm")


def find_libfaketime() -> Path | None:
    """Find the library where packages install it. None: it is not installed."""
    paths = (
        path for folder in _FOLDERS for path in (folder / _LIBRARY, *sorted(folder.glob(f"*-linux-gnu*/{_LIBRARY}")))
    )
    return next((path for path in paths if path.exists()), None)


class MovedClock(SystemClock):
    """A machine's clock with a wrong time."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> datetime:
        """Return the time that this clock shows."""
        return datetime.now(UTC) + timedelta(seconds=self.ahead_s)


class WallClocks:
    """The clocks of all processes of one machine."""

    def __init__(self, folder: Path, library: Path | None) -> None:
        """Prepare. `library` is libfaketime, None: no clock can be moved."""
        self._folder = folder
        self._library = library
        self._names: set[str] = set()
        self.machine = MovedClock()
        """What the machine's clock shows, for clients that run beside the services."""

    @property
    def can_move(self) -> bool:
        """Say whether the clocks can be moved at all."""
        return self._library is not None

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables by which a process gets a clock of that name."""
        if self._library is None:
            return {}
        self._names.add(name)
        self._write(name, self.machine.ahead_s)
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # A file's time stays comparable with what other processes see of it.
            "NO_FAKE_STAT": "1",
        }

    def step(self, by_s: float) -> None:
        """Set the machine's clock forward or back, for all of its processes.

        Where theirs cannot be moved, no clock is.
        """
        if not self.can_move:
            return
        self.machine.ahead_s += by_s
        for name in self._names:
            self._write(name, self.machine.ahead_s)

    def skew(self, name: str, by_s: float) -> None:
        """Set one process's time apart from its machine's. 0: the machine's again."""
        if name in self._names:
            self._write(name, self.machine.ahead_s + by_s)

    def clean_up(self, pids: frozenset[int]) -> None:
        """Remove what the library keeps in shared memory for processes that have ended."""
        for pid in pids:
            for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                (_SHARED_MEMORY / name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.clock"

    def _write(self, name: str, ahead_s: float) -> None:
        # It is read each time that the clock is read, so it must never be half written.
        fresh = self._folder / f"{name}.clock.new"
        fresh.write_text(f"{ahead_s:+.3f}\n", "utf-8")
        fresh.replace(self._file(name))
