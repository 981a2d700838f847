"""The knowledge pages: what code cites stands there, and what they say of code and tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_KNOWLEDGE = ROOT / "docs" / "knowledge"
_MERGE = _KNOWLEDGE / "topology-merge.md"
_SOURCES = sorted(
    path for folder in ("shared", "services", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")
)
_REFERENCE = re.compile(r"docs/knowledge/([\w.-]+\.md)(?:#([\w-]+))?")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#{1,6} (.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _references() -> list[tuple[str, str, str]]:
    """Give file, page and anchor of each citation in the code."""
    return [
        (str(source.relative_to(ROOT)), page, anchor)
        for source in _SOURCES
        for page, anchor in _REFERENCE.findall(source.read_text(encoding="utf-8"))
    ]


def test_knowledge_has_what_code_cites() -> None:
    """Each page and heading of docs/knowledge that a source file names exists."""
    references = _references()
    pages = {path.name: _anchors(path) for path in _KNOWLEDGE.glob("*.md")}

    lost = [
        (source, page, anchor)
        for source, page, anchor in references
        if page not in pages or (anchor and anchor not in pages[page])
    ]

    assert references
    assert lost == []


def test_code_cites_no_note_outside_the_repository() -> None:
    """Nobody is sent to a note, a lemma or a theorem without the page that holds it."""
    vague = re.compile(r"knowledge note|\b(?:lemma|theorem) [A-Z0-9]\b", re.IGNORECASE)
    sources = [path for path in _SOURCES if path != Path(__file__).resolve()]

    assert [str(path.relative_to(ROOT)) for path in sources if vague.search(path.read_text(encoding="utf-8"))] == []


def test_merge_page_states_nothing_that_no_code_relies_on() -> None:
    """Each theorem, lemma and phase of the merge is cited by the code that needs it."""
    stated = {anchor for anchor in _anchors(_MERGE) if re.match(r"theorem|lemma|phase", anchor)}

    assert stated == {
        anchor for source, page, anchor in _references() if page == _MERGE.name and not source.startswith("tests/")
    }


@pytest.mark.parametrize("page", sorted(_KNOWLEDGE.glob("*.md")), ids=lambda page: page.stem)
def test_knowledge_names_tests_that_exist(page: Path) -> None:
    """A test that a page names as its proof is there."""
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }

    assert named <= defined


def test_merge_page_names_code_that_exists() -> None:
    """Each `module.name` or `Class.name` of the page's "Code:" lines is defined in the alignment
    room.
    """
    text = _MERGE.read_text(encoding="utf-8")
    named = {
        name
        for line in re.findall(r"^Code: (.+?)$", text, re.MULTILINE)
        for name in re.findall(r"`(\w+\.[\w.]+)`", line)
    }
    room = {
        path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "shared/topobus/engine/alignment").rglob("*.py")
    }
    source = "\n".join(room.values())

    def is_defined(name: str) -> bool:
        owner, *members = name.split(".")
        defined = all(re.search(rf"(?:def|class) {member}\b|^ *{member}: ", source, re.MULTILINE) for member in members)
        return defined and (owner in room or f"class {owner}" in source)

    lost = [name for name in named if not is_defined(name)]

    assert len(named) >= 10
    assert lost == []
