"""AMD cards that are cut when a claim gets a part of them: what is offered, when a card is
switched, and what a death leaves.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.amd_bench import AmdBench
from support.gpu_processes import add_process
from topobus.devicekit.driver import HostServices
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import JournaledWork
from topobus.formats.kubernetes.limit_rules import MAX_COUNTERS
from topobus.formats.kubernetes.slice_limits import check_device
from topobus.formats.kubernetes.slices import slice_device
from topobus.testing.drivers.deaths import deaths
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions

CARD = "gpu-0000-05-00-0"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[AmdBench]:
    """Give a machine with one MI300X that obeys, in SPX."""
    with AmdBench(tmp_path) as made:
        yield made


@pytest.mark.parametrize("mode", ["DPX", "QPX", "CPX"])
def test_discover_offers_the_same_devices_when_the_card_is_in_any_mode(bench: AmdBench, mode: str) -> None:
    """A card is its whole and the parts of each mode, whatever it is now: a switch changes no
    slice.
    """
    before = bench.discover()

    bench.kernel.set_mode(bench.address, mode)
    after = bench.discover()

    assert len(before) == 1 + 2 + 4 + 8
    assert {name: before[name] for name in before if name != CARD} == {
        name: after[name] for name in after if name != CARD
    }
    assert after[CARD] == before[CARD]
    assert before[f"{CARD}-qpx-3"].capacity["memory"] == before[f"{CARD}-cpx-0"].capacity["memory"] * 2
    assert before[f"{CARD}-cpx-7"].attributes["computeUnits"] == 38
    assert bench.discovery.kept == ()


def test_counters_fit_into_a_slice_when_a_card_has_four_modes(bench: AmdBench) -> None:
    """Seven counters in one set: what Kubernetes lets a set, a device and a slice have."""
    devices = bench.discover()

    sets = bench.discovery.counter_sets

    assert [(counter_set.name, len(counter_set.counters)) for counter_set in sets] == [(CARD, 1 + 2 + 4)]
    assert len(sets[0].counters) <= MAX_COUNTERS
    assert [problem for device in devices.values() for problem in check_device(slice_device(device))] == []


def test_all_parts_of_one_mode_fit_and_no_two_of_different_modes(bench: AmdBench) -> None:
    """The counters say of each pair of devices whether one card can be both at once."""
    devices = bench.discover()
    partitions = Partitions(devices.values(), bench.discovery.counter_sets)

    together = {
        (first, second)
        for first in devices
        for second in devices
        if first != second and partitions.shortage((first,), (second,)) is None
    }

    assert together == {
        (first, second)
        for first in devices
        for second in devices
        if first != second
        and CARD not in (first, second)
        and bench.mode_of(devices[first]) == bench.mode_of(devices[second])
    }
    assert partitions.shortage((), [name for name in devices if "-cpx-" in name]) is None


def test_card_is_offered_as_it_is_when_nothing_is_cut_on_demand(bench: AmdBench) -> None:
    """Without the setting a card is what it is now, and counts nothing."""
    bench.driver.configure(HostServices())

    devices = bench.discover()

    assert list(devices) == [CARD]
    assert devices[CARD].consumes == ()


def test_prepare_cuts_the_card_when_a_part_is_wanted(bench: AmdBench) -> None:
    """The first part costs a switch, the second none; each has its own render node."""
    first = bench.prepare("a", f"{CARD}-cpx-3")
    second = bench.prepare("b", f"{CARD}-cpx-4")

    assert isinstance(first, JournaledWork)
    assert bench.nodes(bench.finish(first), f"{CARD}-cpx-3") == ["/dev/dri/card3", "/dev/dri/renderD131"]
    assert isinstance(second, JournaledWork)
    assert bench.nodes(bench.finish(second), f"{CARD}-cpx-4") == ["/dev/dri/card4", "/dev/dri/renderD132"]
    third = bench.prepare("c", f"{CARD}-cpx-5")
    assert bench.nodes(third, f"{CARD}-cpx-5") == ["/dev/dri/card5", "/dev/dri/renderD133"]
    assert [switch[1:] for switch in bench.kernel.switches] == [("SPX", "CPX")]


def test_card_stays_in_its_mode_when_the_last_part_is_given_back(bench: AmdBench) -> None:
    """Nothing is written at unprepare, and the next claim of this mode
    has no switch to wait for.
    """
    bench.get("a", f"{CARD}-qpx-0")

    bench.unprepare("a", f"{CARD}-qpx-0")

    assert bench.journal.entries == {}
    assert bench.kernel.mode(bench.address) == "QPX"
    assert not isinstance(bench.prepare("b", f"{CARD}-qpx-1"), JournaledWork)


def test_whole_card_is_given_when_it_was_in_parts_before(bench: AmdBench) -> None:
    """The whole card is a mode like the others."""
    bench.kernel.set_mode(bench.address, "CPX")

    edits = bench.get("a", CARD)

    assert bench.nodes(edits, CARD) == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert bench.kernel.mode(bench.address) == "SPX"


@pytest.mark.parametrize("wanted", [CARD, f"{CARD}-dpx-0"])
def test_card_is_not_cut_otherwise_when_somebody_has_a_part(bench: AmdBench, wanted: str) -> None:
    """Whatever a ledger may say: the journal knows who has a part, and names it."""
    bench.get("a", f"{CARD}-cpx-3")

    refusal = bench.get("b", wanted)

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["devices"]) == ("card-in-use", (f"{CARD}-cpx-3",))
    assert bench.kernel.mode(bench.address) == "CPX"
    assert list(bench.journal.entries) == [f"{CARD}-cpx-3"]


def test_card_is_not_cut_when_a_process_of_the_host_has_it_open(bench: AmdBench) -> None:
    """A monitor or a job outside of Kubernetes is named; nothing is written."""
    add_process(bench.root, 77, program="rocm-job", node="dri/renderD128")

    refusal = bench.get("a", f"{CARD}-cpx-3")

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["pids"] == ("77",)
    assert "process 77 (rocm-job)" in refusal.reasons[0].message
    assert bench.kernel.switches == []
    assert bench.journal.entries == {}


def test_prepare_says_what_the_kernel_says_when_it_refuses(bench: AmdBench) -> None:
    """EBUSY comes with what it means.

    The card is as it was and the claim can be asked for again.
    """

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    bench.driver.on_demand.write = refuse

    refusal = bench.get("a", f"{CARD}-cpx-3")

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["error"]) == ("partition-mode-refused", errno.EBUSY)
    assert "a process still has KFD open" in refusal.reasons[0].message
    assert bench.journal.entries == {}
    assert bench.kernel.mode(bench.address) == "SPX"


def test_card_is_brought_back_when_kfd_does_not_follow(bench: AmdBench) -> None:
    """A mode that KFD does not show in time is no mode: the claim is refused and the card is whole
    again.
    """
    bench.kernel.is_stuck = True

    refusal = bench.get("a", f"{CARD}-cpx-3")

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "partition-mode-unsettled"
    assert bench.kernel.mode(bench.address) == "SPX"
    assert bench.journal.entries == {}


def test_discover_lists_the_same_devices_when_a_switch_is_under_way(bench: AmdBench) -> None:
    """While KFD does not agree the last look stands: no slice and nobody's health changes."""
    before = bench.discover()
    seen: list[list[str]] = []

    def write(path: Path, text: str) -> None:
        path.write_text("busy\n", encoding="ascii")
        seen.append(list(bench.discover()))
        path.write_text(f"{text}\n", encoding="ascii")

    bench.driver.on_demand.write = write

    edits = bench.get("a", f"{CARD}-cpx-3")

    assert not isinstance(edits, Refusal)
    assert seen == [list(before)]


