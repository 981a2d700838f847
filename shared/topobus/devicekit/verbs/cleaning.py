"""Cleans devices after their last owner, before the next one: until a device is clean it is not
given to an owner, and requests for it get the reason.

The journal has the devices that an owner has left, also after a crash. While a device is cleaned it
has the observation `cleaning`. When that failed it has `dirty`, with the owner that left it, and is
tried again after ever longer pauses. Cleaning runs in a thread of its own for each device, beside
the driver's other methods, because it may take a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from topobus.devicekit.host.isolation import DriverError, IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import CleaningSettings
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs
from topobus.devicekit.verbs.leftovers import cleaning, dirty
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.health import Observation
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner

__all__ = ["DeviceCleaner"]

_MOST_DOUBLINGS = 6
_ASK_AGAIN_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Job:
    owner: Owner
    isolated: IsolatedDriver | None
    is_visible: bool = False
    """Told to everybody: it takes longer than an answer of `unprepare` waits."""
    why: str = ""
    """Why the last try failed; empty: none has."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    """What else the driver reports of it."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set as soon as the first try has ended."""


class DeviceCleaner:
    """Cleans the devices of one class."""

    def __init__(
        self,
        drivers: Mapping[str, IsolatedDriver],
        tree: Tree,
        find_device: Callable[[str], Device | None],
        journal: Journal,
        *,
        clock: Clock,
        settings: CleaningSettings,
    ) -> None:
        self._drivers = drivers
        self._tree = tree
        self._find = find_device
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._jobs: dict[str, _Job] = {}
        self._new: asyncio.Queue[tuple[str, _Job]] = asyncio.Queue()
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, tell: Callable[[], None]) -> None:
        """Register a callback for changes of `observations`."""
        self._on_change = tell

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Clean what is begun, each device as a task of the group, until cancelled."""
        while True:
            name, job = await self._new.get()
            group.create_task(self._clean(name, job))

    def begin(self, name: str, *, is_visible: bool = False) -> None:
        """Clean a device if that is due and has not begun yet. `is_visible`: show it in the
        observations from now on.
        """
        entry = self._journal.entries.get(name)
        device = self._find(name)
        if (
            entry is None
            or device is None
            or entry.to_clean is None
            or not entry.is_due_for_cleaning
            or name in self._jobs
        ):
            return
        own = self._drivers.get(device.driver)
        isolated = own.beside(timeout_s=self._settings.limit_s) if own is not None else None
        self._jobs[name] = job = _Job(owner=entry.to_clean, isolated=isolated, is_visible=is_visible)
        self._new.put_nowait((name, job))
        if is_visible:
            self._on_change()

    async def settle(self, names: Iterable[str]) -> bool:
        """Wait a moment for the begun cleaning. A device that takes longer is visible from then on.

        True when all are clean, so that nothing must be published.
        """
        jobs = [self._jobs[name] for name in names if name in self._jobs]
        if not jobs:
            return True
        try:
            async with self._clock.timeout(self._settings.answer_after_s):
                for job in jobs:
                    await job.tried.wait()
        except TimeoutError:
            for job in jobs:
                job.is_visible = True
            self._on_change()
        return not any(job in jobs for job in self._jobs.values())

    def observations(self) -> dict[str, Observation]:
        """Return which devices are being cleaned, and which are dirty."""
        return {
            name: dirty(job.owner, job.why, job.evidence) if job.why else cleaning(job.owner)
            for name, job in sorted(self._jobs.items())
            if job.is_visible or job.why
        }

    def obstacle(self, names: Iterable[str]) -> Refusal | Accepted | None:
        """Name the reason why devices cannot be given to an owner yet. None when they are clean."""
        for name in names:
            job = self._jobs.get(name)
            if job is not None and job.why:
                text = f"device {name} is dirty: {job.owner} left it so, and cleaning fails: {job.why}"
                return refuse("device-dirty", text, device=name, owner=job.owner.key)
            if job is not None:
                return Accepted(
                    retry_after_s=_ASK_AGAIN_S,
                    limit_s=self._settings.limit_s,
                    what=f"cleaning {name} after {job.owner}",
                )
        return None

    async def _clean(self, name: str, job: _Job) -> None:
        tries = 0
        while True:
            why, job.evidence = await self._try(name, job)
            if not why:
                del self._jobs[name]
                get_logger().info("device.cleaned", device=name, owner=job.owner.key, tries=tries + 1)
            elif why != job.why:
                get_logger().warning(
                    "clean.failed",
                    device=name,
                    owner=job.owner.key,
                    why=why,
                    next_step="it is tried again; the device is withheld",
                )
            is_news = (job.is_visible or job.why != "") if not why else why != job.why
            job.why = why
            job.tried.set()
            if is_news:
                self._on_change()
            if not why:
                return
            await self._clock.sleep(self._settings.retry_s * 2 ** min(tries, _MOST_DOUBLINGS))
            tries += 1

    async def _try(self, name: str, job: _Job) -> tuple[str, Mapping[str, str]]:
        """Clean once. Return why it failed, or nothing, and the driver's evidence."""
        device = self._find(name)
        if device is None or job.isolated is None:
            return "its driver is not loaded", {}
        clean = partial(JournaledVerbs(self._journal, job.isolated.driver, self._tree).clean, device)
        try:
            refusal = await job.isolated.call("clean", clean)
        except DriverError as err:
            return err.message, {}
        reasons = refusal.reasons if refusal is not None else ()
        evidence = {key: str(value) for reason in reasons for key, value in reason.facts.items()}
        return "; ".join(reason.message for reason in reasons), evidence
