"""docs/reference/reasons.md and the source say the same: a code that anybody can be given is listed,
and none is listed that nobody gives.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "reasons.md"
CODE = re.compile(r"[a-z0-9]+(-([a-z0-9]+|\*))*")
# An error that makes a Reason has its code as an attribute of its class.
_CODE_OF_A_CLASS = re.compile(r'^    code = "([^"]+)"$', re.MULTILINE)


def listed_codes() -> set[str]:
    """The codes of the page, those with a `*` as they are written.

    An item names its codes before the first colon, a remark on them in brackets.
    """
    items = re.findall(r"^- (.*?): ", PAGE.read_text(encoding="utf-8").replace("\n  ", " "), re.MULTILINE)
    return {code for item in items for code in re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)", "", item))}


def modules() -> dict[Path, str]:
    """The source of all our modules that can make a Reason.

    Generated code and the test kit make none for users.
    """
    return {
        path: path.read_text(encoding="utf-8")
        for room in ("shared", "services")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not {"kubeletpb", "testing"} & set(path.parts)
    }


def name_of(call: ast.Call) -> str:
    """The bare name of what is called."""
    return (
        call.func.id
        if isinstance(call.func, ast.Name)
        else call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ""
    )


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """The argument that stands at a position or under a keyword."""
    named = next((other_keyword.value for other_keyword in call.keywords if other_keyword.arg == keyword), None)
    return named if named is not None else call.args[position] if 0 <= position < len(call.args) else None


def texts(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> Iterator[str | None]:
    """The texts that an expression can be; None for what only running tells."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body, assigned)
        yield from texts(node.orelse, assigned)
    elif isinstance(node, ast.JoinedStr):
        # Put together of a fixed and a telling part: the page says
        # `pool-*` and what may stand there.
        yield "".join(
            str(expression.value) if isinstance(expression, ast.Constant) else "*" for expression in node.values
        )
    elif isinstance(node, ast.Attribute) and node.attr == "code":
        # Handed on from another Reason, which was made somewhere, too.
        return
    elif isinstance(node, ast.Name) and node.id in assigned:
        for value in assigned[node.id]:
            yield from texts(value, {key: values for key, values in assigned.items() if key != node.id})
    else:
        yield None


def assignments(function: ast.AST) -> dict[str, list[ast.expr]]:
    """Names that are set to something in a function, loops over pairs of constants included."""
    expressions: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
            pairs = [(node.target, value) for value in node.iter.elts]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                expressions.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for expression, inner in zip(target.elts, value.elts, strict=False):
                    if isinstance(expression, ast.Name):
                        expressions.setdefault(expression.id, []).append(inner)
    return expressions


@dataclass(frozen=True)
class Source:
    """What a module defines, calls and imports."""

    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    calls: tuple[tuple[str, ast.Call], ...]
    """With the bare name of what is called."""
    imports: frozenset[tuple[str | None, str]]
    """Each name from another module, with that module."""


def read(text: str) -> Source:
    """Read one module."""
    nodes = tuple(ast.walk(ast.parse(text)))
    return Source(
        functions=tuple(node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)),
        calls=tuple((name_of(node), node) for node in nodes if isinstance(node, ast.Call)),
        imports=frozenset(
            (node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        ),
    )


@cache
def codes_in_source() -> dict[str, set[str]]:
    """Every code that a Reason is made with, and where.

    Helpers that take a code are followed to their callers.
    """
    text_of = modules()
    # Three of four modules call nothing that makes a Reason, and are not parsed.
    sources: dict[Path, Source] = {}
    # A helper's name may be another helper's in another module, so helpers are known by both.
    makers: dict[tuple[str, Path | None], tuple[int, str]] = {("Reason", None): (-1, "code")}
    codes: dict[str, set[str]] = {}
    seen: set[tuple[str, Path | None]] = set()
    while makers.keys() - seen:
        maker, home = key = min(makers.keys() - seen, key=str)
        seen.add(key)
        position, keyword = makers[key]
        module = ".".join(home.relative_to(ROOT).with_suffix("").parts[1:]) if home is not None else ""
        for path, text in text_of.items():
            if f"{maker}(" not in text:
                continue
            source = sources[path] = sources.get(path) or read(text)
            if home not in (None, path) and (module, maker) not in source.imports:
                continue
            for call in (call for called, call in source.calls if called == maker):
                value = argument(call, position, keyword)
                # The innermost function around the call: its parameters make it a helper, its
                # assignments say what a name can be.
                around = [
                    function
                    for function in source.functions
                    if function.lineno <= call.lineno <= (function.end_lineno or 0)
                ]
                inner = max(around, key=lambda function: function.lineno, default=None)
                if value is None or inner is None:
                    continue
                parameters = [arg.arg for arg in (*inner.args.posonlyargs, *inner.args.args)]
                if isinstance(value, ast.Name) and value.id in (
                    *parameters,
                    *(arg.arg for arg in inner.args.kwonlyargs),
                ):
                    place = parameters.index(value.id) if value.id in parameters else -1
                    # A public method is called wherever its object goes, a private one only here, a
                    # function of the module also where it is imported.
                    is_method = parameters[:1] == ["self"]
                    home_of_helper = None if is_method and not inner.name.startswith("_") else path
                    makers[inner.name, home_of_helper] = (place - is_method if place >= 0 else -1, value.id)
                    continue
                expressions = assignments(inner)
                for code in texts(value, expressions):
                    where = f"{path.relative_to(ROOT)}:{call.lineno}"
                    codes.setdefault(code if code is not None else f"<{ast.unparse(value)}>", set()).add(where)
    for path, text in text_of.items():
        for code in _CODE_OF_A_CLASS.findall(text):
            codes.setdefault(code, set()).add(str(path.relative_to(ROOT)))
    return codes


def test_reason_codes_can_all_be_read_from_the_source() -> None:
    """No code is put together at run time: then nobody could list them."""
    unknown = {code: sorted(where) for code, where in codes_in_source().items() if not CODE.fullmatch(code)}

    assert unknown == {}


def test_reason_codes_are_on_the_page_when_the_source_gives_them() -> None:
    """Whoever gets a code finds it on the page."""
    listed = listed_codes()

    missing = {
        code: sorted(where) for code, where in codes_in_source().items() if CODE.fullmatch(code) and code not in listed
    }

    assert missing == {}


def test_reason_codes_are_given_somewhere_when_they_are_on_the_page() -> None:
    """The page explains nothing that nobody gives."""
    assert listed_codes() - codes_in_source().keys() == set()


def test_reason_codes_are_followed_through_helpers() -> None:
    """The reader of the source is worth its name: it finds codes that
    only a helper's caller names.
    """
    codes = codes_in_source()

    assert {
        "not-enough-devices",
        "count-zero",
        "policy-forbidden",
        "gave-up",
        "locality-missed",
        "no-reservation",
    } <= codes.keys()
