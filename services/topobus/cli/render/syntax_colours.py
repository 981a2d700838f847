"""Colours of YAML and JSON on a terminal: the terminal's own, so that they are readable on any
background.
"""

from __future__ import annotations

from pygments.token import Comment, Keyword, Literal, Name, Token  # type: ignore[import-untyped]  # its stubs are not among our dependencies
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax

__all__ = ["coloured"]

_THEME = ANSISyntaxTheme(
    {
        Token: Style(),
        Comment: Style(dim=True),
        Keyword: Style(color="blue"),
        Name.Tag: Style(color="cyan"),
        Literal.String: Style(color="green"),
        Literal.Number: Style(color="magenta"),
    }
)


def coloured(text: str, language: str) -> Syntax:
    """Colour a text of a language that pygments knows."""
    return Syntax(text, language, theme=_THEME, background_color="default", word_wrap=True)
