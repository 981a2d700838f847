"""The folder in memory that tests take is one with room for what they write: bytes, and files."""

from __future__ import annotations

import os

import pytest

from lab.servers.shaped_servers import cheap_folder

_GIB = 1024**3


def _room(*, gib: int, files: int, free: int) -> os.statvfs_result:
    """Give a tmpfs' word: blocks of 4 KiB, and how many files it may have and has left."""
    blocks = gib * _GIB // 4096
    return os.statvfs_result((4096, 4096, blocks, blocks, blocks, files, free, free, 0, 255))


@pytest.mark.parametrize(
    ("room", "is_taken"),
    [
        pytest.param(_room(gib=12, files=1_500_000, free=1_400_000), True, id="room-for-both"),
        pytest.param(_room(gib=12, files=0, free=0), True, id="no-limit-of-files"),
        pytest.param(_room(gib=12, files=1_500_000, free=20_000), False, id="nearly-all-files-made"),
        pytest.param(_room(gib=1, files=1_500_000, free=1_400_000), False, id="few-bytes"),
    ],
)
def test_memory_is_taken_only_where_it_has_room_for_bytes_and_files(
    monkeypatch: pytest.MonkeyPatch, room: os.statvfs_result, is_taken: bool
) -> None:
    """A tmpfs ends at its files long before its bytes where tests write trees of small ones."""
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert (cheap_folder() is not None) is is_taken