def test_owners_get_their_parts_again_when_the_node_was_started_anew(bench: AmdBench) -> None:
    """A reboot brings the card back to SPX.

    The journal knows two owners of parts, and neither is in the other's way.
    """
    bench.get("a", f"{CARD}-cpx-3")
    bench.get("b", f"{CARD}-cpx-4")
    bench.kernel.set_mode(bench.address, "SPX")
    bench.restart()

    first, second = bench.get("a", f"{CARD}-cpx-3"), bench.get("b", f"{CARD}-cpx-4")

    assert not isinstance(first, Refusal)
    assert not isinstance(second, Refusal)
    assert bench.kernel.mode(bench.address) == "CPX"


def test_card_can_be_had_when_the_service_was_killed_at_any_step(bench: AmdBench) -> None:
    """Killed before or after each write of the journal: the next start leaves a card on which
    amdgpu and KFD agree, nobody's, and either way can be had.
    """
    died = 0
    for step in deaths(bench.journal.folder, lambda journal: bench.get("a", f"{CARD}-cpx-3", journal=journal)):
        died = step
        bench.restart()
        bench.undo_all()
        assert bench.journal.entries == {}
        assert not bench.is_unsettled()
        assert isinstance(bench.get("b", CARD)[CARD], ContainerEdits)
        bench.unprepare("b", CARD)
        bench.journal.close()

    assert died >= 8


