"""Histories of one device that must be clean before its next owner: owners that come and go,
failures, and processes that die over one journal.

A history has a device with its hardware (`Hardware`), and acts. Others see the device by an
inventory. It is merged as the host merges it, when the hands publish it and once after each act, as
a look of the host may do at any time. An assertion fails where an owner got a device that was not
cleaned, or one was offered to others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st

from support.mortal_journal import Fate, MortalJournal
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.settings import CleaningSettings, PassthroughSettings
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.leftovers import with_leftovers
from topobus.devicekit.verbs.prepare import Preparer
from topobus.engine.health.health_machine import HealthSettings
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.readiness import Readiness
from topobus.sysfs.tree import Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Device
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["ACTS", "VISITS", "CleaningHistory", "Hardware"]

LIMIT_S = 60.0
OWNERS = tuple(Owner(kind=OwnerKind.CLAIM, namespace="default", name=name, uid=f"u-{name}") for name in ("ada", "ben"))
# The clock that histories advance ends no call: that it was too slow is not what they are about.
_ENDLESS_S = 1e9
CLEANING = CleaningSettings(limit_s=_ENDLESS_S)
# Longer than the longest pause between two tries, of cleaning and of undoing.
_PAUSE_S = 64 * max(CLEANING.retry_s, 1.0)
_NEVER = 1_000_000

ACTS = st.one_of(
    st.tuples(st.just("come"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["fail", "refuse"]), st.integers(0, 3)),
    st.tuples(st.just("doom"), st.integers(1, 24)),
    st.tuples(st.sampled_from(["go", "wait", "restart"]), st.just(0)),
)
# By chance alone few histories would have somebody who goes while something
# fails, and another one who wants it.
VISITS = st.tuples(st.sampled_from(["fail", "refuse"]), st.integers(0, 3), st.integers(0, 24)).map(
    lambda chosen: [("come", 0), chosen[:2], *([("doom", chosen[2])] if chosen[2] else []), ("go", 0), ("come", 1)]
)


class Hardware(Protocol):
    """One device, and what the law must know of it."""

    failures: int
    """So many of the next acts of cleaning fail."""
    refusals: int
    """So many of the next acts of making it what it was before fail."""
    is_stained: bool
    """Somebody has used it, and its cleaning has not succeeded since."""
    tree: Tree
    device: Device
    config: Mapping[str, Any] | None
    passthrough: PassthroughSettings

    def stain(self) -> None:
        """Let its owner use it."""
        ...

    def begin(self, fate: Fate) -> DeviceDriver:
        """Give the driver of a new process, whose writes are this fate's."""
        ...

    def settle(self) -> None:
        """Return when the kernel has done what a dead process had requested."""
        ...


