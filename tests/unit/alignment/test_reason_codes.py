"""Every reason code that alignment, the ledger and the topology service can give stands in the reference."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "reasons.md"
# Where reasons are made: as `code="…"`, or through the small helpers that take the code first.
SOURCES = (ROOT / "shared" / "topobus" / "domain", ROOT / "services" / "topobus" / "topology")
MADE = re.compile(r'(?:code=|_fault\(\s*want,\s*|fault\(\s*|_reason\(\s*)"([a-z][a-z-]+)"(?: if [a-z_]+ else "([a-z-]+)")?')


def codes_in_use() -> set[str]:
    """All codes in the sources."""
    found: set[str] = set()
    for folder in SOURCES:
        for file in folder.rglob("*.py"):
            for match in MADE.finditer(file.read_text()):
                found |= {one for one in match.groups() if one}
    return found


def test_reason_codes_are_documented_when_in_use() -> None:
    """Who acts on a code can look it up: the page lists every code in use."""
    listed = {
        code for row in PAGE.read_text().splitlines() if row.startswith("| `") for code in re.findall(r"`([a-z-]+)`", row.split("|")[1])
    }

    assert sorted(codes_in_use() - listed) == []
