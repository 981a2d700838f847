"""A process that dies in the middle of its writes, inside a test's own: from then on nothing that
it does reaches the journal or the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.journal.journal_values import DeviceEntry
from topobus.values.device import Device

__all__ = ["Death", "Fate", "MortalJournal"]


class Death(BaseException):
    """The process is dead: nothing that it still does reaches the machine."""


class Fate:
    """How many writes one process has left.

    Each has its own: threads of a dead one may still run beside the next.
    """

    def __init__(self, left: int) -> None:
        self._left = left
        self.is_dead = False
        self._lock = threading.RLock()

    def doom(self, left: int) -> None:
        """Let it die so many writes from now."""
        with self._lock:
            self._left = left

    def write(self, write: Callable[[], None]) -> None:
        """Write, unless the process dies before; or die after."""
        with self._lock:
            self._step()
            write()
            self._step()

    def end(self) -> bool:
        """End the process at the latest now; whether it had died.

        What is being written is written.
        """
        with self._lock:
            had_died, self.is_dead = self.is_dead, True
            return had_died

    def _step(self) -> None:
        self._left -= 1
        self.is_dead = self.is_dead or self._left <= 0
        if self.is_dead:
            raise Death


class MortalJournal(Journal):
    """A journal whose process may die."""

    def __init__(self, folder: Path, fate: Fate) -> None:
        super().__init__(folder)
        self._fate = fate

    def change(self, device: Device, change: Callable[[DeviceEntry], DeviceEntry]) -> None:
        """Write, or die."""
        self._fate.write(lambda: super(MortalJournal, self).change(device, change))
