"""Wake-ups by a folder's own events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from topobus.process.folder_events import FolderEvents

LIMIT_S = 60.0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: (folder / "new").touch(), id="a file comes"),
        pytest.param(lambda folder: (folder / "old").unlink(), id="a file goes"),
        pytest.param(lambda folder: (folder / "old").write_text("x"), id="a file is written"),
        pytest.param(lambda folder: (folder / "old").rename(folder / "other"), id="a file is renamed"),
        pytest.param(lambda folder: (folder / "old").rename(folder.parent / "away"), id="a file is moved away"),
        pytest.param(lambda folder: (folder.parent / "outside").rename(folder / "inside"), id="a file is moved here"),
        pytest.param(lambda folder: (folder / "below").mkdir(), id="a folder comes"),
    ],
)
async def test_next_wakes_when_something_in_the_folder_changes(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Each kind of change wakes, also one between the beginning and the wait."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "old").touch()
    (tmp_path / "outside").touch()

    with FolderEvents(folder) as events:
        change(folder)
        async with asyncio.timeout(LIMIT_S):
            is_there = await events.next()

    assert is_there


async def test_next_wakes_again_when_the_folder_changes_again(tmp_path: Path) -> None:
    """A wake-up takes all events of its burst and none of the next one."""
    with FolderEvents(tmp_path) as events:
        async with asyncio.timeout(LIMIT_S):
            for number in range(3):
                (tmp_path / str(number)).touch()
                assert await events.next()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda folder: folder.rmdir(), id="removed"),
        pytest.param(lambda folder: folder.rename(folder.with_name("elsewhere")), id="moved away"),
    ],
)
async def test_next_says_so_when_the_folder_itself_goes(tmp_path: Path, end: Callable[[Path], object]) -> None:
    """The watch is of the folder, not of its name, so whoever waits must begin anew."""
    folder = tmp_path / "watched"
    folder.mkdir()

    with FolderEvents(folder) as events:
        end(folder)
        async with asyncio.timeout(LIMIT_S):
            is_there = await events.next()

    assert not is_there


def test_folder_events_raise_when_there_is_no_folder(tmp_path: Path) -> None:
    """What is absent, or a file, is an error with the path in it, and no descriptor stays open."""
    (tmp_path / "file").touch()

    with pytest.raises(FileNotFoundError, match="absent"):
        FolderEvents(tmp_path / "absent")
    with pytest.raises(NotADirectoryError, match="file"):
        FolderEvents(tmp_path / "file")


async def test_next_leaves_nothing_behind_when_its_wait_is_given_up(tmp_path: Path) -> None:
    """A wait that ends by its time limit is simply begun again, and misses nothing."""
    with FolderEvents(tmp_path) as events:
        waiting = asyncio.create_task(events.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        (tmp_path / "new").touch()
        async with asyncio.timeout(LIMIT_S):
            is_there = await events.next()

    assert waiting.cancelled()
    assert is_there


async def test_next_waits_on_when_no_name_that_counts_has_changed(tmp_path: Path) -> None:
    """Another file beside the sockets, as kubelet's checkpoint, wakes nobody."""
    with FolderEvents(tmp_path) as all_events, FolderEvents(tmp_path, suffix=".sock") as events:
        waiting = asyncio.create_task(events.next())
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                (tmp_path / "checkpoint").write_text("x")
                await all_events.next()
            is_woken = waiting.done()
            (tmp_path / "kubelet.sock").touch()
            is_there = await waiting

    assert not is_woken
    assert is_there
