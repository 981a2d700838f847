"""Pages read well as text: prose is wrapped, and a table whose rows are too long for that is a
list.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from docpages.wrapping import WIDTH, prose_lines, wrap_page

ROOT = Path(__file__).resolve().parents[3]
# Wider than the prose, for cells cannot be wrapped; as wide as a terminal over a whole screen.
_TABLE_WIDTH = 200
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# Tables of these rooms may have longer rows: what a reader looks up is in one row.
PROSE = [
    ROOT / "CONTRIBUTING.md",
    *PAGES,
    *(
        page
        for room in ("adr", "explanation", "knowledge", "reference")
        for page in sorted((ROOT / "docs" / room).glob("*.md"))
    ),
]


def _is_breakable(line: str) -> bool:
    """Say whether a line could be shorter: it has a blank that is not in code."""
    return len(wrap_page(f"{line}\n").splitlines()) > 1


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_line_of_prose_that_is_too_long(page: Path) -> None:
    """No line of prose in README, CONTRIBUTING, pages or examples has more than 100 columns;
    `tools/wrap-docs PAGE` wraps one that has.
    """
    long_lines = [
        f"{page.name}:{number}"
        for number, line in prose_lines(page.read_text(encoding="utf-8"))
        if len(line) > WIDTH and _is_breakable(line)
    ]

    assert long_lines == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_row_of_a_table_that_is_too_long(page: Path) -> None:
    """A row of over 200 columns is unreadable in a terminal and a diff: such a table is a list, or
    its cells are shorter.
    """
    long_rows = [
        f"{page.name}:{number}"
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if line.startswith("|") and len(line) > _TABLE_WIDTH
    ]

    assert long_rows == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one two three\n", "one two\nthree\n"),
        ("short\nlines\nstay\n", "short\nlines\nstay\n"),
        ("- one two three\n- four\n", "- one two\n  three\n- four\n"),
        ("  12. one two three\n", "  12. one\n      two\n      three\n"),
        ("> one two three\n> four\n", "> one two\n> three\n> four\n"),
        ("a `b c d e f` g\n", "a\n`b c d e f`\ng\n"),
        ("| a table that is wide |\n", "| a table that is wide |\n"),
        ("# A heading that is wide\n", "# A heading that is wide\n"),
        ("```\ncode that is wide\n```\n", "```\ncode that is wide\n```\n"),
        ("one two three - four\n", "one two\nthree -\nfour\n"),
        ("a hard break here  \nnext\n", "a hard break here  \nnext\n"),
        ("[a b]: https://e.org/x\n", "[a b]: https://e.org/x\n"),
        ("unbreakablewordoflength\n", "unbreakablewordoflength\n"),
    ],
)
def test_wrapping_changes_long_paragraphs_alone(before: str, after: str) -> None:
    """Paragraphs, items and quotations are wrapped.

    What renders otherwise when it is broken stays as it is.
    """
    assert wrap_page(before, width=9) == after
    assert wrap_page(after, width=9) == after
