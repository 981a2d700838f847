"""Where paths of the host lead: as the kernel says, however seldom it is asked."""

from __future__ import annotations

import os.path
from pathlib import Path

import pytest

from topobus.gateway import links
from topobus.gateway.links import in_memory, real_paths


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with files, folders, links to both, a link to nothing and a loop of links."""
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "to-folder").symlink_to("folder")
    (tmp_path / "to-file").symlink_to(tmp_path / "folder" / "file")
    (tmp_path / "to-nothing").symlink_to("nowhere/at-all")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "folder/file",
        "folder/inner",
        "folder/absent",
        "absent/inner/file",
        "folder/file/below-a-file",
        "to-folder",
        "to-folder/file",
        "to-folder/absent",
        "to-file",
        "to-nothing",
        "to-nothing/below",
        "loop",
        "folder/../to-folder/file",
        "folder/./file",
        "folder//file",
        "folder/",
        "to-folder/..",
    ],
)
def test_real_paths_say_what_the_library_says_when_there_are_links_or_none(tree: Path, path: str) -> None:
    """The short way over paths without links gives the same answer as following each of them."""
    whole = f"{os.path.realpath(tree)}/{path}"
    real = os.path.realpath(whole)

    assert real_paths([whole]) == ({whole: real} if real != whole else {})


def test_real_paths_look_at_each_folder_once_when_paths_share_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim with many files of one folder costs a look at each file."""
    looked_at: list[str] = []
    lstat = os.lstat

    def note(path: str) -> os.stat_result:
        looked_at.append(path)
        return lstat(path)

    monkeypatch.setattr(links.os, "lstat", note)
    real_paths([f"{tree}/folder/file", f"{tree}/folder/inner", f"{tree}/folder/absent"])

    assert len(looked_at) == len(set(looked_at))
    assert f"{tree}/folder" in looked_at


@pytest.mark.parametrize("path", ["", "dev/null", "/dev/nu\0ll", "/dev/null\0"])
def test_real_paths_leave_out_what_cannot_be_a_path_when_it_is_named(path: str) -> None:
    """Who looks at the path itself refuses it."""
    assert real_paths([path]) == {}
    assert in_memory([path]) == ()


def test_in_memory_lists_nodes_and_nothing_with_a_link_when_paths_are_mixed() -> None:
    """Only what surely cannot block is looked at without a thread: a node's path in /dev, and no
    link that may lead to a disk.
    """
    paths = ["/dev/null", "/dev/absent", "/dev/fd/0", "/dev/../etc/passwd", "/etc/passwd", "/device/null"]

    assert in_memory(paths) == ("/dev/null", "/dev/absent")
