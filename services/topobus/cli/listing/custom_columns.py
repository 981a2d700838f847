"""Columns of a user's own, as kubectl has them: `-o custom-columns=NAME:.metadata.name,NODE:.spec.nodeName`, or read from a file.

Flows in: the option's text, and the documents of rows. Flows out: lines, padded to the longest value of each column. What is not understood is refused.
Source: kubectl's custom columns (kubectl/pkg/cmd/get/customcolumn.go): absent values are `<none>`, several are joined by commas, three blanks between columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topobus.cli.exits import UsageError
from topobus.cli.listing.json_path import read_path
from topobus.cli.objects.input_files import read_text

__all__ = ["COLUMNS", "COLUMNS_FILE", "CustomColumns"]

COLUMNS = "custom-columns="
COLUMNS_FILE = "custom-columns-file="

_FILE_BYTES = 64 << 10
_GAP = "   "
_NONE = "<none>"
_NEXT = "write TITLE:PATH pairs, such as custom-columns=NAME:.metadata.name,NODE:.spec.nodeName"


@dataclass(frozen=True, kw_only=True)
class CustomColumns:
    """Titles, and what finds the values of each in a document."""

    titles: tuple[str, ...]
    finders: tuple[Callable[[Any], list[Any]], ...]

    @classmethod
    def read(cls, form: str) -> CustomColumns:
        """Read the value of -o.

        >>> CustomColumns.read("custom-columns=NAME:.metadata.name,NODE:.spec.nodeName").lines([{"metadata": {"name": "a"}}])
        ['NAME   NODE', 'a      <none>']

        Errors: raises UsageError for what is not understood, InputError for a file that cannot be read.
        """
        if form.startswith(COLUMNS_FILE):
            return cls._of_file(Path(form.removeprefix(COLUMNS_FILE)))
        # A comma within a path stands in brackets.
        pairs = re.split(r",(?![^\[]*\])", form.removeprefix(COLUMNS))
        split = [pair.partition(":") for pair in pairs]
        if wrong := next((pair for pair, (title, colon, path) in zip(pairs, split, strict=True) if not (title and colon and path)), None):
            raise UsageError(f"cannot read the column {wrong!r}", next_step=_NEXT)
        if not all(pairs):
            raise UsageError(f"a column of {form!r} is empty", next_step=_NEXT)
        return cls(titles=tuple(title for title, _, _ in split), finders=tuple(read_path(path) for _, _, path in split))

    @classmethod
    def _of_file(cls, path: Path) -> CustomColumns:
        """Read titles from the first line and paths from the second, parted by blanks."""
        text = read_text(path, limit_bytes=_FILE_BYTES, next_step="write titles into its first line and their paths into the second")
        lines = [line.split() for line in text.splitlines() if line.strip()]
        if len(lines) != 2 or len(lines[0]) != len(lines[1]):
            raise UsageError(
                f"{path}: wanted a line of titles and a line with as many paths, got {' and '.join(str(len(line)) for line in lines) or 'no'} words",
                next_step="such as a line `NAME NODE` and a line `.metadata.name .spec.nodeName`",
            )
        return cls(titles=tuple(lines[0]), finders=tuple(map(read_path, lines[1])))

    def lines(self, documents: Iterable[Any], *, has_headers: bool = True) -> list[str]:
        """Write a line for each document; none is cut or folded, for programs read them, too."""
        rows: list[Sequence[str]] = [self.titles] if has_headers else []
        rows += [[",".join(map(_written, finder(document))) or _NONE for finder in self.finders] for document in documents]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _written(value: Any) -> str:
    if value is None:
        return _NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
