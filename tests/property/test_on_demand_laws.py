"""Cards that are cut on demand, through random histories: never two modes at once, and no card is
switched under anybody.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amd_bench import AmdBench
from support.gpu_processes import add_process, end_recorded
from support.laws import examples
from support.sriov_bench import COUNT, SriovBench
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions

_FOREIGN = 77
_PARTS = 1 + 2 + 4 + 8

steps = st.one_of(
    st.tuples(
        st.just("claim"), st.integers(0, 3), st.lists(st.integers(0, _PARTS - 1), min_size=1, max_size=3, unique=True)
    ),
    st.tuples(st.just("release"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("again"), st.integers(0, 3), st.just([])),
    st.tuples(st.sampled_from(["restart", "reboot", "foreign"]), st.just(0), st.just([])),
)


class _Node:
    """A ledger that counts, before the driver."""

    def __init__(self, bench: AmdBench) -> None:
        self.bench = bench
        self.names = sorted(bench.devices)
        sets = bench.discovery.counter_sets
        self.partitions = Partitions(bench.devices.values(), sets)
        self.held: dict[str, tuple[str, ...]] = {}
        self.ready: set[str] = set()
        """Owners whose containers may run."""
        self.has_foreign = False

    def claim(self, owner: str, wanted: tuple[str, ...]) -> None:
        held = [name for names in self.held.values() for name in names]
        if owner not in self.held and not set(wanted) & set(held) and self.partitions.shortage(held, wanted) is None:
            self.held[owner] = wanted
            self.prepare(owner)

    def prepare(self, owner: str) -> None:
        before = len(self.bench.kernel.switches)
        answer = self.bench.get(owner, *self.held[owner])
        others = {
            self.bench.mode_of(self.bench.devices[name]) for other in self.ready - {owner} for name in self.held[other]
        }
        for _, _, mode in self.bench.kernel.switches[before:]:
            assert others <= {mode}, "switched under somebody"
            assert not self.has_foreign, "switched under a process"
        if not isinstance(answer, Refusal):
            self.ready.add(owner)

    def check(self) -> None:
        held = [name for names in self.held.values() for name in names]
        assert len({self.bench.mode_of(self.bench.devices[name]) for name in held}) <= 1
        assert {name for name, entry in self.bench.journal.entries.items() if entry.owners} == {
            name for owner in self.ready for name in self.held[owner]
        }


@settings(max_examples=examples(60), deadline=None)
@given(history=st.lists(steps, min_size=1, max_size=12))
def test_no_history_holds_two_modes_or_switches_a_card_that_is_used(
    history: list[tuple[str, int, list[int]]],
) -> None:
    """Claims come and go, the service and the node start anew, somebody else uses the card: the
    parts that are held are of one mode, and nobody loses one.
    """
    with TemporaryDirectory() as folder, AmdBench(Path(folder)) as bench:
        node = _Node(bench)
        for verb, index, wanted in history:
            owner = f"owner-{index}"
            if verb == "claim":
                node.claim(owner, tuple(sorted(node.names[number] for number in wanted)))
            elif verb == "again" and owner in node.held:
                node.prepare(owner)
            elif verb == "release" and owner in node.held:
                bench.unprepare(owner, *node.held.pop(owner))
                node.ready.discard(owner)
            elif verb == "restart":
                bench.restart()
            elif verb == "reboot":
                bench.kernel.set_mode(bench.address, "SPX")
                bench.writes.settle()
                bench.restart()
                if node.has_foreign:
                    end_recorded(bench.root, _FOREIGN)
                    node.has_foreign = False
                for other in sorted(node.ready):
                    node.prepare(other)
            elif verb == "foreign":
                if node.has_foreign:
                    end_recorded(bench.root, _FOREIGN)
                else:
                    add_process(bench.root, _FOREIGN, node="dri/renderD128")
                node.has_foreign = not node.has_foreign
            node.check()


function_steps = st.one_of(
    st.tuples(
        st.just("claim"), st.integers(0, 3), st.lists(st.integers(0, COUNT), min_size=1, max_size=2, unique=True)
    ),
    st.tuples(st.sampled_from(["release", "again"]), st.integers(0, 3), st.just([])),
    st.tuples(st.sampled_from(["restart", "reboot", "look"]), st.just(0), st.just([])),
)


@pytest.mark.parametrize("when_idle", ["keep", "remove"])
@settings(max_examples=examples(40), deadline=None)
@given(history=st.lists(function_steps, min_size=1, max_size=12))
def test_no_history_takes_a_function_from_anybody(
    when_idle: Literal["keep", "remove"], history: list[tuple[str, int, list[int]]]
) -> None:
    """Claims of a card and its virtual functions come and go, the service and the node start anew:
    what is held is there, whole or in parts, and nobody loses it.
    """
    with TemporaryDirectory() as folder, SriovBench(Path(folder), PciNetdevDriver, when_idle=when_idle) as bench:
        names = sorted(bench.devices)
        held: dict[str, tuple[str, ...]] = {}
        ready: set[str] = set()

        def prepare(owner: str) -> None:
            before = len(bench.kernel.writes)
            if not isinstance(bench.get(owner, *held[owner]), Refusal):
                ready.add(owner)
            others = {name for other in ready - {owner} for name in held[other]}
            assert bench.kernel.writes[before:] in ([], [COUNT], [0])
            assert 0 not in bench.kernel.writes[before:] or not others, "removed under somebody"
            assert COUNT not in bench.kernel.writes[before:] or names[0] not in others, "cut under somebody"

        for verb, index, wanted in history:
            owner = f"owner-{index}"
            taken = [name for own_names in held.values() for name in own_names]
            chosen = tuple(sorted(names[number] for number in wanted))
            if verb == "claim":
                partitions = Partitions(bench.devices.values(), bench.counter_sets)
                if owner not in held and not set(chosen) & set(taken) and partitions.shortage(taken, chosen) is None:
                    held[owner] = chosen
                    prepare(owner)
            elif verb == "again" and owner in held:
                prepare(owner)
            elif verb == "release" and owner in held:
                bench.unprepare(owner, *held.pop(owner))
                ready.discard(owner)
            elif verb == "restart":
                bench.restart()
            elif verb == "reboot":
                bench.kernel.set_number(0)
                bench.writes.settle()
                bench.restart()
                for other in sorted(ready):
                    prepare(other)
            elif verb == "look":
                bench.look()
            present = [name for other in ready for name in held[other]]
            assert bench.kernel.number == (0 if names[0] in present else COUNT) or not present
            assert {name for name, entry in bench.journal.entries.items() if entry.owners} == set(present)
