"""A driver on a machine that obeys, with a journal: what a device service does with it, without a
device service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from support.kernel_writes import KernelWrites
from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledVerbs, JournaledWork
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["JournaledBench"]

Driver = TypeVar("Driver", bound=DeviceDriver)


class JournaledBench(ABC, Generic[Driver]):
    """One driver's life after the other on one machine.

    Args: follow — makes the machine's kernel obey what is written below its root.
    """

    def __init__(self, folder: Path, follow: Callable[[KernelWrites], None]) -> None:
        self.root = folder / "machine"
        self.tree = Tree(HardwareSettings(root=str(self.root)))
        self.writes = KernelWrites(self.root)
        self.journal = Journal(folder / "journal")
        self.devices: dict[str, Device] = {}
        self._follow = follow
        self.driver = self.new_driver()

    @abstractmethod
    def new_driver(self) -> Driver:
        """Make the driver of a new life."""

    def __enter__(self) -> Self:
        """Begin to obey."""
        self.writes.__enter__()
        self._follow(self.writes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        self.journal.close()
        self.writes.__exit__(kind, error, traceback)

    def restart(self) -> None:
        """Begin a new life: a new driver that reads the journal of the one before."""
        self.journal.close()
        self.journal = Journal(self.journal.folder)
        self.journal.load()
        self.driver = self.new_driver()

    def prepare(
        self, owner: str, *names: str, journal: Journal | None = None, config: Sequence[dict[str, Any]] = ()
    ) -> Edits | Refusal | JournaledWork:
        """Ask for devices."""
        context = PrepareContext(owner=_owner(owner), config=tuple(config))
        return self._verbs(journal).prepare([self.devices[name] for name in names], context, ())

    def get(
        self, owner: str, *names: str, journal: Journal | None = None, config: Sequence[dict[str, Any]] = ()
    ) -> Edits | Refusal:
        """Ask for devices, and wait for long work."""
        return self.finish(self.prepare(owner, *names, journal=journal, config=config))

    def finish(self, answer: Edits | Refusal | JournaledWork) -> Edits | Refusal:
        """Do long work to its end."""
        return answer.run(lambda: True) if isinstance(answer, JournaledWork) else answer

    def unprepare(self, owner: str, *names: str, journal: Journal | None = None) -> None:
        """Give devices back."""
        devices = [self.devices[name] for name in names]
        self._verbs(journal).unprepare(devices, PrepareContext(owner=_owner(owner)))

    def undo_all(self) -> None:
        """Undo what is half done, as a start does, and release what is whole."""
        for entry in list(self.journal.entries.values()):
            for owner in entry.owners:
                self._verbs().undo_prepare(entry.device, owner.owner)

    def _verbs(self, journal: Journal | None = None) -> JournaledVerbs:
        return JournaledVerbs(journal or self.journal, self.driver, self.tree)


def _owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.CLAIM, name=name, uid=f"uid-{name}")
