"""From text to tree: the grammar of CEL, by precedence.

Flows in: an expression. Flows out: its tree with macros expanded. Source: cel-spec, langdef.md, "Syntax".
"""

from __future__ import annotations

from topobus.controller.expressions import types as t
from topobus.controller.expressions.errors import CompileError
from topobus.controller.expressions.macros import expand
from topobus.controller.expressions.tokens import Token, fail_at, split
from topobus.controller.expressions.tree import (
    Call,
    Constant,
    Entry,
    Identifier,
    ListLiteral,
    MapLiteral,
    Node,
    Select,
    measure,
)
from topobus.controller.expressions.values import Uint

__all__ = ["parse"]

# Deeper than this no person writes; each level costs stack frames of Python's, of which there are a thousand.
_DEEPEST = 80
# A text of 10 KiB has fewer parts; macros that name their target twice (`optMap`) may double them at each step.
_LARGEST = 20_000
_RESERVED = frozenset(
    "as break const continue else for function if import let loop package namespace return var void while in".split()  # noqa: SIM905
)
_LEVELS = (("||",), ("&&",), ("<", "<=", ">=", ">", "==", "!=", "in"), ("+", "-"), ("*", "/", "%"))
_INT64 = 1 << 63


def parse(expression: str) -> Node:
    """Parse an expression.

    Errors: raises CompileError with line and column.
    """
    parser = _Parser(expression)
    found = parser.ternary()
    parser.expect("")
    return found


