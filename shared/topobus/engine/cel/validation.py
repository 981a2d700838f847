"""Refuses expressions whose types fit but that are wrong: constants that can only fail, and list or
map constants of mixed types.

Constant durations, timestamps and patterns must be valid. The elements of a list or map must be of
one type, except within `format`, whose clauses must match its arguments where both are constants.
Source: cel-go cel/validator.go; ext/formatting.go, stringFormatValidator; the validators that
k8s.io/apiserver/pkg/cel/environment switches on, 1.36.
"""

from __future__ import annotations

from topobus.engine.cel import types as t
from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions import patterns
from topobus.engine.cel.functions.text_formats import Clause, FormatError, split_format
from topobus.engine.cel.registry import Functions
from topobus.engine.cel.tokens import fail_at
from topobus.engine.cel.tree import (
    Call,
    Constant,
    ListLiteral,
    MapLiteral,
    Node,
    children,
)
from topobus.engine.cel.types import Type
from topobus.values.errors import InvariantError

__all__ = ["validate"]

_WRITTEN_OUT = ("duration", "timestamp")


def validate(expression: str, node: Node, functions: Functions) -> None:
    """Refuse an expression that can only fail.

    Errors: raises CompileError with line and column.
    """
    _Validator(expression, functions).check(node, may_mix=False)


class _Validator:
    def __init__(self, expression: str, functions: Functions) -> None:
        self._expression = expression
        self._functions = functions

    def check(self, node: Node, *, may_mix: bool) -> None:
        """Check a node and all nodes below it. Types may be mixed within the arguments of
        `format`.
        """
        if isinstance(node, Call):
            if node.name in _WRITTEN_OUT and node.arguments:
                self._literal(node, node.arguments[0])
            elif node.name == "matches" and node.arguments:
                self._pattern(node.arguments[0])
            elif node.name == "format":
                may_mix = True
                self._format(node)
        elif isinstance(node, ListLiteral) and not may_mix:
            self._one_type([(item, index in node.optional) for index, item in enumerate(node.items)])
        elif isinstance(node, MapLiteral) and not may_mix:
            self._one_type([(entry.key, False) for entry in node.entries])
            self._one_type([(entry.value, entry.is_optional) for entry in node.entries])
        for below in children(node):
            self.check(below, may_mix=may_mix)

    def _literal(self, node: Call, argument: Node) -> None:
        if not isinstance(argument, Constant):
            return
        chosen = self._functions.choose(node.name, is_member=node.target is not None, values=(argument.value,))
        if chosen is None:
            raise InvariantError("the check let a call pass that no function takes", name=node.name)
        try:
            chosen.work(argument.value)
        except EvaluationError as err:
            raise fail_at(self._expression, argument.offset, f"invalid {node.name} argument: {err}") from err

    def _pattern(self, argument: Node) -> None:
        if isinstance(argument, Constant) and isinstance(argument.value, str):
            problem = patterns.problem_of(argument.value)
            if problem:
                raise fail_at(self._expression, argument.offset, f"invalid matches argument: {problem}")

    def _one_type(self, parts: list[tuple[Node, bool]]) -> None:
        wanted: Type | None = None
        for part, is_optional in parts:
            kind = part.type.parameters[0] if is_optional and part.type.parameters else part.type
            if wanted is None:
                wanted = kind
            elif kind != wanted:
                raise fail_at(self._expression, part.offset, f"expected type '{wanted}' but found '{kind}'")

    def _format(self, node: Call) -> None:
        text, values = node.target, node.arguments[0] if len(node.arguments) == 1 else None
        if not isinstance(text, Constant) or not isinstance(text.value, str) or not isinstance(values, ListLiteral):
            return
        used = 0
        try:
            for part in split_format(text.value):
                if isinstance(part, Clause):
                    if used >= len(values.items):
                        raise FormatError(f"index {used} out of range")
                    self._clause(part, values.items[used])
                    used += 1
        except FormatError as err:
            raise fail_at(self._expression, node.offset, str(err)) from err
        if used < len(values.items):
            message = f"too many arguments supplied to string.format (expected {used}, got {len(values.items)})"
            raise fail_at(self._expression, node.offset, message)

    def _clause(self, clause: Clause, value: Node) -> None:
        unsuited = (
            _unsuited(value, clause.kinds)
            if clause.letter == "s"
            else value
            if not _suits(value.type, clause.kinds)
            else None
        )
        if unsuited is not None:
            raise fail_at(
                self._expression,
                unsuited.offset,
                f"error during formatting: {clause.wants}, was given {str(unsuited.type).partition('(')[0]}",
            )


def _suits(kind: Type, kinds: frozenset[str]) -> bool:
    return kind == t.DYN or kind.name in kinds


def _unsuited(value: Node, kinds: frozenset[str]) -> Node | None:
    """Find a value that cannot be written as text, also within literals of lists and maps."""
    if not _suits(value.type, kinds):
        return value
    if isinstance(value, ListLiteral | MapLiteral):
        return next((node for below in children(value) if (node := _unsuited(below, kinds)) is not None), None)
    return None
