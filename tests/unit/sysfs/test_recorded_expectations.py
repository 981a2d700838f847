"""Every recorded machine of a real computer reads as hwloc reads it."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from topobus.sysfs.machine import read_machine
from topobus.sysfs.report import machine_report
from topobus.sysfs.tree import HardwareSettings, Tree

DATA = Path(__file__).parents[2] / "data" / "machines"
NAMES = sorted(path.name.removesuffix(".expect.json") for path in DATA.glob("*.expect.json"))
FIELDS = ("numa", "packages", "cores", "pus", "l3", "pci")
# Its expectation holds only the beginning of the matrix, cut into wrong
# rows (see the README beside it).
CUT = "256ia64-64n2s2c"
# Two thirds of a recording's files describe power states, frequencies, scheduling and cache
# geometry, which say nothing of the topology.
NOISE = re.compile(
    r"/(cpufreq|cpuidle|power|thermal_throttle|crash_notes\w*|block|memory_\w+|sched_\w+|tasks|notify_on_release|\w+_exclusive)(/|$)"
    r"|/(ways_of_associativity|number_of_sets|coherency_line_size|physical_line_partition|cache_disable_\d|uevent|modalias|remove|rescan|enable"
    r"|msi_bus|irq|broken_parity_status|resource\d*|dma_mask_bits|consistent_dma_mask_bits|cgroup\.procs|mem_hardwall|wakeup\w*)$"
)


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Unpack a recording (once: some hold thousands of files) and report it."""

    @cache
    def make(name: str) -> dict[str, Any]:
        into = tmp_path_factory.mktemp("recording")
        with tarfile.open(DATA / f"{name}.tar.bz2") as archive:
            archive.extractall(
                into,
                (member for member in archive if member.isdir() or not NOISE.search(member.name)),
                filter="tar",
                numeric_owner=True,
            )
        (root,) = into.iterdir()
        return machine_report(read_machine(Tree(HardwareSettings(root=str(root))), "recorded"))

    return make


@pytest.mark.parametrize("name", NAMES)
def test_machine_report_agrees_with_hwloc_when_a_machine_was_recorded(
    name: str, report_of: Callable[[str], dict[str, Any]]
) -> None:
    """NUMA nodes, packages, cores, processing units, level-3 caches and PCI functions are those
    that hwloc found.
    """
    wanted = json.loads((DATA / f"{name}.expect.json").read_text())

    report = report_of(name)

    assert {field: report[field] for field in FIELDS} == {field: wanted[field] for field in FIELDS}


@pytest.mark.parametrize("name", [name for name in NAMES if name != CUT])
def test_machine_report_gives_distances_as_hwloc_when_the_machine_tells(
    name: str, report_of: Callable[[str], dict[str, Any]]
) -> None:
    """The distance matrix is hwloc's, and absent where hwloc has none."""
    wanted = json.loads((DATA / f"{name}.expect.json").read_text())

    report = report_of(name)

    assert report.get("distances") == wanted.get("distances")


def test_machine_report_gives_all_distances_when_nodes_are_many(report_of: Callable[[str], dict[str, Any]]) -> None:
    """A matrix of 64 nodes is complete, its beginning as hwloc wrote it."""
    wanted = json.loads((DATA / f"{CUT}.expect.json").read_text())["distances"]["values"]

    distances = report_of(CUT)["distances"]

    first_portions = [value for row in wanted for value in row]
    assert [value for row in distances["values"] for value in row][: len(first_portions)] == first_portions
    assert (distances["nodes"], {len(row) for row in distances["values"]}) == (list(range(64)), {64})


def test_recordings_are_all_here() -> None:
    """Ten recordings are compared: an empty folder must not pass for agreement."""
    assert len(NAMES) == 10
