"""Names in the code: a variable says what it holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# They say how many things there are, or how they were come by, never which they are.
_VAGUE = frozenset({"one", "two", "found", "told", "known", "mine", "theirs"})
_WORDS = "|".join(sorted(_VAGUE))
# What may follow where a name is bound. Few files have it, and parsing all takes seconds.
_BOUND = re.compile(
    rf"\bdef\s+(?:{_WORDS})\b|\b(?:{_WORDS})\b(?=\s*(?:[=:,)\]}}|+\-*/;\\#]|in\b|if\b|$))", re.MULTILINE
)
_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("services", "shared", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def _vague_names(source: str) -> list[str]:
    """Give each binding of a vague name as `name at line N`: variables, parameters, functions,
    imports, captures of `match`.

    A class's fields are left out: those of messages and settings are the
    names that users read and write.
    """
    fields: set[ast.expr] = set()
    places: list[tuple[int, str]] = []
    # A class comes before what stands in it.
    for node in ast.walk(ast.parse(source)) if _BOUND.search(source) else ():
        if isinstance(node, ast.ClassDef):
            fields.update(statement.target for statement in node.body if isinstance(statement, ast.AnnAssign))
        if node in fields:
            continue
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                places.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
                places.append((node.lineno, name))
            case ast.alias(name=name, asname=alias):
                places.append((node.lineno, alias or name))
            case _:
                pass
    return [f"{name} at line {line}" for line, name in sorted(places) if name in _VAGUE]


def test_files_have_no_vague_name_when_they_are_written_by_hand() -> None:
    """A loop variable, local or parameter is called claim, device or node: not `one`."""
    names = {file: _vague_names((ROOT / file).read_text(encoding="utf-8")) for file in _FILES}

    vague = {file: places for file, places in names.items() if places}

    assert vague == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a = [one for one in b]", ["one"]),
        ("c = lambda two: two", ["two"]),
        ("def d(found): ...", ["found"]),
        ("def told(): ...", ["told"]),
        ("match e:\n    case [1, known]: ...", ["known"]),
        ("match e:\n    case [*mine]: ...", ["mine"]),
        ("match e:\n    case f() as theirs if f: ...", ["theirs"]),
        ("for one, two in a: ...", ["one", "two"]),
        ("with a as found: ...", ["found"]),
        ("from a import b as told", ["told"]),
        ("try: ...\nexcept E as known: ...", ["known"]),
        ("if (mine := a): ...", ["mine"]),
        ("theirs: int = 1", ["theirs"]),
        ("f(one=1)\ng(one)\na.one = one.b\nclass G:\n    one: str", []),
    ],
)
def test_vague_names_finds_each_kind_of_binding_when_a_source_has_it(source: str, names: list[str]) -> None:
    """The check ignores fields and what is only read or called."""
    assert [place.partition(" ")[0] for place in _vague_names(source)] == names
