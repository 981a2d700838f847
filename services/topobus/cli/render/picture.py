"""Terminal output as an SVG picture, for documentation: the same text and colours, and nothing
fetched from anywhere.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from topobus.cli.exits import InputError
from topobus.cli.render.output import DRAWING_WIDTH, open_console

__all__ = ["recording_console", "save_picture"]

# rich's own picture loads a font from a content network. Any monospaced font of the reader's works,
# since every run of text has its length set.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "ui-monospace, Menlo, Consolas"
)


def recording_console(width: int = DRAWING_WIDTH) -> Console:
    """Make a console that only records."""
    return open_console(record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")


def save_picture(console: Console, path: Path, *, title: str) -> None:
    """Write what was recorded.

    Errors: raises InputError when the file cannot be written.
    """
    picture = console.export_svg(title=title, code_format=_FORMAT, unique_id=re.sub(r"[^a-z]", "-", path.stem.lower()))
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as err:
        raise InputError(
            f"cannot write {path}: {err.strerror}", next_step="choose a file in a folder that exists"
        ) from err