def test_killed_switch_is_undone_when_kfd_did_not_follow(bench: AmdBench) -> None:
    """A death while amdgpu and KFD do not agree, and they go on not to: the card is brought back to
    the mode from before.
    """
    bench.kernel.is_stuck = True

    def verb(journal: Journal) -> None:
        bench.get("a", f"{CARD}-cpx-3", journal=journal)

    died = 0
    for step in deaths(bench.journal.folder, verb):
        died = step
        bench.restart()
        bench.undo_all()
        assert bench.journal.entries == {}
        assert bench.kernel.mode(bench.address) == "SPX"
        bench.journal.close()

    assert died >= 8


@pytest.mark.parametrize("is_written", [False, True], ids=["before-the-write", "after-the-write"])
def test_card_can_be_had_when_the_service_was_killed_around_the_write(bench: AmdBench, *, is_written: bool) -> None:
    """The one act that no journal can surround closely enough: killed at the write of sysfs itself,
    the card is in one mode or the other, and nobody's.
    """

    def die(path: Path, text: str) -> None:
        if is_written:
            path.write_text(f"{text}\n", encoding="ascii")
        os.kill(os.getpid(), signal.SIGKILL)

    bench.driver.on_demand.write = die
    pid = os.fork()
    if pid == 0:
        bench.journal.load()
        bench.get("a", f"{CARD}-cpx-3")
        os._exit(1)
    _, result = os.waitpid(pid, 0)
    bench.restart()
    bench.undo_all()

    assert os.WIFSIGNALED(result)
    assert bench.journal.entries == {}
    assert not bench.is_unsettled()
    assert bench.kernel.mode(bench.address) == ("CPX" if is_written else "SPX")
    assert isinstance(bench.get("b", f"{CARD}-qpx-1"), dict)


def test_part_is_given_back_when_the_service_was_killed_at_any_step_of_it(bench: AmdBench) -> None:
    """Giving back writes nothing to the card, so nothing is left at any step."""
    bench.get("a", f"{CARD}-cpx-3")
    bench.journal.close()

    died = 0
    for step in deaths(bench.journal.folder, lambda journal: bench.unprepare("a", f"{CARD}-cpx-3", journal=journal)):
        died = step
        bench.restart()
        bench.undo_all()
        assert bench.journal.entries == {}
        bench.get("a", f"{CARD}-cpx-3")
        bench.journal.close()

    assert died >= 4
    assert [switch[1:] for switch in bench.kernel.switches] == [("SPX", "CPX")]


def test_card_is_switched_once_when_all_its_parts_are_wanted_at_once(bench: AmdBench) -> None:
    """Eight claims at the same moment are one switch, and each gets its own node."""
    names = [f"{CARD}-cpx-{index}" for index in range(8)]

    with ThreadPoolExecutor(len(names)) as threads:
        edits = list(threads.map(lambda name: bench.get(name, name), names))

    assert sorted(bench.nodes(edit, name)[-1] for edit, name in zip(edits, names, strict=True)) == [
        f"/dev/dri/renderD{128 + index}" for index in range(8)
    ]
    assert [switch[1:] for switch in bench.kernel.switches] == [("SPX", "CPX")]


def test_one_mode_is_given_when_two_are_wanted_at_once(bench: AmdBench) -> None:
    """Whatever a ledger may say: of a whole card and a part of it at the same moment one is given,
    and the other is refused or had come and gone.
    """
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda name: bench.get(name, name), [CARD, f"{CARD}-cpx-3"]))

    held = [name for name, entry in bench.journal.entries.items() if entry.owners]
    assert [isinstance(answer, Refusal) for answer in answers].count(False) == len(held) == 1
