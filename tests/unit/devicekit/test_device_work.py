"""Cleaning and long work through the host's hands, on cards that are folders; time is virtual."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.hands_bench import CLEANING, OTHER, OWNER, HandsBench, new_card
from support.looks import other_threads
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import LongWork, PrepareContext
from topobus.formats.messages.messages import Prepared
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.folder_driver import CARDS, FolderDriver
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal


@pytest.fixture
def bench(tmp_path: Path) -> HandsBench:
    """Two cards at home."""
    return HandsBench(tmp_path)


def codes(result: object) -> list[str]:
    """Give a refusal's codes."""
    assert isinstance(result, Refusal), result
    return [reason.code for reason in result.reasons]


async def test_next_owner_waits_and_is_told_why_when_the_device_is_being_cleaned(tmp_path: Path) -> None:
    """While cleaning, the device counts as neither well nor sick, and the next owner's question is
    accepted.
    """
    driver = _SlowCleaner()
    bench = HandsBench(tmp_path, driver=driver)
    async with bench.life():
        await bench.prepare("nic-card-0")
        leaving = asyncio.create_task(bench.unprepare("nic-card-0"))
        await asyncio.to_thread(driver.held.wait)
        bench.clock.advance(CLEANING.answer_after_s)
        left = await leaving
        seen = bench.hands.observations()["nic-card-0"]
        waiting = await bench.prepare("nic-card-0", owner=OTHER)
        driver.go.set()
        while bench.hands.observations():
            await other_threads()
        given = await bench.prepare("nic-card-0", owner=OTHER)

    assert left.refusal is None
    assert (seen.reason, seen.state) == ("cleaning", HealthState.UNKNOWN)
    assert waiting.result == Accepted(
        retry_after_s=1.0, limit_s=CLEANING.limit_s, what=f"cleaning nic-card-0 after {OWNER}"
    )
    assert isinstance(given.result, Prepared)


class _SlowCleaner(FolderDriver):
    """Cleans until it is let go."""

    def __init__(self) -> None:
        self.go, self.held = threading.Event(), threading.Event()

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        self.held.set()
        self.go.wait()
        return super().clean(tree, device, record)


async def test_device_stays_dirty_over_a_restart_when_cleaning_fails(bench: HandsBench) -> None:
    """The owner that left it is named by the next life, too, and nobody
    gets it until it is clean.
    """
    dirt = bench.root / CARDS / "nic-card-0" / "dirt"
    async with bench.life():
        await bench.prepare("nic-card-0")
        dirt.write_text("stuck", encoding="utf-8")
        left = await bench.unprepare("nic-card-0")
        first = bench.hands.observations()["nic-card-0"]
    async with bench.life():
        async with bench.clock.ticking(1.0):
            while bench.hands.observations()["nic-card-0"].reason != "dirty":
                await other_threads()
        refused = await bench.prepare("nic-card-0", owner=OTHER)
        second = bench.hands.observations()["nic-card-0"]
        dirt.write_text("loose", encoding="utf-8")
        async with bench.clock.ticking(1.0), bench.clock.ticking(2.0), bench.clock.ticking(4.0):
            while bench.hands.observations():
                await other_threads()
        given = await bench.prepare("nic-card-0", owner=OTHER)

    assert left.refusal is None
    assert first == second
    assert first.message == f"{OWNER} left it dirty, it is tried again: the dirt on nic-card-0 is stuck"
    assert codes(refused.result) == ["device-dirty"]
    assert isinstance(given.result, Prepared)


class _LongDriver(FolderDriver):
    """Programs until it is let go."""

    def __init__(self) -> None:
        self.go, self.held = threading.Event(), threading.Event()
        self.begun = 0

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | LongWork | Refusal:
        answer = super().prepare(tree, devices, context)
        if not isinstance(answer, LongWork):
            return answer
        work = answer.work

        def held() -> Mapping[str, ContainerEdits] | Refusal:
            self.begun += 1
            edits = work()
            self.held.set()
            self.go.wait()
            return edits

        return LongWork(limit_s=answer.limit_s, what=answer.what, work=held)


async def test_prepare_is_accepted_until_the_work_ends_when_it_is_long(tmp_path: Path) -> None:
    """The same question finds the same work, the driver answers others meanwhile, and the answer
    comes when it is done. How long the work ran is noted, as of every call.
    """
    driver = _LongDriver()
    bench = HandsBench(tmp_path, driver=driver)
    async with bench.life():
        first = await bench.prepare("nic-card-0", op_id="op", image="fast", is_slow=True)
        await asyncio.to_thread(driver.held.wait)
        bench.clock.advance(12.0)
        second = await bench.prepare("nic-card-0", op_id="op", image="fast", is_slow=True)
        leaving = await bench.unprepare("nic-card-0")
        neighbour = await bench.prepare("nic-card-1")
        driver.go.set()
        while bench.hands.jobs.is_under_way("nic-card-0", OWNER):
            await other_threads()
        third = await bench.prepare("nic-card-0", op_id="op", image="fast", is_slow=True)

    assert first.result == Accepted(retry_after_s=1.0, limit_s=30.0, what="programming nic-card-0")
    assert second.result == Accepted(retry_after_s=1.0, limit_s=18.0, what="programming nic-card-0")
    assert codes(leaving.refusal) == ["work-under-way"]
    assert isinstance(neighbour.result, Prepared)
    assert isinstance(third.result, Prepared)
    assert driver.begun == 1
    assert bench.calls.count("long work") == 1
    assert bench.card("nic-card-0")["image"] == "fast"


async def test_prepare_is_refused_and_the_card_restored_when_the_work_takes_too_long(tmp_path: Path) -> None:
    """Over its limit the work is refused by name.

    When its thread comes back at last, what it did is undone.
    """
    driver = _LongDriver()
    bench = HandsBench(tmp_path, driver=driver)
    async with bench.life():
        await bench.prepare("nic-card-0", image="fast", is_slow=True)
        await asyncio.to_thread(driver.held.wait)
        bench.clock.advance(30.0)
        while isinstance((late := await bench.prepare("nic-card-0", image="fast", is_slow=True)).result, Accepted):
            await other_threads()
        driver.go.set()
        while bench.hands.jobs.is_under_way("nic-card-0", OWNER):
            await other_threads()
        card = bench.card("nic-card-0")
        left = await bench.unprepare("nic-card-0")

    assert codes(late.result) == ["work-overdue"]
    assert card == new_card(0)
    assert left.refusal is None
