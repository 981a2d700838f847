"""Names in the code: a variable says what it holds."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# They say how many things there are, or how they were come by, never which they are.
_VAGUE = frozenset({"one", "two", "found", "told", "known", "mine", "theirs"})
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
    for node in ast.walk(ast.parse(source)):
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


def test_vague_names_finds_each_kind_of_binding_when_a_source_has_them() -> None:
    """The check sees comprehensions, lambdas, parameters, inner functions and captures of `match`,
    and ignores fields and what is only read or called.
    """
    source = (
        "a = [one for one in b]\nc = lambda two: two\ndef d(one): ...\ndef one(): ...\nmatch e:\n    case [1, "
        "two]: ...\nf(one=1)\nclass G:\n    one: str"
    )

    names = _vague_names(source)

    assert names == ["one at line 1", "two at line 2", "one at line 3", "one at line 4", "two at line 6"]
