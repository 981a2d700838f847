"""A tree that is asked again and again gives what a tree that is opened anew gives, whatever
happened in between.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.laws import share
from topobus.sysfs import answers
from topobus.sysfs.answers import OpenFiles, StampedAnswers
from topobus.sysfs.tree import HardwareSettings, Tree

FOLDERS = ("a", "b", "c")
FILES = ("one", "two")
PATHS = [f"sys/{folder}/{file}" for folder in FOLDERS for file in FILES]
LINKS = [f"sys/links/{folder}" for folder in FOLDERS]
STEPS = 60


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is written counts as old enough to be kept at once, so that nothing has to wait for
    it.
    """
    now_ns = time.time_ns
    monkeypatch.setattr("topobus.sysfs.tree.time.time_ns", lambda: now_ns() + 10**9)


def answers_of(tree: Tree) -> list[object]:
    """All questions about all paths."""
    below = [f"{link}/{file}" for link in LINKS for file in FILES]
    folders = ["sys", "sys/links", *(f"sys/{folder}" for folder in FOLDERS), *LINKS]
    return [
        *(tree.read(path) for path in (*PATHS, *below, *(f"{path}/deep/one" for path in (*PATHS, *below)))),
        *(tree.names(path) for path in folders),
        *(tree.exists(path) for path in (*PATHS, *folders, *below)),
        *(tree.real(path) for path in (*PATHS, *folders, *below)),
        *(tree.link_name(path) for path in (*LINKS, *PATHS)),
        *(tree.identity(path) for path in folders),
    ]


@pytest.mark.usefixtures("aged")
@pytest.mark.law
@pytest.mark.parametrize("seed", share(range(12)))
def test_revisited_tree_answers_as_a_new_one_when_files_come_go_and_change(tmp_path: Path, seed: int) -> None:
    """Brute force: after each of many random changes all answers are those of a tree that was just
    opened.
    """
    chance = random.Random(seed)
    settings = HardwareSettings(root=str(tmp_path))
    revisited = Tree(settings, is_revisited=True)
    (tmp_path / "sys/links").mkdir(parents=True)

    for step in range(STEPS):
        change(tmp_path, chance, step)

        fresh = Tree(settings)
        assert answers_of(revisited) == answers_of(fresh), step
        assert answers_of(revisited.for_scan()) == answers_of(fresh), step


def change(root: Path, chance: random.Random, step: int) -> None:
    """Do one thing to the tree; times never repeat, as on a clock without ticks."""
    folder = root / "sys" / chance.choice(FOLDERS)
    file = folder / chance.choice(FILES)
    link = root / "sys/links" / chance.choice(FOLDERS)
    what = chance.choice(
        [
            "write",
            "write",
            "replace",
            "remove",
            "drop-folder",
            "link",
            "relink-absolute",
            "unlink",
            "move-folder",
            "nothing",
        ]
    )
    folder.mkdir(exist_ok=True)
    if what == "write":
        file.write_text(str(chance.randrange(10)))
        os.utime(file, ns=(step, step))
    elif what == "replace":
        other = folder / ".new"
        other.write_text(str(chance.randrange(10)))
        other.rename(file)
    elif what == "remove":
        file.unlink(missing_ok=True)
    elif what == "drop-folder":
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    elif what in ("link", "relink-absolute"):
        link.unlink(missing_ok=True)
        target = chance.choice(FOLDERS)
        # An absolute link of a recorded tree means "from the recorded root"; the
        # system would follow it elsewhere.
        link.symlink_to(f"../{target}" if what == "link" else f"/sys/{target}")
    elif what == "unlink":
        link.unlink(missing_ok=True)
    elif what == "move-folder":
        folder.rename(root / f"away-{step}")
    for path in (folder, file, link.parent, root / "sys"):
        if path.exists():
            os.utime(path, ns=(step, step))


@pytest.mark.usefixtures("aged")
def test_revisited_tree_reads_nothing_when_nobody_touched_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer costs no open and no read."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/file").write_text("text\n")
    tree = Tree(HardwareSettings(root=str(tmp_path)), is_revisited=True)
    first = tree.read("sys/file")
    monkeypatch.setattr(os, "open", refuse)

    assert (first, tree.read("sys/file"), tree.for_scan().read("sys/file")) == ("text", "text", "text")


