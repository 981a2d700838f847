"""The page that lists the stories of double hand-out names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "double-hand-out.md"


def _tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_page_names_a_test_for_every_story_and_each_of_them_exists() -> None:
    """Whoever renames or drops a test of this kind must say so on the page."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and not line.startswith("| story")]
    named = {row: re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2]) for row in rows}
    tests = _tests()

    assert len(rows) > 20
    assert [row for row, names in named.items() if not names] == []
    assert sorted({name for names in named.values() for name in names} - tests) == []
