"""What `topobus` prints: people read rich text on stdout, machines read JSON there, and errors go to stderr in one shape.

Colour only on a terminal and never with NO_COLOR; what colour says is said in letters too. Nothing but the answer goes to stdout.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.theme import Theme

from topobus.contracts.codec import to_builtins
from topobus.domain.errors import PeerUnavailable, TopobusError

__all__ = ["DRAWING_WIDTH", "THEME", "Output", "error_console"]

# Drawings and tables are laid out for this many columns: two terminals side by side on a laptop, and GitHub's code view.
DRAWING_WIDTH = 100

THEME = Theme(
    {
        "ok": "green",
        "warn": "yellow",
        "fail": "bold red",
        "faint": "bright_black",
        "title": "bold",
        "name": "cyan",
    }
)


def _width() -> int | None:
    """Choose the width: the terminal's own on a terminal, else COLUMNS, else the width that drawings are made for."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return None
    return DRAWING_WIDTH


def error_console() -> Console:
    """Open stderr for people."""
    return Console(stderr=True, theme=THEME, highlight=False, soft_wrap=True)


class Output:
    """One command's output: human or JSON."""

    def __init__(self, *, is_json: bool = False, console: Console | None = None) -> None:
        self.is_json = is_json
        self.console = console or Console(theme=THEME, highlight=False, width=_width())
        self.errors = error_console()

    def show(self, *parts: RenderableType) -> None:
        """Print for people; silent in JSON mode."""
        if not self.is_json:
            for part in parts:
                self.console.print(part)

    def note(self, text: str) -> None:
        """Say something beside the answer, on stderr, in both modes."""
        self.errors.print(escape(text), style="faint")

    def document(self, value: object) -> None:
        """Print one JSON document, indented, with a stable order of keys."""
        print(msgspec.json.format(msgspec.json.encode(_plain(value), order="deterministic"), indent=2).decode(), flush=True)

    def line(self, value: object) -> None:
        """Print one JSON line of a stream."""
        print(msgspec.json.encode(_plain(value), order="deterministic").decode(), flush=True)

    def error(self, error: TopobusError) -> None:
        """Print an error: what went wrong, then the next step."""
        self.errors.print(f"[fail]error:[/fail] {escape(error.message)}")
        next_step = error.next_step or ("`topobus doctor` tells what is missing" if isinstance(error, PeerUnavailable) else "")
        if next_step:
            self.errors.print(f"  [name]next:[/name] {escape(next_step)}")


def _plain(value: object) -> Any:
    return to_builtins(value)
