"""A service that is killed while it switches a function: at each step of going and of coming back,
the journal's writes and the kernel's alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kernel_writes import KernelWrites
from support.mortal_switch import mortal
from support.passthrough_bench import ALLOWED, ASKED, FOURTH, OTHER, OWNER, THIRD, PassthroughBench, nodes_of
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.passthrough.passthrough import PassthroughDriver
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs, JournaledWork
from topobus.formats.messages.messages import Prepared
from topobus.testing.drivers.deaths import deaths

CONTEXT = PrepareContext(owner=OWNER, config=(dict(ASKED),))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PassthroughBench]:
    """Give four GPUs, two of them in one group."""
    (tmp_path / "machine").mkdir()
    with KernelWrites(tmp_path / "machine") as kernel:
        yield PassthroughBench(kernel.root, kernel)


def take(bench: PassthroughBench, journal: Journal) -> None:
    """Do what the service does when a claim takes both functions of the group."""
    devices = [bench.devices[bench.name(address)] for address in (THIRD, FOURTH)]
    driver = PassthroughDriver(bench.driver, ALLOWED)
    work = JournaledVerbs(journal, driver, bench.tree).prepare(devices, CONTEXT, [device.name for device in devices])
    assert isinstance(work, JournaledWork)
    assert isinstance(work.run(lambda: True), dict)


def give_back(bench: PassthroughBench, journal: Journal) -> None:
    """Do what the service does when the claim ends."""
    devices = [bench.devices[bench.name(address)] for address in (THIRD, FOURTH)]
    JournaledVerbs(journal, PassthroughDriver(bench.driver, ALLOWED), bench.tree).unprepare(devices, CONTEXT)


async def settled(bench: PassthroughBench) -> dict[str, Any]:
    """Start the next service, and let it put in order what it finds.

    What each function is then, and whether the claim has it whole.
    """
    # What was written before the kill is done by the kernel, whoever wrote it.
    bench.kernel.settle()
    async with bench.life():
        names = [bench.name(THIRD), bench.name(FOURTH)]
        async with bench.hands.turn(names) as obstacle:
            assert obstacle is None
        held = bench.held_by()
        entries = [bench.hands.journal.owner_entry(name, OWNER) for name in names]
    return {
        address: (held[address], entry.is_prepared) for address, entry in zip((THIRD, FOURTH), entries, strict=True)
    }


WHOLE, HOME = ("vfio-pci", True), ("i915", False)


async def test_killed_while_it_goes_it_is_whole_or_back(bench: PassthroughBench) -> None:
    """Whatever the step, the next start leaves each function with its own driver, or with VFIO for
    a claim that has it whole; then the claim gets both, or gives both back.
    """
    seen = []
    for step in deaths(bench.journal_folder, mortal(lambda journal: take(bench, journal))):
        functions = await settled(bench)
        assert set(functions.values()) <= {WHOLE, HOME}, step
        seen.append(set(functions.values()))
        async with bench.life():
            prepared = await bench.prepare(THIRD, FOURTH)
            assert nodes_of(prepared) == ["/dev/vfio/43", "/dev/vfio/43", "/dev/vfio/vfio"], step
            assert await bench.unprepare(THIRD, FOURTH) is None
        assert bench.is_home, step

    # For each of two functions: intent, override, unbind, bind, done and the closing mark, each
    # before and after; the owner's mark before all of it.
    assert len(seen) >= 2 * 2 * 6
    assert {HOME} in seen


async def test_killed_while_it_comes_back_it_comes_back(bench: PassthroughBench) -> None:
    """A way back that was begun is finished by the next start, and one that was not is still the
    claim's.
    """
    seen = []
    async with bench.life():
        await bench.prepare(THIRD, FOURTH)
    for step in deaths(bench.journal_folder, mortal(lambda journal: give_back(bench, journal))):
        functions = await settled(bench)
        assert set(functions.values()) <= {WHOLE, HOME}, step
        seen.append(tuple(functions.values()))
        async with bench.life():
            assert await bench.unprepare(THIRD, FOURTH) is None
            given = await bench.prepare(THIRD, owner=OTHER, config=None)
            assert isinstance(given, Prepared), step
            await bench.unprepare(THIRD, owner=OTHER)
            assert bench.is_home, step
            await bench.prepare(THIRD, FOURTH)

    assert len(seen) >= 2 * 2 * 5
    assert seen[0] == (WHOLE, WHOLE)
    assert (HOME, HOME) in seen
