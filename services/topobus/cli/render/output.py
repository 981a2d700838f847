"""The output of `topobus`: rich text for people or JSON for programs on stdout, and errors in one
format on stderr.

Colour is used only on a terminal and never with NO_COLOR. Letters carry everything that colour
shows. Only the answer is written to stdout.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text
from rich.theme import Theme

from topobus.cli.render.ascii_lines import AsciiLines, ascii_text
from topobus.formats.messages.codec import to_builtins
from topobus.values.errors import PeerUnavailable, TopobusError

__all__ = [
    "DRAWING_WIDTH",
    "THEME",
    "Output",
    "TextOrJson",
    "adapt_streams",
    "answer_console",
    "error_console",
    "open_console",
]

TextOrJson = Annotated[Literal["text", "json"], Parameter(name=("--output", "-o"), help="How to print.")]
"""The option of commands that have no other forms."""

# Drawings and tables are laid out for this many columns: two terminals side by side on a
# laptop, and GitHub's code view.
DRAWING_WIDTH = 100

THEME = Theme(
    {
        "ok": "green",
        "warn": "yellow",
        "fail": "bold red",
        "faint": "dim",
        "title": "bold",
        "name": "cyan",
    }
)


def _in_ascii(err: UnicodeError) -> tuple[str, int]:
    """Write what an encoding lacks in ASCII. A handler for codecs."""
    assert isinstance(err, UnicodeEncodeError)
    return ascii_text(err.object[err.start : err.end]), err.end


codecs.register_error("topobus-ascii", _in_ascii)


def adapt_streams() -> None:
    """Make stdout and stderr write ASCII on a terminal that has only that, instead of failing, and
    nowhere where they are closed (`>&-`).
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the program
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _has_unicode(stream.encoding):
            stream.reconfigure(errors="topobus-ascii")


def _has_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf")


def _json(value: object) -> bytes:
    data = msgspec.json.encode(to_builtins(value), order="deterministic")
    # JSON is UTF-8. Where stdout is not, its escapes have the same meaning.
    return data if _has_unicode(sys.stdout.encoding) else json.dumps(json.loads(data), separators=(",", ":")).encode()


def _width() -> int | None:
    """Choose the width: the terminal's own on a terminal, else COLUMNS, else the width that
    drawings are made for.
    """
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return None
    return DRAWING_WIDTH


def open_console(**options: Any) -> Console:
    """Open a console that writes texts as they are: otherwise rich takes `:ab:` in a PCI address
    for an emoji.

    `options` are rich's.
    """
    return Console(theme=THEME, highlight=False, emoji=False, **options)


def answer_console(**options: Any) -> Console:
    """Open a console for what goes to stdout, now or later: laid out for the signs that stdout has.

    `options` are rich's.
    """
    console = open_console(**options)
    if not _has_unicode(sys.stdout.encoding):
        console.push_render_hook(AsciiLines())
    return console


def error_console() -> Console:
    """Open stderr for people."""
    return open_console(stderr=True, soft_wrap=True)


class Output:
    """One command's output: human or JSON."""

    def __init__(self, *, is_json: bool = False, console: Console | None = None) -> None:
        self.is_json = is_json
        self.console = console or answer_console(width=_width())
        self.errors = error_console()

    def show(self, *parts: RenderableType) -> None:
        """Print for people. Silent in JSON mode.

        Without a terminal no line ends with blanks: those only fill a table for the eye.
        """
        if self.is_json:
            return
        for part in parts:
            if self.console.is_terminal:
                self.console.print(part)
                continue
            with self.console.capture() as captured:
                self.console.print(part)
            self.console.file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines()))

    def show_line(self, text: Text) -> None:
        """Print one line for people, unbroken at any width: it is copied, or searched for."""
        if not self.is_json:
            self.console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note beside the answer, on stderr, in both modes."""
        self.errors.print(escape(text), style="faint")

    def document(self, value: object) -> None:
        """Print one JSON document for programs, indented, with a stable order of keys. Silent for
        people.
        """
        if self.is_json:
            print(msgspec.json.format(_json(value), indent=2).decode(), flush=True)

    def line(self, value: object) -> None:
        """Print one JSON line of a stream for programs. Silent for people."""
        if self.is_json:
            print(_json(value).decode(), flush=True)

    def error(self, error: TopobusError) -> None:
        """Print an error: what went wrong, then the next step."""
        self.errors.print(f"[fail]error:[/fail] {escape(error.message)}")
        next_step = error.next_step or (
            "`topobus doctor` reports what is missing" if isinstance(error, PeerUnavailable) else ""
        )
        if next_step:
            self.errors.print(f"  [name]next:[/name] {escape(next_step)}")
