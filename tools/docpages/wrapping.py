"""Wraps the prose of a page, so that it reads well as text: in a terminal, a diff, an editor. Pure.

What the page renders to does not change.

Flows in: a page of Markdown. Flows out: the same page, in which no line of prose is longer than
`WIDTH`, where blanks permit. Left alone are code blocks, tables, headings, HTML, and paragraphs
without a line that is too long, so that a change of one sentence moves one paragraph.
"""

from __future__ import annotations

import re

__all__ = ["WIDTH", "prose_lines", "wrap_page"]

WIDTH = 100
_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])(\s+)\S")
# Lines that are no prose: tables, headings, HTML, rules, definitions of links.
_OTHER = re.compile(r"\s*(\||#{1,6} |<|(---+|===+|\*\*\*+)\s*$|\[[^\]]+\]:)")
# A word that would begin a list, a quotation, a heading or a table were it first on its line.
_MARKER = re.compile(r"([-*+>|]+|#{1,6}|\d+[.)]|=+|[-=|:]{2,})")
# Blanks within code are part of it.
_WORD = re.compile(r"(?:`[^`]*`|``.*?``|\S)+")


def wrap_page(text: str, width: int = WIDTH) -> str:
    r"""Wrap a page.

    >>> wrap_page("- one two three", width=9)
    '- one two\\n  three\\n'
    """
    done: list[str] = []
    block: list[str] = []
    is_code = False
    for line in text.splitlines():
        if _FENCE.match(line):
            done += _wrapped(block, width)
            block = []
            is_code = not is_code
            done.append(line)
        elif (
            is_code
            or not line.strip()
            or _OTHER.match(line)
            or (not block and line.startswith("    ") and not (done and done[-1].strip()))
        ):
            done += _wrapped(block, width)
            block = []
            done.append(line)
        else:
            bare = line.removeprefix("> ") if line.startswith("> ") else line
            if block and (_ITEM.match(bare) or line.startswith(">") != block[0].startswith(">")):
                done += _wrapped(block, width)
                block = []
            block.append(line)
    return "".join(f"{line}\n" for line in (*done, *_wrapped(block, width)))


def _wrapped(block: list[str], width: int) -> list[str]:
    """Wrap one paragraph or list item, if it has a line that is too long."""
    if not any(len(line) > width for line in block) or any(line.endswith(("  ", "\\")) for line in block):
        return block
    quote = "> " if block[0].startswith("> ") else ""
    lines = [line.removeprefix(">").removeprefix(" ") if quote else line for line in block]
    if quote and any(not line.strip() or _OTHER.match(line) for line in lines):
        return block
    item = _ITEM.match(lines[0])
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    first = quote + (f"{item[1]}{item[2]}{item[3]}" if item else indent)
    rest = quote + (" " * (len(first) - len(quote)) if item else indent)
    text = " ".join(line.strip() for line in lines)
    words: list[str] = []
    for word in _WORD.findall(text[len(item[2]) :] if item else text):
        if words and _MARKER.fullmatch(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    wrapped = [first + words[0]]
    for word in words[1:]:
        if len(wrapped[-1]) + 1 + len(word) > width:
            wrapped.append(rest + word)
        else:
            wrapped[-1] += f" {word}"
    return wrapped


def prose_lines(text: str) -> list[tuple[int, str]]:
    """List the lines of prose with their numbers; code, tables, headings and HTML are none."""
    lines: list[tuple[int, str]] = []
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and not _OTHER.match(line):
            lines.append((number, line))
    return lines
