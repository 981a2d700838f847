"""The tables that answers share: rows under titles, facts beside their names, and a text behind a
mark.
"""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["facts_grid", "marked_line", "plain_table"]


def plain_table(*titles: str) -> Table:
    """Begin a table with these columns, whose texts are folded."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title", pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def facts_grid() -> Table:
    """Begin a table of two columns, a name and its fact."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="faint")
    grid.add_column(overflow="fold")
    return grid


def marked_line(mark: str | Text, text: str | Text, *, width: int = 3) -> Table:
    """Write a text whose further lines begin below the first, behind its mark."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=width, justify="right")
    grid.add_column(overflow="fold")
    grid.add_row(mark, text)
    return grid