class _Parser:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = split(expression)
        self._place = 0
        self._nesting = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._place]

    def _take(self) -> Token:
        token = self._tokens[self._place]
        self._place += 1
        return token

    def _is_sign(self, text: str) -> bool:
        return self._next.kind == "sign" and self._next.text == text

    def _accept(self, text: str) -> Token | None:
        return self._take() if self._is_sign(text) else None

    def expect(self, text: str) -> Token:
        """Take a sign, or the end when it is empty."""
        token = self._next
        if (token.kind == "sign" and token.text == text) or (not text and token.kind == "end"):
            return token if not text else self._take()
        raise self._wrong(token, f"expecting {text!r}" if text else "expecting the end")

    def _wrong(self, token: Token, why: str) -> CompileError:
        shown = token.text or "<EOF>"
        return fail_at(self._expression, token.offset, f"Syntax error: mismatched input {shown[:32]!r} {why}")

    def _grown(self, node: Node) -> Node:
        return self._limited(measure(node))

    def _limited(self, node: Node) -> Node:
        if node.depth > _DEEPEST:
            raise fail_at(self._expression, node.offset, f"Syntax error: the expression nests deeper than {_DEEPEST} levels")
        if node.size > _LARGEST:
            raise fail_at(self._expression, node.offset, f"Syntax error: the expression has more than {_LARGEST} parts, macros written out")
        return node

    def ternary(self) -> Node:
        """Read `a ? b : c`, or less."""
        self._nesting += 1
        if self._nesting > _DEEPEST:
            raise fail_at(self._expression, self._next.offset, f"Syntax error: the expression nests deeper than {_DEEPEST} levels")
        found = self._binary(0)
        question = self._accept("?")
        if question is not None:
            first = self._binary(0)
            self.expect(":")
            found = self._grown(Call(question.offset, "_?_:_", None, [found, first, self.ternary()]))
        self._nesting -= 1
        return found

    def _binary(self, level: int) -> Node:
        """Read a chain of operators of one level; iterative, so that a long one costs no stack."""
        found = self._unary() if level == len(_LEVELS) - 1 else self._binary(level + 1)
        while self._next.text in _LEVELS[level] and (self._next.kind == "sign" or self._next.text == "in"):
            operator = self._take()
            right = self._unary() if level == len(_LEVELS) - 1 else self._binary(level + 1)
            name = "@in" if operator.text == "in" else f"_{operator.text}_"
            if level < 2 and isinstance(found, Call) and found.name == name:
                found.arguments.append(right)
                found.depth, found.size = max(found.depth, right.depth + 1), found.size + right.size
                self._limited(found)
            else:
                found = self._grown(Call(operator.offset, name, None, [found, right]))
        return found

    def _unary(self) -> Node:
        signs: list[Token] = []
        while self._is_sign("!") or self._is_sign("-"):
            signs.append(self._take())
        is_negative = bool(signs) and signs[-1].text == "-" and self._next.kind in ("whole", "constant")
        if is_negative and (self._next.kind == "whole" or isinstance(self._next.value, float)):
            signs.pop()
            found = self._member(self._number(self._take(), is_negative=True))
        else:
            found = self._member(self._primary())
        names = {one.text for one in signs}
        if len(names) > 1:
            raise self._wrong(signs[-1], "expecting one kind of sign")
        if signs and len(signs) % 2:
            found = self._grown(Call(signs[0].offset, "!_" if signs[0].text == "!" else "-_", None, [found]))
        return found

    def _number(self, token: Token, *, is_negative: bool = False) -> Constant:
        value = token.value
        if isinstance(value, Uint):
            if is_negative:
                raise self._wrong(token, "expecting a number that may have a minus")
            return Constant(token.offset, value, t.UINT)
        if isinstance(value, float):
            return Constant(token.offset, -value if is_negative else value, t.DOUBLE)
        number = value if isinstance(value, int) else 0
        if number == _INT64 and not is_negative:
            raise fail_at(self._expression, token.offset, f"Syntax error: invalid int literal {token.text}")
        return Constant(token.offset, -number if is_negative else number, t.INT)

    def _member(self, found: Node) -> Node:
        """Read what follows a value: `.field`, `.function(...)`, `[index]`, with `?` before what may be absent."""
        while True:
            dot = self._accept(".")
            if dot is not None:
                is_optional = self._accept("?") is not None
                name = self._take()
                if name.kind != "name" or name.text == "in":
                    raise self._wrong(name, "expecting a name")
                opened = None if is_optional else self._accept("(")
                if is_optional:
                    field = Constant(name.offset, name.text, t.STRING)
                    found = self._grown(Call(dot.offset, "_?._", None, [found, field]))
                elif opened is not None:
                    arguments = self._arguments(")")
                    found = self._grown(expand(self._expression, opened.offset, name.text, found, arguments))
                else:
                    found = self._grown(Select(dot.offset, found, name.text))
                continue
            bracket = self._accept("[")
            if bracket is None:
                return found
            operator = "_[?_]" if self._accept("?") is not None else "_[_]"
            index = self.ternary()
            self.expect("]")
            found = self._grown(Call(bracket.offset, operator, None, [found, index]))

    def _primary(self) -> Node:
        token = self._take()
        if token.kind == "whole":
            return self._number(token)
        if token.kind == "constant":
            kind = {str: t.STRING, bytes: t.BYTES, float: t.DOUBLE}[type(token.value)]
            return Constant(token.offset, token.value, kind)
        if token.kind == "sign":
            match token.text:
                case "(":
                    found = self.ternary()
                    self.expect(")")
                    return found
                case "[":
                    return self._list(token)
                case "{":
                    return self._map(token)
                case ".":
                    token = self._take()
        if token.kind != "name":
            raise self._wrong(token, "expecting a value")
        return self._named(token)

    def _named(self, token: Token) -> Node:
        match token.text:
            case "true" | "false":
                return Constant(token.offset, token.text == "true", t.BOOL)
            case "null":
                return Constant(token.offset, None, t.NULL)
        if token.text in _RESERVED:
            raise fail_at(self._expression, token.offset, f"Syntax error: reserved identifier: {token.text}")
        opened = self._accept("(")
        if opened is not None:
            return self._grown(expand(self._expression, opened.offset, token.text, None, self._arguments(")")))
        return Identifier(token.offset, token.text)

    def _arguments(self, end: str) -> list[Node]:
        found: list[Node] = []
        if self._accept(end):
            return found
        while True:
            found.append(self.ternary())
            if self._accept(end):
                return found
            self.expect(",")

    def _list(self, token: Token) -> Node:
        items: list[Node] = []
        optional: set[int] = set()
        if self._accept(","):  # `[,]` is an empty list, too
            self.expect("]")
            return ListLiteral(token.offset, items)
        while not self._accept("]"):
            if self._accept("?"):
                optional.add(len(items))
            items.append(self.ternary())
            if not self._is_sign("]"):
                self.expect(",")
        return self._grown(ListLiteral(token.offset, items, frozenset(optional)))

    def _map(self, token: Token) -> Node:
        entries: list[Entry] = []
        while not self._accept("}"):
            is_optional = self._accept("?") is not None
            key = self.ternary()
            self.expect(":")
            entries.append(Entry(key, self.ternary(), is_optional))
            if not self._is_sign("}"):
                self.expect(",")
        return self._grown(MapLiteral(token.offset, entries))
