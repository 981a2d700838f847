"""Lays out the rows of a listing for a terminal's width: as a table where it fits, else one block
per row, so that names and ids stay whole.

No line is wider than the width, and none has trailing blanks. Pure. Words are never broken. A cut
text ends with an ellipsis. An id, which users copy, is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

__all__ = ["Cell", "Column", "Fit", "Listing", "Row", "cut", "fold", "hanging", "words_of"]

Cell = str | Text

_GAPS = (3, 2)
# A column of text that is folded is at least this wide, unless its whole text is shorter: narrower
# columns are tall and hard to read.
_LEAST_TEXT = 12
_INDENT = 4


class Fit(StrEnum):
    """How the cells of a column may change where there is little room."""

    NAME = "name"
    """Stays on one line. It is cut, with an ellipsis, only where it is longer than the terminal is
    wide."""
    ID = "id"
    """For copying: never cut and never broken."""
    TEXT = "text"
    """Is folded between words."""
    NUMBER = "number"
    """As a name, to the right."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a listing."""

    title: str
    fit: Fit = Fit.TEXT
    is_wide: bool = False
    """Shown with `-o wide` alone."""
    gives_way: bool = False
    """Left out, before anything is folded into blocks, where the terminal is too narrow. The last
    line names it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: its text for people, and the same thing for programs and selectors."""

    cells: tuple[Cell, ...]
    below: tuple[Text, ...] = ()
    """Lines of their own below the row."""
    name: str = ""
    """As `-o name` prints it. It also identifies rows while they are watched."""
    document: Any = None
    labels: dict[str, str] = field(default_factory=dict)
    sort_keys: dict[str, str] = field(default_factory=dict)
    """By column, where the text of a cell would sort wrongly."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Rows of one kind, ready to be printed."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    is_wide: bool = False
    has_headers: bool = True
    totals: tuple[Row, ...] = ()
    """Sums below all rows, for people. Programs and selectors do not see them."""
    all_of_it: str = "-o wide has all"
    """How to get what a narrow terminal has no room for."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Print by rich's protocol."""
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def lines(self, width: int) -> list[Text]:
        """Lay the listing out."""
        shown = [place for place, column in enumerate(self.columns) if self.is_wide or not column.is_wide]
        head = [Text(self.title, "bold")] if self.title and self.has_headers else []
        left_out: list[str] = []
        while True:
            columns = [self.columns[place] for place in shown]
            cells = [[_text(row.cells[place]) for place in shown] for row in self._all_rows]
            layout = _widths(columns, cells, width, has_headers=self.has_headers)
            if layout is not None:
                body = self._table(columns, cells, *layout, width)
                break
            yielding = [place for place in shown if self.columns[place].gives_way] if not self.is_wide else []
            if not yielding:
                left_out = []
                shown = [place for place, column in enumerate(self.columns) if self.is_wide or not column.is_wide]
                body = self._blocks(shown, width)
                break
            shown.remove(yielding[-1])
            left_out.insert(0, self.columns[yielding[-1]].title)
        if left_out and self.has_headers:
            body.extend(fold(Text(f"too narrow for: {', '.join(left_out)} ({self.all_of_it})", "dim"), width))
        return [_bare(line) for line in (*(cut(line, width) for line in head), *body)]

    @property
    def _all_rows(self) -> tuple[Row, ...]:
        return (*self.rows, *(self.totals if self.has_headers else ()))

    def _table(
        self, columns: Sequence[Column], cells: list[list[Text]], widths: list[int], gap: int, width: int
    ) -> list[Text]:
        lines: list[Text] = []
        if self.has_headers:
            lines.append(
                _joined(
                    [
                        _aligned(Text(column.title, "bold"), column, widths[place])
                        for place, column in enumerate(columns)
                    ],
                    gap,
                )
            )
        for row, row_cells in zip(self._all_rows, cells, strict=True):
            folded = [_folded(cell, columns[place], widths[place]) for place, cell in enumerate(row_cells)]
            for number in range(max(map(len, folded), default=0)):
                parts = [part[number] if number < len(part) else Text() for part in folded]
                lines.append(
                    _joined([_aligned(part, columns[place], widths[place]) for place, part in enumerate(parts)], gap)
                )
            lines.extend(cut(line, width) for line in row.below)
        return lines

    def _blocks(self, shown: Sequence[int], width: int) -> list[Text]:
        """Write each row as a block: names and ids first, then the rest, folded and indented."""
        lines: list[Text] = []
        keys = [place for place in shown if self.columns[place].fit in (Fit.NAME, Fit.ID)]
        # A row's names and ids are at its beginning. Names further on are facts about it.
        keys = [place for number, place in enumerate(keys) if place == shown[number]]
        for row in self._all_rows:
            head = _joined([_text(row.cells[place]) for place in keys], 2)
            if len(head) <= width:
                lines.append(head)
            else:
                for place in keys:
                    cell = _text(row.cells[place])
                    lines.append(cell if self.columns[place].fit is Fit.ID else cut(cell, width))
            line = Text()
            for place in shown:
                cell = _text(row.cells[place])
                if place in keys or cell.plain in ("", "-"):
                    continue
                part = Text.assemble((f"{self.columns[place].title}: ", "dim"), cell)
                is_long = "\n" in part.plain or len(part) > width - _INDENT
                if line and (is_long or len(line) + 3 + len(part) > width - _INDENT):
                    lines.append(Text(" " * _INDENT) + line)
                    line = Text()
                if is_long and self.columns[place].fit is Fit.ID:
                    lines += [
                        cut(Text(f"{' ' * _INDENT}{self.columns[place].title}:", "dim"), width),
                        *cell.split("\n"),
                    ]
                elif is_long:
                    folded = fold(part, width - 2 * _INDENT)
                    lines.extend(
                        Text(" " * (_INDENT if number == 0 else 2 * _INDENT)) + other
                        for number, other in enumerate(folded)
                    )
                else:
                    line = _joined([line, part], 3) if line else part
            if line:
                lines.append(Text(" " * _INDENT) + line)
            lines.extend(cut(Text(" " * _INDENT) + line, width) for line in row.below)
        return lines


