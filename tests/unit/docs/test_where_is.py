"""CONTRIBUTING answers where a thing is done: the files are there, and
what to read stands in them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_SHORT = {
    "engine/": "shared/topobus/engine/",
    "controller/": "services/topobus/controller/",
    "gateway/": "services/topobus/gateway/",
}


def _answers() -> list[tuple[str, str, str]]:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where is")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| …")
    ]
    return [(question, files, symbols) for question, files, symbols in rows]


def _path(name: str) -> Path:
    for short, long in _SHORT.items():
        if name.startswith(short):
            return ROOT / long / name.removeprefix(short)
    return ROOT / name


def test_questions_are_answered_when_somebody_asks_where_a_claim_is_worked_on() -> None:
    """The questions for which a reader used to open several files are all there."""
    questions = " ".join(question for question, _, _ in _answers())

    assert all(word in questions for word in ("template", "allocated", "deallocated", "bound", "tainted"))


@pytest.mark.parametrize(("question", "files", "symbols"), _answers(), ids=lambda text: text[:40])
def test_answer_names_files_that_are_there(question: str, files: str, symbols: str) -> None:
    """Every file that an answer names exists, and every name to read there is defined in one of the
    controller's or the shared rooms.
    """
    paths = [_path(name) for name in re.findall(r"`([^`]+\.py)`", files + symbols)]
    names = [name.rpartition(".")[2] for name in re.findall(r"`([A-Za-z_.]+)`", symbols) if not name.endswith(".py")]

    assert paths, question
    assert [path for path in paths if not path.is_file()] == []
    store = sorted((ROOT / "services/topobus/controller/store").glob("*.py"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (*paths, *store))
    assert [
        name for name in names if not re.search(rf"^\s*(class|async def|def) {name}\b|^{name} =", source, re.MULTILINE)
    ] == []