class CleaningHistory:
    """One device, its present owner, and the expected state in a model."""

    def __init__(self, hardware: Hardware, journal_folder: Path) -> None:
        self.hardware = hardware
        self.deaths = 0
        self.dirty_seen = 0
        self._name = hardware.device.name
        self._journal_folder = journal_folder
        self._clock = ManualClock()
        self._devices: tuple[Device, ...] = ()
        """As everybody sees them: what is published stays so while no process lives."""
        self._holder: Owner | None = None
        self._is_leaving = False
        """The holder's release was asked for, and not answered with success: it is cut off, or
        refused."""
        self._life = AsyncExitStack()

    async def run(self, acts: Sequence[tuple[str, int]]) -> None:
        """Play a history; at its end nothing fails any more, and somebody gets the device."""
        await self._start()
        try:
            for act, number in [*acts, ("fail", 0), ("refuse", 0), ("doom", _NEVER)]:
                await getattr(self, "_" + act)(number)
                await self._check()
            async with asyncio.timeout(LIMIT_S):
                await self._end()
        finally:
            await self._life.aclose()

    async def _end(self) -> None:
        while self._holder is not None:
            await self._wait(0)
            await self._go(0)
        while not self._published().is_allocatable:
            await self._wait(0)
            self._merge()
        await self._come(1)
        if self._holder is None:
            # The first answer was why earlier work for this owner failed, which is told once.
            await self._come(1)
        assert self._holder is OWNERS[1], "a clean device was kept back"

    async def _start(self) -> None:
        self._life = AsyncExitStack()
        await self._life.enter_async_context(self._new_process())

    @asynccontextmanager
    async def _new_process(self) -> AsyncIterator[None]:
        self._fate = Fate(_NEVER)
        driver = self.hardware.begin(self._fate)
        journal = MortalJournal(self._journal_folder, self._fate)
        self._hands = DeviceHands(
            {driver.name: IsolatedDriver(driver, timeout_s=_ENDLESS_S, clock=self._clock)},
            self.hardware.tree,
            self._find,
            journal,
            clock=self._clock,
            cleaning=CLEANING,
            passthrough=self.hardware.passthrough,
            wait_s=_ENDLESS_S,
        )
        self._driver = driver.name
        self._preparer = Preparer(driver.device_class, self._hands, self._find)
        self._hands.on_change(self._merge, self._publish)
        await self._hands.load(Readiness())
        self._merge()
        running = asyncio.create_task(self._hands.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self.deaths += self._fate.end()
            journal.close()
            self.hardware.settle()

    def _find(self, name: str) -> Device | None:
        return next((device for device in self._devices if device.name == name), None)

    def _published(self) -> Device:
        device = self._find(self._name)
        assert device is not None
        return device

    def _merge(self) -> None:
        """Do the host's step. What the driver itself sees of the device does not change."""
        view = DriverView(devices=(self.hardware.device,))
        self._devices = advance_inventory(
            MergedInventory(devices=self._devices),
            with_leftovers({self._driver: view}, self._hands.observations()),
            device_class=self.hardware.device.device_class,
            machine=Machine(node="n1", numa_nodes=(), cpus=()),
            held=None,
            now=self._clock.now(),
            settings=HealthSettings(),
        ).devices

    async def _publish(self) -> None:
        self._merge()

    async def _check(self) -> None:
        """Assert that a device that was released and is not clean is not offered, neither in the
        last inventory nor after another look.

        A dead process is replaced by a new one.
        """
        self._check_offer()
        if self._fate.is_dead:
            await self._restart(0)
        self._merge()
        self._check_offer()

    def _check_offer(self) -> None:
        # First the hardware: it may become clean at any moment, and never stained but by an act.
        if self.hardware.is_stained and self._holder is None:
            self.dirty_seen += 1
            assert not self._published().is_allocatable, "a device was offered before its cleaning succeeded"

    async def _come(self, number: int) -> None:
        owner = OWNERS[number]
        if self._holder not in (None, owner) and not self._is_known_to_leave():
            # The ledger gives a device to one owner at a time, and keeps it for him
            # until his release has succeeded.
            return
        is_again = self._holder is owner
        answer = await self._ask(owner)
        if isinstance(answer, Prepared):
            assert is_again or not self.hardware.is_stained, "a device was given before its cleaning succeeded"
            self.hardware.stain()
        # Whether a dead process served its owner is not known; where another one was leaving, the
        # hands may have undone that one's first.
        may_have = self._fate.is_dead and (self._holder is None or (not is_again and self._has_entry(owner)))
        if isinstance(answer, Prepared) or may_have:
            self._holder, self._is_leaving = owner, self._fate.is_dead

    def _has_entry(self, owner: Owner) -> bool:
        return not self._hands.journal.owner_entry(self._name, owner).is_empty

    def _is_known_to_leave(self) -> bool:
        """Return whether the hands themselves know that the holder leaves. Then they refuse others,
        whatever a ledger has.
        """
        if not self._is_leaving or self._holder is None:
            return False
        entry = self._hands.journal.owner_entry(self._name, self._holder)
        return entry.is_empty or entry.is_half_prepared

    async def _ask(self, owner: Owner) -> Prepared | Refusal | Accepted | None:
        config = (dict(self.hardware.config),) if self.hardware.config is not None else ()
        request = PrepareRequest(op_id="", owner=owner, devices=(self._name,), config=config)
        async with asyncio.timeout(LIMIT_S):
            while (
                isinstance(result := (await self._preparer.prepare(request)).result, Accepted)
                and not self._fate.is_dead
            ):
                await _let_others_run()
        return result

    async def _go(self, _: int) -> None:
        if self._holder is None:
            return
        self._is_leaving = True
        request = UnprepareRequest(op_id="", owner=self._holder, devices=(self._name,))
        refusal = (await self._preparer.unprepare(request)).refusal
        if refusal is None and not self._fate.is_dead:
            self._holder, self._is_leaving = None, False

    async def _fail(self, number: int) -> None:
        self.hardware.failures = number

    async def _refuse(self, number: int) -> None:
        self.hardware.refusals = number

    async def _doom(self, number: int) -> None:
        self._fate.doom(number)

    async def _wait(self, _: int) -> None:
        self._clock.advance(_PAUSE_S)
        await _let_others_run()

    async def _restart(self, _: int) -> None:
        await self._life.aclose()
        await self._start()


async def _let_others_run() -> None:
    """Return after a turn of another thread: a loop that only yields keeps the interpreter's lock
    from the drivers' threads that it waits for.
    """
    await asyncio.to_thread(os.sched_yield)