@pytest.mark.usefixtures("aged")
def test_revisited_tree_resolves_nothing_again_when_the_folder_of_an_absent_file_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer costs one look at the folder that lacks the other, and ends with it."""
    (tmp_path / "sys/cpu0").mkdir(parents=True)
    tree = Tree(HardwareSettings(root=str(tmp_path)), is_revisited=True)
    first = tree.read("sys/cpu0/cpufreq/base_frequency")
    with monkeypatch.context() as closed:
        closed.setattr(os, "readlink", refuse)
        second = tree.read("sys/cpu0/cpufreq/base_frequency")
    (tmp_path / "sys/cpu0/cpufreq").mkdir()
    (tmp_path / "sys/cpu0/cpufreq/base_frequency").write_text("2000000\n")

    assert (first, second, tree.read("sys/cpu0/cpufreq/base_frequency")) == (None, None, "2000000")


def test_revisited_tree_reads_again_when_the_file_was_just_written(tmp_path: Path) -> None:
    """A file that was written in the same tick of the file system's clock as before has the same
    times.

    It is read.
    """
    (tmp_path / "sys").mkdir()
    file = tmp_path / "sys/file"
    tree = Tree(HardwareSettings(root=str(tmp_path)), is_revisited=True)

    seen = []
    for number in range(50):
        file.write_text(str(number % 10))
        seen.append(tree.read("sys/file"))

    assert seen == [str(number % 10) for number in range(50)]


def test_revisited_tree_reads_as_a_new_one_when_it_is_this_machines() -> None:
    """Files of the kernel's are read anew each time, from their beginning, whether kept open or
    not.
    """
    revisited, fresh = Tree(is_revisited=True), Tree()
    folder = "sys/devices/system/cpu"
    paths = [f"{folder}/{name}" for name in ("online", "present", "absent")]
    paths += [
        f"sys/bus/pci/devices/{name}/{file}"
        for name in fresh.names("sys/bus/pci/devices")
        for file in ("vendor", "class", "absent")
    ]

    for _ in range(3):
        assert [revisited.read(path) for path in paths] == [fresh.read(path) for path in paths]
        assert revisited.names(folder) == fresh.names(folder)


def test_stamped_answers_keep_nothing_when_a_link_leads_out_of_the_tree(tmp_path: Path) -> None:
    """Where the system's own way to the file ends at another one, its times say nothing."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.touch()
    outside.touch()
    kept = StampedAnswers()

    kept.keep("read", "file", "text", at=str(outside), real=str(inside), began_ns=time.time_ns() + 10**9)

    assert kept.find("read", "file") is None


def test_open_files_read_anew_when_the_content_changed(tmp_path: Path) -> None:
    """One descriptor, read from its beginning each time."""
    file = tmp_path / "file"
    file.write_text("first")
    files = OpenFiles()
    assert files.keep(str(file), os.open(file, os.O_RDONLY))

    before = files.read(str(file))
    file.write_text("second")

    assert (before, files.read(str(file)), files.read("other")) == (b"first", b"second", None)


ENDS: dict[str, Callable[[OpenFiles, pytest.MonkeyPatch], object]] = {
    "the kernel says ENODEV": lambda _, monkeypatch: monkeypatch.setattr(os, "pread", refuse),
    "its time is up": lambda _, monkeypatch: monkeypatch.setattr(
        "topobus.sysfs.answers.time.monotonic", lambda: float("inf")
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_open_files_give_up_a_descriptor_when(
    end: Callable[[OpenFiles, pytest.MonkeyPatch], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed and forgotten, and the file is opened by its name again."""
    file = tmp_path / "file"
    file.touch()
    files = OpenFiles()
    descriptor = os.open(file, os.O_RDONLY)
    files.keep(str(file), descriptor)

    end(files, monkeypatch)
    given_up = files.read(str(file))
    monkeypatch.undo()

    assert (given_up, files.read(str(file))) == (None, None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_open_files_take_no_more_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not taken stays the caller's to close."""
    monkeypatch.setattr(answers, "_MOST_FILES", 1)
    file = tmp_path / "file"
    file.touch()
    files = OpenFiles()
    descriptors = [os.open(file, os.O_RDONLY) for _ in range(2)]

    taken = [files.keep(str(number), descriptor) for number, descriptor in enumerate(descriptors)]

    os.close(descriptors[1])
    assert taken == [True, False]


def refuse(*_: object, **__: object) -> int:
    """Fail as the kernel does for a device that is gone."""
    raise OSError(19, "No such device")


def test_open_files_give_way_when_nobody_asked_for_them_in_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of devices that are gone are never asked for again: they do not keep the places of
    files that are.
    """
    monkeypatch.setattr(answers, "_MOST_FILES", 2)
    now_s = 0.0
    monkeypatch.setattr("topobus.sysfs.answers.time.monotonic", lambda: now_s)
    files = OpenFiles()
    paths = [tmp_path / name for name in ("gone-1", "gone-2", "new")]
    for path in paths:
        path.write_text(path.name)
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    kept = [files.keep(str(path), descriptor) for path, descriptor in zip(paths[:2], descriptors[:2], strict=True)]
    refused = files.keep(str(paths[2]), descriptors[2])
    now_s = 61.0

    taken = files.keep(str(paths[2]), descriptors[2])

    assert (kept, refused, taken) == ([True, True], False, True)
    assert files.read(str(paths[2])) == b"new"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_open_file_is_given_up_when_its_name_leads_to_another_one(tmp_path: Path) -> None:
    """Two interfaces that change names: the file that is open goes with the old one, and the name
    means the new one.
    """
    first, second = tmp_path / "eth0", tmp_path / "eth1"
    first.write_text("0")
    second.write_text("1")
    files = OpenFiles()
    files.keep(str(first), os.open(first, os.O_RDONLY))
    before = files.read(str(first))

    first.rename(tmp_path / "away")
    second.rename(first)

    assert (before, files.read(str(first))) == (b"0", None)
