"""Processes that die (SIGKILL) at a chosen step of a driver's verb, for the contract suite: each
write of the journal is two steps, before it and after it.

The verb is a function of a journal. It runs in a copy of this process (fork), so what it changes
must be outside of it: files, the kernel, hardware. Nothing else of the copy is left, as nothing of
a killed service is.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.journal.journal_values import DeviceEntry
from topobus.values.device import Device

__all__ = ["deaths"]

# More than any verb has: a loop that never ends would be a bug of the driver.
_MOST_STEPS = 400


class _MortalJournal(Journal):
    """A journal whose process dies at a step."""

    def __init__(self, folder: Path, deadly: int) -> None:
        super().__init__(folder)
        self._steps_left = deadly

    def change(self, device: Device, change: Callable[[DeviceEntry], DeviceEntry]) -> None:
        """Die before the write, write, die after it.

        A change that changes nothing writes nothing.
        """
        before = self.entries.get(device.name, DeviceEntry(device=device))
        if change(before) == before:
            return
        self._step()
        super().change(device, change)
        self._step()

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def deaths(folder: Path, verb: Callable[[Journal], object]) -> Iterator[int]:
    """Kill a process at each step of a verb, one after the other.

    The caller restores the initial state after each iteration.

    Shapes: folder — the journal's; result — the step at which a process just died. Ends when the
    verb ends before its next step; that process's changes stay.
    Errors: raises AssertionError when the verb raises.
    """
    for step in range(1, _MOST_STEPS):
        if not _dies(folder, verb, step):
            return
        yield step
    raise AssertionError(f"the verb has more than {_MOST_STEPS} steps")


def _dies(folder: Path, verb: Callable[[Journal], object], step: int) -> bool:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            journal = _MortalJournal(folder, step)
            journal.load()
            verb(journal)
            status = 0
        except BaseException:  # noqa: BLE001 - boundary: a driver under test, in a process that ends here
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)
    _, result = os.waitpid(pid, 0)
    if os.WIFSIGNALED(result):
        assert os.WTERMSIG(result) == signal.SIGKILL, f"the driver ended its process by signal {os.WTERMSIG(result)}"
        return True
    assert os.WEXITSTATUS(result) == 0, "the verb raised, see stderr"
    return False
