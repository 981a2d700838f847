"""What of a fleet `topobus top` shows, and the effect of a key: a frozen value and a step.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topobus.cli.top.keys import Key, Press

__all__ = ["View", "place_of", "press", "window"]

# Letters of a filter: as many as fit into a line of a wide terminal.
_MOST_TYPED = 120


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown. A program of one node has that node opened."""

    selected: str = ""
    """The node of the row that keys act on. Empty: the first row, whichever that is, until a key
    has moved it."""
    place: int = 0
    """Where that row was last. If it is gone, its neighbour takes its place."""
    first: int = 0
    """The row at the top."""
    filter: str = ""
    typed: str | None = None
    """The filter while it is typed. None while none is."""
    opened: str = ""
    """The node that is drawn. Empty: the table of all."""
    scroll: int = 0
    """The first line of the drawing, or of the help, that is shown."""
    has_help: bool = False
    is_ended: bool = False

    @property
    def wanted(self) -> str:
        """The filter of the table, which applies already while it is typed."""
        return self.filter if self.typed is None else self.typed


def press(view: View, pressed: Press, nodes: Sequence[str], *, page: int, has_fleet: bool) -> View:
    """Apply a key.

    Shapes: nodes — those that the filter selects, in the order of the table; page — rows that are
    shown at once; has_fleet — there is a table to go back to.
    """
    if pressed.key is Key.END:
        return replace(view, is_ended=True)
    if view.typed is not None:
        return _typed(view, view.typed, pressed)
    if view.has_help:
        return _with_help(view, pressed, page)
    if pressed.key is Key.QUIT:
        return replace(view, is_ended=True)
    if pressed.key is Key.HELP:
        return replace(view, has_help=True, scroll=0)
    if view.opened:
        return _in_node(view, pressed, nodes, page, has_fleet=has_fleet)
    return _in_table(view, pressed, nodes, page)


def place_of(view: View, nodes: Sequence[str]) -> int:
    """Find the row that keys act on. If its node is gone, the row that has its place."""
    if not view.selected:
        return 0
    if view.selected in nodes:
        return nodes.index(view.selected)
    return min(view.place, max(len(nodes) - 1, 0))


def window(first: int, place: int, count: int, room: int) -> int:
    """Return the row at the top so that the selected one is shown, and no room is left empty while
    there are more.

    >>> window(0, 30, 100, 20), window(40, 30, 100, 20), window(95, 99, 100, 20), window(5, 2, 3, 20)
    (11, 30, 80, 0)
    """
    first = min(max(first, place - room + 1), place)
    return max(min(first, count - room), 0)


def _typed(view: View, typed: str, pressed: Press) -> View:
    match pressed.key:
        case Key.ENTER:
            return replace(view, filter=typed.strip(), typed=None)
        case Key.BACK:
            return replace(view, typed=None)
        case Key.ERASE if typed:
            return replace(view, typed=typed[:-1], first=0)
        case Key.ERASE:
            return replace(view, typed=None, filter="")
        case _:
            return replace(view, typed=(typed + pressed.text)[:_MOST_TYPED], first=0)


def _with_help(view: View, pressed: Press, page: int) -> View:
    match pressed.key:
        case Key.BACK | Key.ERASE | Key.QUIT | Key.HELP | Key.ENTER:
            return replace(view, has_help=False, scroll=0)
        case _:
            return _scrolled(view, pressed, page)


def _in_node(view: View, pressed: Press, nodes: Sequence[str], page: int, *, has_fleet: bool) -> View:
    match pressed.key:
        case Key.BACK | Key.ERASE if has_fleet:
            return replace(view, opened="", selected=view.opened, place=_index(view.opened, nodes), scroll=0)
        case Key.LEFT | Key.RIGHT if nodes:
            here = _index(view.opened, nodes)
            there = (
                nodes[(here + (1 if pressed.key is Key.RIGHT else -1)) % len(nodes)]
                if view.opened in nodes
                else nodes[0]
            )
            return replace(view, opened=there, selected=there, place=_index(there, nodes), scroll=0)
        case _:
            return _scrolled(view, pressed, page)


def _in_table(view: View, pressed: Press, nodes: Sequence[str], page: int) -> View:
    here = place_of(view, nodes)
    match pressed.key:
        case Key.FILTER:
            return replace(view, typed=view.filter)
        case Key.BACK | Key.ERASE if view.filter:
            return replace(view, filter="", first=0)
        case Key.ENTER | Key.RIGHT if nodes:
            return replace(view, opened=nodes[here], selected=nodes[here], place=here, scroll=0)
        case _:
            there = _moved(here, pressed.key, page, len(nodes) - 1)
            if there is None or not nodes:
                return view
            return replace(view, selected=nodes[there], place=there)


def _scrolled(view: View, pressed: Press, page: int) -> View:
    """Scroll.

    Only the layout knows how long a text is, and it limits a scroll beyond its end.
    """
    there = _moved(view.scroll, pressed.key, page, view.scroll + max(page, 10**6))
    return view if there is None else replace(view, scroll=there)


def _moved(here: int, key: Key | None, page: int, last: int) -> int | None:
    steps: dict[Key | None, int] = {
        Key.UP: -1,
        Key.DOWN: 1,
        Key.PAGE_UP: -max(page - 1, 1),
        Key.PAGE_DOWN: max(page - 1, 1),
    }
    if key is Key.HOME:
        return 0
    if key is Key.LAST:
        return max(last, 0)
    return min(max(here + steps[key], 0), max(last, 0)) if key in steps else None


def _index(node: str, nodes: Sequence[str]) -> int:
    return nodes.index(node) if node in nodes else 0
