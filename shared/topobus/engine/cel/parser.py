"""Parses an expression to a tree by CEL's grammar and operator precedence, and expands macros.

Source: cel-spec, langdef.md, "Syntax".
"""

from __future__ import annotations

from topobus.engine.cel import types as t
from topobus.engine.cel.errors import CompileError
from topobus.engine.cel.macros import expand
from topobus.engine.cel.tokens import Token, fail_at, split
from topobus.engine.cel.tree import (
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
from topobus.engine.cel.values import Uint

__all__ = ["parse"]

_DEEPEST = 250
"""How deep a rule of the grammar may be nested in itself. In a chain of operators or selections
each operator is one level, as in upstream's parser."""
# A text of 10 KiB has fewer parts; macros that name their target twice
# (`optMap`) may double them at each step.
_LARGEST = 20_000
_RESERVED = frozenset(
    "as break const continue else for function if import let loop package namespace return var void while in".split()  # noqa: SIM905
)
_RELATIONS = frozenset(["<", "<=", ">=", ">", "==", "!=", "in"])
# Precedence of each operator, and the lowest one allowed within its right side.
_CALCULATIONS = {"+": (1, 2), "-": (1, 2), "*": (2, 3), "/": (2, 3), "%": (2, 3)}
_INT64 = 1 << 63


def parse(expression: str) -> Node:
    """Parse an expression.

    Errors: raises CompileError with line and column.
    """
    parser = _Parser(expression)
    node = parser.ternary()
    parser.expect("")
    return node


class _Parser:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = split(expression)
        self._place = 0
        self._expressions = 0
        self._relations = 0
        self._calculations = 0
        self._members = 0

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
        """Take a sign, or the end when `text` is empty."""
        token = self._next
        if (token.kind == "sign" and token.text == text) or (not text and token.kind == "end"):
            return token if not text else self._take()
        raise self._wrong(token, f"expecting {text!r}" if text else "expecting the end")

    def _wrong(self, token: Token, why: str) -> CompileError:
        shown = token.text or "<EOF>"
        return fail_at(self._expression, token.offset, f"Syntax error: mismatched input {shown[:32]!r} {why}")

    def _grown(self, node: Node, *below: Node, levels: int = 0) -> Node:
        """Record depth and size of a new node, and the levels of the nodes below it in the text."""
        measure(node)
        node.levels = levels + max([each_node.levels for each_node in below], default=0)
        return self._limited(node)

    def _limited(self, node: Node) -> Node:
        self._check_depth(node.levels, node.offset)
        if node.size > _LARGEST:
            raise fail_at(
                self._expression,
                node.offset,
                f"Syntax error: the expression has more than {_LARGEST} parts, macros written out",
            )
        return node

    def _check_depth(self, depth: int, offset: int) -> None:
        if depth > _DEEPEST:
            raise fail_at(self._expression, offset, f"Syntax error: the expression nests deeper than {_DEEPEST} levels")

    def ternary(self) -> Node:
        """Read `a ? b : c`, or less."""
        self._expressions += 1
        self._check_depth(self._expressions, self._next.offset)
        node = self._chain("||")
        question = self._accept("?")
        if question is not None:
            first = self._chain("||")
            self.expect(":")
            second = self.ternary()
            node = self._grown(Call(question.offset, "_?_:_", None, [node, first, second]), node, first, second)
        self._expressions -= 1
        return node

    def _chain(self, sign: str) -> Node:
        """Read terms joined by `||` or `&&`: one node, however many there are."""
        node = self._chain("&&") if sign == "||" else self._relation()
        if not self._is_sign(sign):
            return node
        operator, terms = self._next, [node]
        while self._accept(sign):
            terms.append(self._chain("&&") if sign == "||" else self._relation())
        return self._grown(Call(operator.offset, f"_{sign}_", None, terms), *terms)

    def _relation(self) -> Node:
        """Read a chain of comparisons, each with the one before it as its left side."""
        before = self._relations
        self._relations += 1
        self._check_depth(self._relations, self._next.offset)
        node = self._calculation(1)
        while self._next.text in _RELATIONS and (self._next.kind == "sign" or self._next.text == "in"):
            operator = self._take()
            self._relations += 1
            self._check_depth(self._relations, operator.offset)
            right = self._calculation(1)
            self._relations -= 1
            name = "@in" if operator.text == "in" else f"_{operator.text}_"
            node = self._grown(Call(operator.offset, name, None, [node, right]), node, right, levels=1)
        self._relations = before
        return node

    def _calculation(self, least: int) -> Node:
        """Read a chain of `+`, `-`, `*`, `/`, `%` of a precedence and above."""
        before = self._calculations
        self._calculations += 1
        self._check_depth(self._calculations, self._next.offset)
        node = self._unary()
        while (
            self._next.kind == "sign"
            and self._next.text in _CALCULATIONS
            and _CALCULATIONS[self._next.text][0] >= least
        ):
            operator = self._take()
            right = self._calculation(_CALCULATIONS[operator.text][1])
            node = self._grown(Call(operator.offset, f"_{operator.text}_", None, [node, right]), node, right, levels=1)
        self._calculations = before
        return node

    def _unary(self) -> Node:
        signs: list[Token] = []
        while self._is_sign("!") or self._is_sign("-"):
            signs.append(self._take())
        # As upstream's grammar: one minus before a number is part of it, of several none is.
        is_negative = len(signs) == 1 and signs[0].text == "-" and self._next.kind in ("whole", "constant")
        if is_negative and (self._next.kind == "whole" or isinstance(self._next.value, float)):
            signs.pop()
            node = self._member(self._number(self._take(), is_negative=True))
        else:
            node = self._member()
        names = {sign.text for sign in signs}
        if len(names) > 1:
            raise self._wrong(signs[-1], "expecting one kind of sign")
        if signs and len(signs) % 2:
            node = self._grown(Call(signs[0].offset, "!_" if signs[0].text == "!" else "-_", None, [node]), node)
        return node

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

    def _member(self, number: Node | None = None) -> Node:
        """Read a value and what follows it: `.field`, `.function(...)`, `[index]`, with `?` before
        a part that may be absent.
        """
        before = self._members
        self._members += 1
        self._check_depth(self._members, self._next.offset)
        node = number if number is not None else self._primary()
        while self._next.kind == "sign" and self._next.text in (".", "["):
            node = self._suffix(node)
        self._members = before
        return node

    def _suffix(self, node: Node) -> Node:
        bracket = self._accept("[")
        if bracket is not None:
            operator = "_[?_]" if self._accept("?") is not None else "_[_]"
            index = self.ternary()
            self.expect("]")
            return self._grown(Call(bracket.offset, operator, None, [node, index]), node, index, levels=1)
        dot = self._take()
        is_optional = self._accept("?") is not None
        name = self._take()
        if name.kind != "name" or name.text == "in":
            raise self._wrong(name, "expecting a name")
        if is_optional:
            field = Constant(name.offset, name.text, t.STRING)
            return self._grown(Call(dot.offset, "_?._", None, [node, field]), node, levels=1)
        opened = self._accept("(")
        if opened is None:
            return self._grown(Select(dot.offset, node, name.text), node, levels=1)
        arguments = self._arguments(")")
        return self._grown(
            expand(self._expression, opened.offset, name.text, node, arguments), node, *arguments, levels=1
        )

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
                    node = self.ternary()
                    self.expect(")")
                    return node
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
            arguments = self._arguments(")")
            return self._grown(expand(self._expression, opened.offset, token.text, None, arguments), *arguments)
        return Identifier(token.offset, token.text)

    def _arguments(self, end: str) -> list[Node]:
        nodes: list[Node] = []
        if self._accept(end):
            return nodes
        while True:
            nodes.append(self.ternary())
            if self._accept(end):
                return nodes
            self.expect(",")

    def _list(self, token: Token) -> Node:
        items: list[Node] = []
        optional: set[int] = set()
        if self._accept(","):  # `[,]` is also an empty list
            self.expect("]")
            return ListLiteral(token.offset, items)
        while not self._accept("]"):
            if self._accept("?"):
                optional.add(len(items))
            items.append(self.ternary())
            if not self._is_sign("]"):
                self.expect(",")
        return self._grown(ListLiteral(token.offset, items, frozenset(optional)), *items)

    def _map(self, token: Token) -> Node:
        entries: list[Entry] = []
        while not self._accept("}"):
            is_optional = self._accept("?") is not None
            key = self.ternary()
            self.expect(":")
            entries.append(Entry(key, self.ternary(), is_optional))
            if not self._is_sign("}"):
                self.expect(",")
        return self._grown(
            MapLiteral(token.offset, entries), *[part for entry in entries for part in (entry.key, entry.value)]
        )
