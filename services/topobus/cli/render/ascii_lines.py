"""Writes finished lines in ASCII, each as wide as it was, so that a border or a column after a
longer sign stays where it is.

The lines come from rich, laid out with one cell for each sign. What a sign needs beyond its one
cell is taken from the blanks after it, and where there are none, from the text before it, which `…`
has cut already. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment
from rich.style import Style

__all__ = ["AsciiLines", "ascii_line", "ascii_text"]

_ASCII = str.maketrans(
    {
        **dict.fromkeys("─━═╌", "-"),
        **dict.fromkeys("│┃║", "|"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯╔╗╚╝", "+"),
        **dict.fromkeys("·•", "."),
        "…": "...",
        "×": "x",
        "→": "->",
        "←": "<-",
        "↑": "^",
        "↓": "v",
        "–": "-",
        "—": "-",
        "“": '"',
        "”": '"',
        "’": "'",
        "≥": ">=",
        "≤": "<=",
        **dict.fromkeys("█▓▒░■", "#"),
    }
)
_BORDERS = "│┃║|"
_CUT = "…"

Cell = tuple[str, Style | None]


def ascii_text(text: str) -> str:
    """Write a text by signs that every terminal has.

    A sign without an ASCII form becomes a question mark.

    >>> ascii_text("a → b…"), ascii_text("ö")
    ('a -> b...', '?')
    """
    return "".join(character if character.isascii() else "?" for character in text.translate(_ASCII))


def ascii_line(line: str) -> str:
    """Write one line in ASCII, at its present width where that is possible.

    >>> ascii_line("│ gpu-0000-18… │"), ascii_line("was → is  │"), ascii_line("reading …")
    ('| gpu-0000-... |', 'was -> is |', 'reading ...')
    """
    return "".join(sign for sign, _ in _cells_in_ascii([(sign, None) for sign in line]))


class AsciiLines(RenderHook):
    """Makes a console write everything in ASCII, after it is laid out."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wrap what is to be printed."""
        return [renderable if isinstance(renderable, Control) else _InAscii(renderable) for renderable in renderables]


class _InAscii:
    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = list(console.render(self._renderable, options))
        has_end = bool(segments) and segments[-1].text.endswith("\n")
        lines = list(Segment.split_lines(segment for segment in segments if not segment.control))
        for number, line in enumerate(lines):
            cells = [(sign, segment.style) for segment in line for sign in segment.text]
            yield from Segment.simplify(Segment(sign, style) for sign, style in _cells_in_ascii(cells))
            if has_end or number < len(lines) - 1:
                yield Segment.line()


def _cells_in_ascii(line: Sequence[Cell]) -> list[Cell]:
    """Write a line's cells in ASCII. `owed` counts the cells by which the written text is too
    wide.
    """
    written: list[Cell] = []
    owed = 0
    for place, (sign, style) in enumerate(line):
        if sign in _BORDERS and owed:
            owed -= _take_blanks(written, owed)
        if sign == " " and owed and written and written[-1][0] == " ":
            owed -= 1
            continue
        signs = ascii_text(sign)
        extra = len(signs) - 1
        if sign == _CUT and extra > (room := _blanks_after(line, place)):
            extra -= _take_text(written, extra - room)
        owed += extra
        written += [(other, style) for other in signs]
    return written


def _blanks_after(line: Sequence[Cell], place: int) -> int:
    """Count the blanks after a cell that are not needed: all at the line's end, all but one within
    it.
    """
    blanks = 0
    for sign, _ in line[place + 1 :]:
        if sign != " ":
            return max(blanks - 1, 0)
        blanks += 1
    return blanks


def _take_text(written: list[Cell], count: int) -> int:
    """Remove cells of a text that is cut anyway, and return how many.

    A `…` after a blank cuts no text.
    """
    taken = 0
    while taken < count and written and written[-1][0] != "|" and (taken or written[-1][0] != " "):
        written.pop()
        taken += 1
    return taken


def _take_blanks(written: list[Cell], count: int) -> int:
    """Remove blanks before a border, and return how many."""
    taken = 0
    while taken < count and written and written[-1][0] == " ":
        written.pop()
        taken += 1
    return taken
