"""The short look at what can change: equal while nothing changes, different after each change that
a running kernel makes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.sysfs_trees import CPU, NODE, cpu_files, node_files, write
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.sysfs.volatile import read_volatile

CARD = "0000:01:00.0"
FUNCTION = f"sys/bus/pci/devices/{CARD}"


@pytest.fixture
def laptop(tmp_path: Path) -> RecordedMachine:
    """A small recorded machine."""
    return build("laptop", tmp_path / "laptop")


def tree_of(machine: RecordedMachine) -> Tree:
    """The machine's tree, opened anew."""
    return Tree(HardwareSettings(root=str(machine.root)))


def test_read_volatile_is_equal_when_nothing_changed(laptop: RecordedMachine) -> None:
    """Two looks at one machine are equal, also by two trees."""
    assert read_volatile(tree_of(laptop)) == read_volatile(tree_of(laptop))


CHANGES: dict[str, Callable[[RecordedMachine], object]] = {
    "a CPU goes offline": lambda machine: machine.set_cpu_online(3, is_online=False),
    "a device goes": lambda machine: machine.remove_pci(CARD),
    "a link loses lanes": lambda machine: machine.write(f"{FUNCTION}/current_link_width", "2"),
    "a driver lets go": lambda machine: (machine.root / FUNCTION / "driver").unlink(),
    "a file of a device is replaced": lambda machine: machine.write(f"{FUNCTION}/numa_node", "1"),
    "the machine was booted": lambda machine: machine.write("proc/sys/kernel/random/boot_id", "another"),
    "memory is plugged in": lambda machine: machine.write(f"{NODE}/node0/meminfo", "Node 0 MemTotal: 99 kB"),
    "huge pages are set aside": lambda machine: machine.write(
        f"{NODE}/node0/hugepages/hugepages-2048kB/nr_hugepages", "77"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_read_volatile_differs_when_the_machine_changed(
    laptop: RecordedMachine, change: Callable[[RecordedMachine], object]
) -> None:
    """Each change that a kernel makes while it runs is seen by the short look."""
    before = read_volatile(tree_of(laptop))

    change(laptop)

    assert read_volatile(tree_of(laptop)) != before


def test_read_volatile_differs_when_a_device_went_and_came_back_between_two_looks(laptop: RecordedMachine) -> None:
    """The name is the same, and the card may be another one: its folder tells."""
    before = read_volatile(tree_of(laptop))

    folder = (laptop.root / FUNCTION).resolve()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    away = folder.with_name("away")
    folder.rename(away)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "driver").symlink_to((away / "driver").readlink())

    assert read_volatile(tree_of(laptop)) != before


def test_read_volatile_stays_equal_when_only_free_memory_moves(laptop: RecordedMachine) -> None:
    """What moves with each allocation makes no machine new."""
    before = read_volatile(tree_of(laptop))
    path = laptop.root / NODE / "node0/meminfo"
    text = path.read_text()

    path.write_text(text.replace("MemFree:", "MemFree: 1"))

    assert "MemFree" in text
    assert read_volatile(tree_of(laptop)) == before


def test_read_volatile_asks_each_cpu_when_there_is_no_online_list(tmp_path: Path) -> None:
    """An old kernel has no list; a CPU that says so itself is seen."""
    files = cpu_files(3) | node_files(0, (0, 1, 2))
    del files[f"{CPU}/online"]
    tree = write(tmp_path, files)
    before = read_volatile(tree)

    write(tmp_path, {f"{CPU}/cpu1/online": "0"})

    assert read_volatile(tree) != before


def test_read_volatile_reads_the_machines_memory_when_there_is_no_numa(tmp_path: Path) -> None:
    """Without node folders the whole machine stands for the one node."""
    tree = write(tmp_path, cpu_files(2))
    before = read_volatile(tree)

    write(tmp_path, {"proc/meminfo": "MemTotal: 5 kB"})

    assert before.nodes[0][1]
    assert read_volatile(tree) != before


def test_read_volatile_works_when_the_tree_is_this_machine() -> None:
    """The machine that runs this test can be looked at, twice with the same result."""
    assert read_volatile(Tree()) == read_volatile(Tree())
