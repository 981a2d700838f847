"""A machine in memory reads as the same machine on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cli.simulation.node import _find_devices, open_machine
from topobus.simulation.machines import PROFILES, MemoryTree, build, content_of
from topobus.simulation.machines.content import Content
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import HardwareError


@pytest.mark.parametrize("profile", PROFILES)
def test_same_devices_are_found_in_memory_and_on_disk(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discovery and every driver give the same machine and inventories, and nothing is written."""
    build(profile, tmp_path / profile)
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_, **__: pytest.fail("a folder is made"))
    with open_machine(str(tmp_path / profile)) as on_disk, open_machine(profile) as node:
        assert node.snapshot == on_disk.snapshot
        assert node.warnings == on_disk.warnings


def test_every_question_has_the_same_answer(tmp_path: Path) -> None:
    """Each file, folder and link of a machine, and what is absent,
    whichever way it is asked for.
    """
    build("laptop", tmp_path / "laptop")
    content = content_of("laptop")
    disk, memory = Tree(HardwareSettings(root=str(tmp_path / "laptop"))), MemoryTree(content)
    folders = {path.rpartition("/")[0] for path in (*content.texts, *content.links)}
    paths = sorted({*content.texts, *content.links, *folders, "sys/none", "sys/bus/pci/devices/none/vendor"} - {""})
    below_links = [f"{path}/{name}" for path in content.links for name in disk.names(path)[:3]]

    for path in (*paths, *below_links, "sys/class/../bus", "sys"):
        assert memory.read(path) == disk.read(path), path
        assert memory.read_bytes(path, 16) == disk.read_bytes(path, 16), path
        assert memory.names(path) == disk.names(path), path
        assert memory.exists(path) is disk.exists(path), path
        if "/" in path:
            assert memory.is_link(path) is disk.is_link(path), path
            assert memory.link_name(path) == disk.link_name(path), path
        assert memory.real(path) == disk.real(path), path
        assert memory.read_mounted(f"/{path}") == disk.read_mounted(f"/{path}"), path
        assert bool(memory.identity(path)) is bool(disk.identity(path)), path
        assert not memory.path(path).exists()
    assert memory.for_scan() is memory
    assert read_machine(memory, "n1") == read_machine(disk, "n1")


def test_loop_of_links_is_an_error() -> None:
    """As on disk: a path that never ends is the machine's mistake."""
    tree = MemoryTree(Content(links={"sys/a": "sys/b", "sys/b": "sys/a"}))
    with pytest.raises(HardwareError, match="too many links"):
        tree.read("sys/a/x")


def test_machine_in_memory_has_its_own_devices_alone() -> None:
    """No file of this machine is looked at for a path that the profile lacks."""
    tree = MemoryTree(Content(texts={"sys/devices/system/node/online": "0\n"}))
    assert tree.names("proc") == ()
    assert tree.read("proc/cpuinfo") is None
    with pytest.raises(HardwareError):
        _find_devices(tree, read_machine(tree, "n1"))
