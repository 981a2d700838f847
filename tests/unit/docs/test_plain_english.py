"""Docstrings, comments and pages are free of the constructions that made this house hard to read.

The list is short on purpose: a net that holds what was reached, not a measure of good prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.written_pages import PAGES, ROOT

_ROOMS = ("shared/topobus", "services/topobus", "tools/lab", "tests/support", "examples")
_CONSTRUCTIONS = re.compile(
    r"\b(?:[Nn]obody|anew|of before|for ever|has spoken|lets? go|letting go|keeps? back|kept back|puts? right|mended"
    r"|shall)\b|'s word\b|, too\b"
)
# Names, quotations and code are no prose.
_NO_PROSE = re.compile(r"`[^`]*`|\"[^\"]*\"|^ *>>> .*$", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Read the docstrings and comments of a module, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _found(text: str) -> list[str]:
    return _CONSTRUCTIONS.findall(" ".join(_NO_PROSE.sub(" ", text).split()))


@pytest.mark.parametrize("room", _ROOMS)
def test_docstrings_and_comments_have_none_of_the_constructions(room: str) -> None:
    """Say what does what, and why: `another process`, `again`, `always`, `release`, `withhold`, `repair`."""
    places = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, text in _prose(path)
        if (words := _found(text))
    ]

    assert places == []


def test_pages_have_none_of_the_constructions() -> None:
    """The same for what is written, and for what is generated from the code."""
    places = [
        f"{page.relative_to(ROOT)}: {words}"
        for page in PAGES
        if (words := _found(_FENCE.sub(" ", page.read_text(encoding="utf-8"))))
    ]

    assert places == []
