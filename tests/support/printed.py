"""What a terminal without colours would show."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from topobus.cli.render.output import THEME

__all__ = ["printed"]


def printed(part: RenderableType, width: int = 100) -> str:
    """Print a part of a command's answer, and return the text."""
    written = io.StringIO()
    Console(file=written, theme=THEME, width=width, color_system=None).print(part)
    return written.getvalue()
