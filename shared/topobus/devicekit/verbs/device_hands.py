"""The common frame of every verb that changes a device: a device has one verb at a time, what a
crash left half done is undone first, and a dirty device is refused.

A request gets the turn on its devices, or the reason why not (unreadable journal, half-done work
that cannot be undone, cleaning). Work that is half done at the start is undone in the background,
and at the latest before the first request of that device. Work that cannot be undone makes the
device Unhealthy (`dirty`) and is tried again. A driver that is still at work on it is no such
evidence: pods keep the device, and it is given to no other owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import groupby
from typing import NamedTuple

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.isolation import DriverError, DriverHung, IsolatedDriver
from topobus.devicekit.journal.journal import Journal, JournalTaken
from topobus.devicekit.journal.journal_values import OwnerEntry
from topobus.devicekit.passthrough.function_switch import FunctionSwitch
from topobus.devicekit.passthrough.passthrough import PassthroughDriver
from topobus.devicekit.settings import CleaningSettings, PassthroughSettings
from topobus.devicekit.verbs.cleaning import DeviceCleaner
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs
from topobus.devicekit.verbs.leftovers import cleaning as being_cleaned
from topobus.devicekit.verbs.leftovers import dirty, journal_unreadable
from topobus.devicekit.verbs.long_work import LongJobs
from topobus.devicekit.verbs.operator_verbs import bind_again, report_interrupted
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.request import Owner

__all__ = ["DeviceHands", "device_unknown", "driver_not_loaded"]

# How often to check whether another process has released the journal, or an unreadable file was
# repaired.
_LOOK_S = 1.0
_MOST_DOUBLINGS = 6


class _Unmended(NamedTuple):
    """The reason why half-done work on a device could not be undone at the last try.

    `is_waiting`: an earlier call of the driver is still under way, which is no evidence against the
    device.
    """

    why: str
    is_waiting: bool = False


class DeviceHands:
    """The turns on the devices of one class, and what must be undone before a device is given to an
    owner.
    """

    def __init__(
        self,
        drivers: Mapping[str, IsolatedDriver],
        tree: Tree,
        find_device: Callable[[str], Device | None],
        journal: Journal,
        *,
        clock: Clock,
        cleaning: CleaningSettings = CleaningSettings(),  # noqa: B008 - frozen
        passthrough: PassthroughSettings = PassthroughSettings(),  # noqa: B008 - frozen
        wait_s: float,
    ) -> None:
        """Keep the collaborators. `wait_s` is how long a request waits for its turn on a device."""
        self.drivers = drivers
        self.tree = tree
        self.journal = journal
        self._find = find_device
        self._clock = clock
        self._wait_s = wait_s
        self._passthrough = passthrough
        self.cleaner = DeviceCleaner(drivers, tree, self.find, journal, clock=clock, settings=cleaning)
        self.jobs = LongJobs(clock)
        self._locks: dict[str, asyncio.Lock] = {}
        self._unmended: dict[str, _Unmended] = {}
        self._has_leftovers = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self.look_again: Callable[[str], None] = lambda _driver: None
        """Has a driver's devices looked for again soon; the host sets it."""
        self.looked_again: Callable[[str], Awaitable[None]] = lambda _driver: asyncio.sleep(0)
        """The same, and returns when everybody can see what it found, or could for a while."""
        self._publish: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0)

    def on_change(self, tell: Callable[[], None], publish: Callable[[], Awaitable[object]]) -> None:
        """Register a callback for changes of `observations`.

        `publish` returns when they are published, or when that takes too long.
        """
        self._on_change, self._publish = tell, publish
        self.cleaner.on_change(tell)

    def find(self, name: str) -> Device | None:
        """Find a device: as the driver sees it, or as the journal knows it while a pod hides it."""
        entry = self.journal.entries.get(name)
        return self._find(name) or (entry.device if entry is not None else None)

    def find_with_driver(self, name: str, device_class: str) -> tuple[Device, IsolatedDriver] | Refusal:
        """Find a device and its driver, or refuse a device that is not there, or whose driver is not
        loaded.
        """
        device = self.find(name)
        if device is None:
            return device_unknown(name, device_class)
        isolated = self.drivers.get(device.driver)
        return driver_not_loaded(device) if isolated is None else (device, isolated)

    def verbs(self, driver: DeviceDriver) -> JournaledVerbs:
        """Return a driver's verbs, which write into the journal of this class."""
        return JournaledVerbs(self.journal, driver, self.tree)

    def by_driver(self, devices: Iterable[Device]) -> dict[str, tuple[Device, ...]]:
        """Group devices by their drivers, both sorted by name."""
        ordered = sorted(devices, key=lambda device: (device.driver, device.name))
        return {name: tuple(group) for name, group in groupby(ordered, key=lambda device: device.driver)}

    def passthrough_driver(self, driver: DeviceDriver, owner: Owner) -> PassthroughDriver:
        """Return the driver that replaces the given one for devices that an owner wants for a
        virtual machine, or has there.
        """

        def own() -> frozenset[PciAddress]:
            entries = [
                entry
                for entry in self.journal.entries.values()
                if (of_owner := entry.of(owner)) and of_owner.is_passed_through
            ]
            return frozenset(entry.device.pci for entry in entries if entry.device.pci is not None)

        return PassthroughDriver(driver, self._passthrough, own)

    def undoing_driver(self, isolated: IsolatedDriver, device: str, owner: Owner) -> IsolatedDriver:
        """Return the driver that undoes an owner's `prepare`.

        A device in passthrough is brought back in a thread of its own, because a kernel driver may
        take long to begin.
        """
        if not self.journal.owner_entry(device, owner).is_passed_through:
            return isolated
        driver = self.passthrough_driver(isolated.driver, owner)
        return isolated.beside(driver, timeout_s=2 * self._passthrough.switch_s)

    def switching(self, isolated: IsolatedDriver) -> tuple[IsolatedDriver, FunctionSwitch]:
        """Return a driver with a thread of its own, because a kernel driver may take long to begin,
        and the switch of its functions.
        """
        switch_s = self._passthrough.switch_s
        return isolated.beside(timeout_s=2 * switch_s), FunctionSwitch(self.tree, limit_s=switch_s)

    def refuse_passed_through(self, names: Iterable[str], owner: Owner, asked: Collection[str]) -> Refusal | None:
        """Refuse devices that another owner has in passthrough, and those among `asked` (for a
        virtual machine) that another owner has at all.
        """
        for name in names:
            entry = self.journal.entries.get(name)
            for other in entry.owners if entry is not None else ():
                if other.owner.key != owner.key and (other.is_passed_through or name in asked):
                    where = "with a virtual machine of " if other.is_passed_through else "in use by "
                    return refuse(
                        "device-passed-through",
                        f"device {name} is {where}{other.owner}",
                        device=name,
                        owner=other.owner.key,
                    )
        return None

    async def clean(self, names: Iterable[str]) -> None:
        """Begin to clean what was left, and wait until it is clean or published as not clean."""
        names = tuple(names)
        for name in names:
            self.cleaner.begin(name)
        if not await self.cleaner.settle(names):
            await self._publish()

    def observations(self) -> dict[str, Observation]:
        """Return which devices are out of use for what was left on them.

        Stable as long as nothing changes.
        """
        seen = self.cleaner.observations()
        for name, unmended in self._unmended.items():
            entry = self.journal.entries.get(name)
            owners = entry.half_done if entry is not None else ()
            observe = being_cleaned if unmended.is_waiting else dirty
            seen[name] = observe(owners[0].owner if owners else None, unmended.why)
        return {**seen, **{name: journal_unreadable(why) for name, why in self.journal.unreadable.items()}}

    async def load(self, readiness: Readiness) -> None:
        """Read the journal of the earlier run. Waits while another process has it."""
        is_waited_for = False
        while True:
            try:
                await asyncio.to_thread(self.journal.load)
            except JournalTaken as err:
                is_waited_for = True
                readiness.set("journal", is_ready=False, why=err.message)
                await self._clock.sleep(_LOOK_S)
                continue
            except HardwareError as err:
                # Requests that need no journal are served. Those that must write into it are
                # refused, with the same text.
                readiness.set("journal", is_ready=True, why=str(err))
                get_logger().error("journal.unread", why=err.message, next_step=err.next_step)
            else:
                if is_waited_for:
                    readiness.set("journal", is_ready=True)
            break
        await asyncio.to_thread(report_interrupted, self.journal)
        for name, why in sorted(self.journal.unreadable.items()):
            get_logger().error(
                "journal.misread",
                device=name,
                why=why,
                next_step="mend the file, or remove it when the device is as it should be",
            )
        for name in sorted(self.journal.entries):
            # Before the first request for one of them.
            self.cleaner.begin(name, is_visible=True)
        self._note_leftovers()

    async def run(self) -> None:
        """Undo what is left, clean what is dirty, and finish long work, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._undo_leftovers())
            group.create_task(self.cleaner.run(group))
            group.create_task(self.jobs.run(group))

    @asynccontextmanager
    async def turn(self, names: Iterable[str]) -> AsyncIterator[Refusal | None]:
        """Take the turn on these devices, with nothing half done on them, or yield why not."""
        async with AsyncExitStack() as stack:
            yield await self._enter(stack, sorted(set(names)))
        self._note_leftovers()

    async def _enter(self, stack: AsyncExitStack, names: Sequence[str]) -> Refusal | None:
        for name in names:
            lock = self._locks.setdefault(name, asyncio.Lock())
            try:
                async with self._clock.timeout(self._wait_s):
                    await stack.enter_async_context(lock)
            except TimeoutError:
                return refuse("device-busy", f"device {name} is still at work for another request", device=name)
        for name in names:
            if name in self.journal.unreadable:
                text = f"the journal of device {name} cannot be read: {self.journal.unreadable[name]}"
                return refuse("journal-unreadable", text, device=name)
            unmended = await self._mend(name)
            if unmended is not None:
                text = f"device {name}: what was half done cannot be undone: {unmended.why}"
                return refuse("undo-failed", text, device=name)
        return None

    def _half_done(self, name: str) -> list[OwnerEntry]:
        entry = self.journal.entries.get(name)
        return [
            owner
            for owner in (entry.half_done if entry is not None else ())
            if not self.jobs.is_under_way(name, owner.owner)
        ]

    def _is_unbound(self, name: str) -> bool:
        """Say whether a rebind must be finished. One that is under way has the turn."""
        entry, lock = self.journal.entries.get(name), self._locks.get(name)
        return entry is not None and entry.is_unbound and not (lock is not None and lock.locked())

    def _is_half_done(self, name: str) -> bool:
        return bool(self._half_done(name)) or self._is_unbound(name)

    def _has_left(self) -> bool:
        return (
            any(map(self._is_half_done, self.journal.entries)) or bool(self.journal.unreadable) or bool(self._unmended)
        )

    def _note_leftovers(self) -> None:
        if self._has_left():
            self._has_leftovers.set()

    async def _undo_leftovers(self) -> None:
        tries = 0
        while True:
            await self._has_leftovers.wait()
            self._has_leftovers.clear()
            for name in await asyncio.to_thread(self.journal.reread):
                get_logger().info("journal.mended", device=name)
                self._on_change()
            for name in sorted({*self.journal.entries, *self._unmended}):
                if self._is_half_done(name) or name in self._unmended:
                    async with self._locks.setdefault(name, asyncio.Lock()):
                        await self._mend(name)
            is_done = not self._has_left()
            tries = 0 if is_done else tries + 1
            if not is_done:
                self._has_leftovers.set()
                await self._clock.sleep(_LOOK_S * 2 ** min(tries - 1, _MOST_DOUBLINGS))

    async def _mend(self, name: str) -> _Unmended | None:
        """Undo what is half done on a device. None when nothing is left.

        The caller has its turn.
        """
        before = self._unmended.get(name)
        unmended = None
        for owner in self._half_done(name):
            unmended = unmended or await self._undo(name, owner)
        unmended = unmended or await self._bind_again(name)
        if unmended is None:
            self._unmended.pop(name, None)
        else:
            self._unmended[name] = unmended
        if unmended != before:
            self._on_change()
        return unmended

    async def _bind_again(self, name: str) -> _Unmended | None:
        entry = self.journal.entries.get(name)
        if entry is None or not entry.is_unbound:
            return None
        device = entry.device
        isolated = self.drivers.get(device.driver)
        if isolated is None:
            return _Unmended(f"driver {device.driver!r} is not loaded")
        try:
            beside, switch = self.switching(isolated)
            await beside.call("bind", partial(bind_again, self.journal, isolated.driver, switch, device))
        except DriverError as err:
            return _Unmended(err.message, is_waiting=isinstance(err, DriverHung))
        self.look_again(device.driver)
        get_logger().info("device.bound", device=name)
        return None

    async def _undo(self, name: str, entry: OwnerEntry) -> _Unmended | None:
        device = self.find(name)
        isolated = self.drivers.get(device.driver) if device is not None else None
        if device is None or isolated is None:
            return _Unmended(f"driver {device.driver if device else ''!r} is not loaded")
        isolated = self.undoing_driver(isolated, name, entry.owner)
        driver = isolated.driver
        steps: list[Callable[[], None]] = []
        if entry.is_half_attached:
            if not driver.capabilities.attaches:
                return _Unmended(f"driver {driver.name} cannot detach any more")
            steps.append(partial(self.verbs(driver).detach, device, entry.owner, None))
        if entry.is_half_prepared:
            steps.append(partial(self.verbs(driver).undo_prepare, device, entry.owner))
        try:
            for step in steps:
                await isolated.call("undo", step)
        except DriverError as err:
            get_logger().warning("undo.failed", device=name, owner=entry.owner.key, why=err.message)
            return _Unmended(err.message, is_waiting=isinstance(err, DriverHung))
        self.cleaner.begin(name)
        if entry.is_passed_through:
            self.look_again(device.driver)
        get_logger().info(
            "device.undone",
            device=name,
            owner=entry.owner.key,
            steps=[step.name for step in (*entry.prepare.steps, *entry.attach.steps)],
        )
        return None


def device_unknown(name: str, device_class: str) -> Refusal:
    """Refuse a device that the class does not have."""
    return refuse("device-unknown", f"class {device_class} has no device {name!r} on this node", device=name)


def driver_not_loaded(device: Device) -> Refusal:
    """Refuse a device whose driver does not run."""
    text = f"device {device.name} belongs to driver {device.driver!r}, which is not loaded"
    return refuse("driver-not-loaded", text, device=device.name)
