"""The pages that a platform team checks before production: each test and alert that they name
exists, each claim of the failures page names a test, and together they stay short.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.written_pages import ROOT, files_of_tests

_PAGES = tuple(
    ROOT / name
    for name in (
        "SECURITY.md",
        "docs/explanation/threat-model.md",
        "docs/how-to/backup-and-restore.md",
        "docs/how-to/migrate.md",
        "docs/how-to/plan-capacity.md",
        "docs/how-to/run-in-production.md",
        "docs/how-to/service-levels.md",
        "docs/how-to/turn-it-off.md",
        "docs/reference/failures.md",
        "docs/reference/runbooks.md",
        "docs/reference/stability.md",
    )
)
_MOST_WORDS = 6000


def test_tests_that_the_pages_name_exist() -> None:
    """Whoever renames or drops such a test must say so on the page."""
    named = {name for page in _PAGES for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}

    assert len(named) > 50
    assert sorted(named - files_of_tests().keys()) == []


def test_alerts_that_the_pages_name_exist() -> None:
    """An operator finds by its name what is said to be seen."""
    alerts = set(re.findall(r"alert: (\w+)", (ROOT / "deploy/monitoring/alerts.yaml").read_text(encoding="utf-8")))
    named = {name for page in _PAGES for name in re.findall(r"`(Topobus[A-Z]\w+)`", page.read_text(encoding="utf-8"))}

    assert named
    assert sorted(named - alerts) == []


def test_each_failure_names_a_test() -> None:
    """Nothing is said on that page that was not tried."""
    text = (ROOT / "docs/reference/failures.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 15
    assert [row for row in rows if "`test_" not in row.rpartition(" | ")[2]] == []


def test_pages_together_are_read_in_half_an_hour() -> None:
    """Who runs the project in production reads all of them: fewer than 6,000 words, signs of tables
    not counted.
    """
    words = [word for page in _PAGES for word in page.read_text(encoding="utf-8").split()]

    assert sum(re.search(r"\w", word) is not None for word in words) < _MOST_WORDS


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_page_is_reached_from_the_one_place(page: Path) -> None:
    """The lead page links to each of them."""
    lead = ROOT / "docs/how-to/run-in-production.md"
    targets = {
        (lead.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", lead.read_text(encoding="utf-8"))
    }

    assert page in targets | {lead}
