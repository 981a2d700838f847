"""Reads keys from the bytes of a terminal. Pure; a sequence that comes in pieces is put together."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Key", "read_keys"]


class Key(StrEnum):
    """What a key means here."""

    QUIT = "quit"
    LEFT = "left"
    RIGHT = "right"
    UP = "up"
    DOWN = "down"
    PAGE_UP = "page-up"
    PAGE_DOWN = "page-down"
    HOME = "home"
    REDRAW = "redraw"


_SEQUENCES = {
    b"q": Key.QUIT,
    b"Q": Key.QUIT,
    b"\x03": Key.QUIT,
    b"\x04": Key.QUIT,
    b"\x1b[A": Key.UP,
    b"\x1bOA": Key.UP,
    b"k": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN,
    b"\x1b[C": Key.RIGHT,
    b"\x1bOC": Key.RIGHT,
    b"l": Key.RIGHT,
    b"\t": Key.RIGHT,
    b"\x1b[D": Key.LEFT,
    b"\x1bOD": Key.LEFT,
    b"h": Key.LEFT,
    b"\x1b[5~": Key.PAGE_UP,
    b"\x1b[6~": Key.PAGE_DOWN,
    b" ": Key.PAGE_DOWN,
    b"\x1b[H": Key.HOME,
    b"\x1b[1~": Key.HOME,
    b"g": Key.HOME,
    b"\x0c": Key.REDRAW,
}


def read_keys(data: bytes) -> tuple[list[Key], bytes]:
    r"""Take the keys out of what was read; gives them and what may be the beginning of one more. What means nothing here is dropped.

    >>> read_keys(b"x\x1b[Cq\x1b["), read_keys(b"\x1b[")
    (([<Key.RIGHT: 'right'>, <Key.QUIT: 'quit'>], b'\x1b['), ([], b'\x1b['))
    """
    keys: list[Key] = []
    while data:
        sequence = next((code for code in _SEQUENCES if data.startswith(code)), None)
        if sequence is not None:
            keys.append(_SEQUENCES[sequence])
            data = data[len(sequence) :]
        elif any(code.startswith(data) for code in _SEQUENCES):
            break
        else:
            data = data[1:]
    return keys, data
