"""Reads key presses from the bytes of a terminal. Pure.

A sequence that arrives in pieces is put together.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Key", "Press", "read_presses"]


class Key(StrEnum):
    """What a key means here, while nothing is typed."""

    END = "end"
    """Ctrl-C or Ctrl-D, or the terminal is gone: the program ends from every screen."""
    QUIT = "quit"
    ENTER = "enter"
    BACK = "back"
    """Esc."""
    ERASE = "erase"
    """Backspace: one letter of the typed text, else as Esc."""
    FILTER = "filter"
    HELP = "help"
    LEFT = "left"
    RIGHT = "right"
    UP = "up"
    DOWN = "down"
    PAGE_UP = "page-up"
    PAGE_DOWN = "page-down"
    HOME = "home"
    LAST = "last"
    REDRAW = "redraw"


@dataclass(frozen=True)
class Press:
    """One key that was pressed."""

    key: Key | None = None
    """None: it has no meaning except as a letter."""
    text: str = ""
    """Its letter. Empty for a key without one."""


_LETTERS = {
    "q": Key.QUIT,
    "Q": Key.QUIT,
    "k": Key.UP,
    "j": Key.DOWN,
    "l": Key.RIGHT,
    "h": Key.LEFT,
    "/": Key.FILTER,
    "?": Key.HELP,
    " ": Key.PAGE_DOWN,
    "g": Key.HOME,
    "G": Key.LAST,
}
_CONTROLS = {
    "\x03": Key.END,
    "\x04": Key.END,
    "\r": Key.ENTER,
    "\n": Key.ENTER,
    "\t": Key.RIGHT,
    "\x7f": Key.ERASE,
    "\x08": Key.ERASE,
    "\x0c": Key.REDRAW,
    # For users who page as in less and vi.
    "\x06": Key.PAGE_DOWN,
    "\x02": Key.PAGE_UP,
}
_SEQUENCES = {
    "\x1b[A": Key.UP,
    "\x1bOA": Key.UP,
    "\x1b[B": Key.DOWN,
    "\x1bOB": Key.DOWN,
    "\x1b[C": Key.RIGHT,
    "\x1bOC": Key.RIGHT,
    "\x1b[D": Key.LEFT,
    "\x1bOD": Key.LEFT,
    "\x1b[5~": Key.PAGE_UP,
    "\x1b[6~": Key.PAGE_DOWN,
    "\x1b[H": Key.HOME,
    "\x1bOH": Key.HOME,
    "\x1b[1~": Key.HOME,
    "\x1b[F": Key.LAST,
    "\x1bOF": Key.LAST,
    "\x1b[4~": Key.LAST,
}
# Control sequences of ECMA-48 and the keypad's (SS3), complete, and how each begins.
_WHOLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.")
_BEGUN = re.compile(r"\x1b(\[[0-?]*[ -/]*|O)?\Z")


def read_presses(data: bytes, *, is_all: bool = False) -> tuple[list[Press], bytes]:
    r"""Parse the presses from the bytes read. Returns them, and the rest that may be the beginning
    of one more.

    Sequences without a meaning here are dropped.

    Shapes: is_all — nothing more came for a moment: a single escape character is the key Esc, and
    no beginning.

    >>> read_presses(b"\x1b[Cx\x1b[")
    ([Press(key=<Key.RIGHT: 'right'>, text=''), Press(key=None, text='x')], b'\x1b[')
    >>> read_presses(b"\x1b", is_all=True)
    ([Press(key=<Key.BACK: 'back'>, text='')], b'')
    """
    text, unread = _decoded(data)
    presses: list[Press] = []
    place = 0
    while place < len(text):
        if (whole := _WHOLE.match(text, place)) is not None:
            if (key := _SEQUENCES.get(whole[0])) is not None:
                presses.append(Press(key))
            place = whole.end()
            continue
        if not is_all and _BEGUN.match(text, place):
            return presses, text[place:].encode() + unread
        sign = text[place]
        place += 1
        if sign == "\x1b":
            presses.append(Press(Key.BACK))
        elif sign in _CONTROLS:
            presses.append(Press(_CONTROLS[sign]))
        elif sign.isprintable():
            presses.append(Press(_LETTERS.get(sign), sign))
    return presses, unread


def _decoded(data: bytes) -> tuple[str, bytes]:
    """Decode the complete characters, without invalid bytes. The last character may have been read
    in part.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]
