"""The written pages: links lead somewhere, command lines are ones the program takes, and no page is
lost.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest
from cyclopts import CycloptsError

from support.written_pages import PAGES, ROOT
from topobus.cli.application import application
from topobus.cli.command_words import with_options_behind

_DOCS = ROOT / "docs"
# `[text](target)`, `![text](target)`, with an optional title; not in code spans.
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^\$ (?:[A-Z][A-Z0-9_]*=\S+ )*(topobus(?: .*)?)$")
# A file of the project on a command line; `kubectl` says deploy/NAME for a Deployment.
_FILE = re.compile(r"(?<=[\s=])(?:deploy|docs|examples|proto|requirements|services|shared|tests|tools)/[\w./-]+")


def _links(page: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]+`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in _LINK.findall(prose) if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def _target(page: Path, link: str) -> Path:
    return (page.parent / unquote(link.partition("#")[0])).resolve() if link.partition("#")[0] else page


def _anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+?)\s*$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _typed_lines(page: Path) -> list[str]:
    """Give the lines of console blocks that a reader would type: those behind a prompt."""
    text = page.read_text(encoding="utf-8")
    lines = [line for _, kind, body in _FENCE.findall(text) if kind == "console" for line in body.splitlines()]
    return [line for line in lines if line.startswith("$ ")]


def _command_lines(page: Path) -> list[str]:
    """Give the `topobus …` lines among them."""
    return [match.group(1) for line in _typed_lines(page) if (match := _PROMPT.match(line))]


def _arguments(line: str) -> list[str]:
    """Give the arguments of the program itself: no comment, no redirection, no pipe, no `&`."""
    words = shlex.split(line, comments=True)[1:]
    ends = [
        index
        for index, word in enumerate(words)
        if word in ("|", "&", "&&", ">", ">>", ";") or word.startswith(("2>", ">"))
    ]
    return words[: ends[0]] if ends else words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_somewhere(page: Path) -> None:
    """Each relative link and picture of a page names a file, a folder or a heading that exists."""
    lost = [link for link in _links(page) if not _target(page, link).exists()]
    lost += [
        link
        for link in _links(page)
        if "#" in link
        and (target := _target(page, link)).suffix == ".md"
        and target.exists()
        and link.partition("#")[2] not in _anchors(target)
    ]

    assert lost == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _command_lines(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_commands_are_taken_by_the_program(page: Path) -> None:
    """Each `topobus …` line of a console block parses: the command
    exists, and so do its options.
    """
    refused = {}
    for line in _command_lines(page):
        arguments = _arguments(line)
        if arguments in (["--version"], ["--help"], []):
            continue
        try:
            application().parse_args(with_options_behind(arguments), exit_on_error=False, print_error=False)
        except CycloptsError as err:
            refused[line] = str(err)

    assert refused == {}


def test_page_commands_name_files_that_exist() -> None:
    """Whoever copies a command into a checkout finds the manifest or the configuration that it
    reads.
    """
    named = [
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for line in _typed_lines(page)
        if not re.search(r"\bkubectl .*\b(?:logs|rollout|exec|scale)\b", line)
        for name in _FILE.findall(line)
    ]

    assert named
    assert [(page, name) for page, name in named if not (ROOT / name).exists()] == []


def test_every_page_is_reached_from_the_index_or_the_readme() -> None:
    """Whoever begins at docs/index.md or README.md can click through to every file below docs.

    A link to a folder reaches all in it.
    """
    reached: set[Path] = set()
    waiting = [_DOCS / "index.md", ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        if page.is_dir():
            waiting += [path for path in page.iterdir() if path.is_file()]
        elif page.suffix == ".md":
            waiting += [_target(page, link) for link in _links(page)]

    lost = [str(path.relative_to(ROOT)) for path in sorted(_DOCS.rglob("*")) if path.is_file() and path not in reached]

    assert lost == []
