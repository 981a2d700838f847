"""The page that lists the stories of double hand-out names tests that exist."""

from __future__ import annotations

import re

from support.written_pages import ROOT, files_of_tests

PAGE = ROOT / "docs" / "explanation" / "double-hand-out.md"


def test_page_names_a_test_for_every_story_and_each_of_them_exists() -> None:
    """Whoever renames or drops a test of this kind must say so on the page."""
    # The tables of what was run under faults are no stories.
    stories = PAGE.read_text(encoding="utf-8").partition("\n## Proof by faults")[0]
    rows = [line for line in stories.splitlines() if line.startswith("| ") and not line.startswith("| story")]
    named = {row: re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2]) for row in rows}

    assert len(rows) > 20
    assert [row for row, names in named.items() if not names] == []
    assert sorted({name for names in named.values() for name in names} - files_of_tests().keys()) == []
