"""Keys of `topobus top`, from the bytes of a terminal."""

from __future__ import annotations

import pytest

from topobus.cli.top.keys import Key, Press, read_presses


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"\x1b[A\x1bOB", [Press(Key.UP), Press(Key.DOWN)]),
        (b"\r", [Press(Key.ENTER)]),
        (b"\x7f", [Press(Key.ERASE)]),
        (b"/a?", [Press(Key.FILTER, "/"), Press(None, "a"), Press(Key.HELP, "?")]),
        (b"\x1b[15~\x1b[1;5Cx", [Press(None, "x")]),
        (b"\x1bq", [Press(Key.BACK), Press(Key.QUIT, "q")]),
        (b"\x1b\x1b[A", [Press(Key.BACK), Press(Key.UP)]),
        ("ö".encode(), [Press(None, "ö")]),
        (b"\xff\x00", []),
        (b"\x04", [Press(Key.END)]),
    ],
)
def test_presses_are_read_when_they_come_whole(data: bytes, wanted: list[Press]) -> None:
    """Letters keep what they are, for a filter is typed with them.

    Keys that mean nothing leave nothing behind.
    """
    assert read_presses(data, is_all=True) == (wanted, b"")


@pytest.mark.parametrize("data", [b"\x1b[C", b"\x1b[6~", b"\x1bOA", "ö".encode(), "→".encode()])
def test_press_is_one_when_its_bytes_come_in_pieces(data: bytes) -> None:
    """Wherever it is cut, the whole is what it would have been."""
    whole = read_presses(data)[0]
    for place in range(1, len(data)):
        first, rest = read_presses(data[:place])
        second, left = read_presses(rest + data[place:])

        assert (first, second, left) == ([], whole, b"")


def test_escape_alone_is_a_key_when_nothing_follows() -> None:
    """It may be the beginning of a sequence until nothing more has come."""
    assert read_presses(b"\x1b") == ([], b"\x1b")
    assert read_presses(b"\x1b", is_all=True) == ([Press(Key.BACK)], b"")
