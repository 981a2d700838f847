"""The tree for one look resolves links like the tree that is kept, and binary and mounted files
read within the root.
"""

from __future__ import annotations

from pathlib import Path

from support.sysfs_trees import write
from topobus.simulation.machines import build
from topobus.sysfs.idsets import parse_mask
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import Tree


def test_tree_for_scan_reads_the_same_when_paths_go_over_links(tmp_path: Path) -> None:
    """Whatever is read over links is the same in both trees."""
    machine = build("laptop", tmp_path)
    tree = Tree(write(machine.root, {}).settings)
    scan = tree.for_scan()

    paths = [
        f"sys/bus/pci/devices/{address}/{name}"
        for address in machine.addresses
        for name in ("vendor", "driver/x", "iommu_group", "numa_node")
    ]

    assert [scan.read(path) for path in paths] == [tree.read(path) for path in paths]
    assert [scan.real(path) for path in paths] == [tree.real(path) for path in paths]


def test_tree_read_bytes_gives_the_beginning_when_a_file_is_long(tmp_path: Path) -> None:
    """Configuration space is read up to the limit, and an absent file is None."""
    tree = write(tmp_path, {"sys/config": bytes(range(200))})

    assert tree.read_bytes("sys/config", 4) == b"\x00\x01\x02\x03"
    assert tree.read_bytes("sys/absent") is None


def test_tree_read_mounted_stays_inside_when_the_path_climbs(tmp_path: Path) -> None:
    """A mount point of a recorded tree is looked up below its root, and never climbs out of it."""
    (tmp_path / "secret").write_text("out")
    tree = write(tmp_path / "root", {"cgroup/cpus": "0-1"})

    assert tree.read_mounted("/cgroup/cpus") == "0-1"
    assert tree.read_mounted("/cgroup/../../secret") is None


def test_parse_mask_reads_many_words_when_the_machine_is_wide() -> None:
    """Words are 32 bits, the highest first, empty ones are zero."""
    assert parse_mask("1,,80000000") == 1 << 64 | 1 << 31


def test_read_machine_works_when_the_tree_is_this_machine() -> None:
    """The machine that runs this test can be read: it has the CPUs that this process may use."""
    import os

    machine = read_machine(Tree(), "here")

    assert os.sched_getaffinity(0) & set(machine.online_cpus)
    assert machine.numa_nodes
    assert machine.architecture == os.uname().machine
