"""Evaluates the JSONPath templates that kubectl's users write, a strict subset of them: what is not understood is refused and never guessed.

Flows in: a template and a document of plain values. Flows out: text. Pure. Understood are `{.a.b}`, `['a.b']`, `[0]`, `[-1]`, `[1:3]`, `[*]`, `.*`, `..name`,
filters `[?(@.a.b=="text")]` with == != < <= > >= or for presence alone, `{range PATH}…{end}`, texts in quotes, and `@` and `$`.
Several results are joined by a blank, and lists and objects are written as JSON, as kubectl does.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from topobus.cli.exits import UsageError

__all__ = ["JsonPath", "read_path"]

_NEXT = "docs/reference/cli.md lists what of kubectl's JSONPath is understood; -o json has everything, for jq"
_STEP = re.compile(
    r"""\.\.(?P<deep>[\w-]+)|\.(?P<name>[\w-]+)|\.(?P<star>\*)|\[(?P<all>\*)\]|\[(?P<start>-?\d*):(?P<stop>-?\d*)\]|\[(?P<index>-?\d+)\]"""
    r"""|\[(?P<quote>['"])(?P<quoted>(?:(?!(?P=quote)).)*)(?P=quote)\]|\[\?\((?P<filter>(?:[^()'"]|'[^']*'|"[^"]*")*)\)\]"""
)
_FILTER = re.compile(r"""\s*@(?P<path>[^=!<>\s]*)\s*(?:(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>'[^']*'|"[^"]*"|-?[\w.]+))?\s*""")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS = {"true": True, "false": False, "null": None}

Step = Callable[[Any], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class JsonPath:
    """A template: texts, paths and ranges, in their order."""

    parts: tuple[str | tuple[Step, ...] | _Range, ...]

    @classmethod
    def read(cls, template: str) -> JsonPath:
        r"""Read a template; a path may stand without braces.

        >>> JsonPath.read("{range .items[*]}{.name}{'\\n'}{end}").text({"items": [{"name": "a"}, {"name": "b"}]})
        'a\nb\n'
        >>> JsonPath.read(".items[?(@.n>1)].name").text({"items": [{"name": "a", "n": 1}, {"name": "b", "n": 2}]})
        'b'

        Errors: raises UsageError for what is not understood.
        """
        whole = template if "{" in template else f"{{{template}}}"
        parts, rest = _parts(list(_tokens(whole)), is_inside=False)
        assert not rest
        return cls(parts=parts)

    def text(self, document: Any) -> str:
        """Evaluate for a document."""
        return _text(self.parts, document, document)


@dataclass(frozen=True, kw_only=True)
class _Range:
    over: tuple[Step, ...]
    parts: tuple[str | tuple[Step, ...] | _Range, ...]


def read_path(text: str) -> Callable[[Any], list[Any]]:
    """Read one path, with or without braces and leading dot, and give what finds its values.

    >>> read_path("{.metadata.name}")({"metadata": {"name": "a"}}), read_path("metadata.name")({})
    (['a'], [])
    """
    path = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    steps = _steps(path if path.startswith((".", "$", "@", "[")) else f".{path}")
    return lambda document: _values(steps, document)


def _tokens(template: str) -> Iterator[tuple[bool, str]]:
    """Take texts and the insides of braces apart; quotes may hold braces."""
    place = 0
    for match in re.finditer(r"""\{((?:[^{}'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")*)\}""", template):
        if match.start() > place:
            yield False, _plain(template[place : match.start()], template)
        yield True, match[1].strip()
        place = match.end()
    if place < len(template):
        yield False, _plain(template[place:], template)


def _plain(text: str, template: str) -> str:
    if "{" in text or "}" in text:
        raise _refused(template, "a brace is not closed")
    return text


def _parts(
    tokens: list[tuple[bool, str]], *, is_inside: bool
) -> tuple[tuple[str | tuple[Step, ...] | _Range, ...], list[tuple[bool, str]]]:
    parts: list[str | tuple[Step, ...] | _Range] = []
    while tokens:
        is_code, text = tokens.pop(0)
        if not is_code:
            parts.append(text)
        elif text == "end":
            if not is_inside:
                raise _refused("{end}", "there is no range that it ends")
            return tuple(parts), tokens
        elif text.startswith("range ") or text == "range":
            inner, tokens = _parts(tokens, is_inside=True)
            parts.append(_Range(over=_steps(text[5:].strip()), parts=inner))
        elif text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
            parts.append(re.sub(r"\\(.)", lambda sign: {"n": "\n", "t": "\t"}.get(sign[1], sign[1]), text[1:-1]))
        else:
            parts.append(_steps(text))
    if is_inside:
        raise _refused("{range}", "it has no {end}")
    return tuple(parts), []


def _steps(text: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    rest = text[1:] if text[:1] in ("@", "$") else text
    if not text:
        raise _refused(text, "it is empty")
    place = 0
    while place < len(rest):
        match = _STEP.match(rest, place) if rest != "." else None
        if match is None:
            if rest == ".":
                break
            raise _refused(text, f"it is not understood at {rest[place:]!r}")
        steps.append(_step(match))
        place = match.end()
    return tuple(steps)


def _step(match: re.Match[str]) -> Step:
    groups = match.groupdict()
    name = groups["name"] if groups["name"] is not None else groups["quoted"]
    if name is not None:
        return lambda value: [value[name]] if isinstance(value, dict) and name in value else []
    if groups["deep"] is not None:
        return lambda value: _deep(value, groups["deep"])
    if groups["index"] is not None:
        index = int(groups["index"])
        return lambda value: [value[index]] if isinstance(value, (list, tuple)) and -len(value) <= index < len(value) else []
    if groups["start"] is not None:
        cut = slice(*(int(groups[end]) if groups[end] else None for end in ("start", "stop")))
        return lambda value: value[cut] if isinstance(value, (list, tuple)) else []
    if groups["filter"] is not None:
        holds = _filter(groups["filter"])
        return lambda value: [item for item in _children(value) if holds(item)]
    return _children


def _filter(text: str) -> Callable[[Any], bool]:
    match = _FILTER.fullmatch(text)
    if match is None:
        raise _refused(text, 'wanted a filter such as [?(@.name=="a")]')
    steps = _steps(match["path"] or ".")
    if match["sign"] is None:
        return lambda item: bool(_values(steps, item))
    wanted, compare = _literal(match["value"]), _SIGNS[match["sign"]]

    def holds(item: Any) -> bool:
        try:
            return any(compare(value, wanted) for value in _values(steps, item))
        except TypeError:
            return False

    return holds


def _literal(text: str) -> Any:
    if text[0] in "'\"":
        return text[1:-1]
    if text in _WORDS:
        return _WORDS[text]
    try:
        return float(text) if "." in text else int(text)
    except ValueError as err:
        raise _refused(text, "wanted a number, true, false, null or a text in quotes") from err


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else []


def _deep(value: Any, name: str) -> list[Any]:
    here = [value[name]] if isinstance(value, dict) and name in value else []
    return here + [deeper for child in _children(value) for deeper in _deep(child, name)]


def _values(steps: Sequence[Step], value: Any) -> list[Any]:
    values = [value]
    for step in steps:
        values = [result for other in values for result in step(other)]
    return values


def _text(parts: Iterable[str | tuple[Step, ...] | _Range], value: Any, document: Any) -> str:
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, _Range):
            texts.extend(_text(part.parts, item, document) for item in _values(part.over, value))
        else:
            texts.append(" ".join(map(_written, _values(part, value))))
    return "".join(texts)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"cannot read the JSONPath {text!r}: {why}", next_step=_NEXT)