def fold(text: Text, width: int) -> list[Text]:
    """Fold after blanks and commas.

    A word that is longer than the width is cut with an ellipsis.
    """
    lines: list[Text] = []
    for paragraph in text.split("\n"):
        line = Text()
        for word in words_of(paragraph):
            if line and len(line) + len(_bare(word)) > width:
                lines.append(_bare(line))
                line = Text()
            line = line + word
            if len(_bare(line)) > width:
                line = cut(line, width)
        lines.append(_bare(line))
    return lines


def hanging(head: Text, body: Text, width: int) -> list[Text]:
    """Write a text after its head, with continuation lines below the text.

    The head takes a quarter of the width at most.

    >>> [line.plain for line in hanging(Text("PIX  = "), Text("through one PCIe switch"), 20)]
    ['PIX  = through one', '     PCIe switch']
    """
    indent = min(len(head), max(width // 4, 1))
    first = fold(body, max(width - len(head), 1))[0] if len(head) < width else Text()
    if not body.plain.startswith(first.plain):
        # A word that is longer than the room beside the head has more room below.
        first = Text()
    rest = body[len(first) :]
    rest = rest[len(rest.plain) - len(rest.plain.lstrip(" ")) :]
    lines = [head + first]
    if rest:
        lines += [Text(" " * indent) + line for line in fold(rest, width - indent)]
    return [_bare(cut(line, width)) for line in lines]


def words_of(text: Text) -> list[Text]:
    """Take a line apart where it may be broken: after blanks and after commas.

    >>> [word.plain for word in words_of(Text("allocated,reserved by a"))]
    ['allocated,', 'reserved ', 'by ', 'a']
    """
    ends = [
        place + 1
        for place, sign in enumerate(text.plain)
        if sign in " ," and text.plain[place + 1 : place + 2] not in (" ", ",")
    ]
    return [word for word in text.divide(ends) if word.plain]


def _widths(
    columns: Sequence[Column], cells: Sequence[Sequence[Text]], width: int, *, has_headers: bool
) -> tuple[list[int], int] | None:
    """Choose the widths and the gap. None where the table does not fit even if it is folded."""
    natural, least = [], []
    for place, column in enumerate(columns):
        lines = [line for row in cells for line in row[place].split("\n")]
        title = len(column.title) if has_headers else 0
        longest = max([title, *map(len, lines)])
        natural.append(longest)
        words = [len(_bare(word)) for line in lines for word in words_of(line)]
        least.append(max([title, min(longest, _LEAST_TEXT), *words]) if column.fit is Fit.TEXT else longest)
    gap = next((gap for gap in _GAPS if sum(natural) + gap * (len(columns) - 1) <= width), _GAPS[-1])
    room = width - gap * (len(columns) - 1)
    if sum(natural) <= room:
        return natural, gap
    if sum(least) > room:
        return None
    widths = list(natural)
    while sum(widths) > room:
        place = max(range(len(widths)), key=lambda other: (widths[other] > least[other], widths[other]))
        widths[place] -= 1
    return widths, gap


def _folded(cell: Text, column: Column, width: int) -> list[Text]:
    return fold(cell, width) if column.fit is Fit.TEXT else list(cell.split("\n"))


def cut(line: Text, width: int) -> Text:
    """Cut a line to a width, as a copy: on a wider screen it is whole again."""
    shorter = line.copy()
    shorter.truncate(max(width, 1), overflow="ellipsis")
    shorter.no_wrap = True
    return shorter


def _aligned(part: Text, column: Column, width: int) -> Text:
    aligned = part.copy()
    if column.fit is Fit.NUMBER:
        aligned.pad_left(max(width - len(aligned), 0))
    else:
        aligned.pad_right(max(width - len(aligned), 0))
    return aligned


def _joined(parts: Iterable[Text], gap: int) -> Text:
    return Text(" " * gap).join(parts)


def _bare(line: Text) -> Text:
    bare = line.copy()
    bare.rstrip()
    return bare


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
