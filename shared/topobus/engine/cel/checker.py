"""The type checker: gives each node its type and each call its possible overloads, and refuses an
expression with a type error before it is evaluated.

In the checked tree calls of qualified functions (`sets.contains`) have no target. Lists and maps
hold values of one type.
Source: cel-spec, langdef.md, "Type Checking"; cel-go checker/checker.go.
"""

from __future__ import annotations

from topobus.engine.cel import types as t
from topobus.engine.cel.errors import CompileError
from topobus.engine.cel.macros import UNUSED
from topobus.engine.cel.registry import Functions
from topobus.engine.cel.tokens import fail_at
from topobus.engine.cel.tree import (
    Call,
    Constant,
    Fold,
    Identifier,
    ListLiteral,
    MapLiteral,
    Node,
    Select,
    children,
    dotted,
)
from topobus.engine.cel.types import Bindings, Type
from topobus.engine.cel.validation import validate
from topobus.values.errors import InvariantError

__all__ = ["DEVICE_FIELDS", "TYPE_NAMES", "check"]

_ATTRIBUTES = t.map_of(t.STRING, t.map_of(t.STRING, t.DYN))
_CAPACITY = t.map_of(t.STRING, t.map_of(t.STRING, t.read_type("Quantity")))

DEVICE_FIELDS = {
    "driver": t.STRING,
    "allowMultipleAllocations": t.BOOL,
    "attributes": _ATTRIBUTES,
    "capacity": _CAPACITY,
}
TYPE_NAMES = {
    name: t.type_of(t.read_type(kind))
    for name, kind in (
        *((name, name) for name in ("bool", "int", "uint", "double", "string", "bytes", "null_type")),
        ("list", "list<dyn>"),
        ("map", "map<dyn, dyn>"),
        ("type", "type<dyn>"),
        ("optional_type", "optional<dyn>"),
        ("google.protobuf.Duration", "duration"),
        ("google.protobuf.Timestamp", "timestamp"),
        ("net.IP", "IP"),
        ("net.CIDR", "CIDR"),
    )
}


def check(expression: str, node: Node, functions: Functions) -> Type:
    """Check a tree and return its type.

    Errors: raises CompileError.
    """
    checker = _Checker(expression, functions)
    cel_type = checker.check(node, {"device": t.DEVICE})
    checker.finish(node)
    validate(expression, node, functions)
    return checker.bindings.finish(cel_type)


class _Checker:
    def __init__(self, expression: str, functions: Functions) -> None:
        self._expression = expression
        self._functions = functions
        self.bindings = Bindings()

    def check(self, node: Node, scope: dict[str, Type]) -> Type:
        """Check a node with the variables that it sees."""
        match node:
            case Constant():
                cel_type = node.kind
            case Identifier():
                cel_type = self._identifier(node, scope)
            case Select():
                cel_type = self._select(node, scope)
            case Call():
                cel_type = self._call(node, scope)
            case ListLiteral():
                cel_type = self._list(node, scope)
            case MapLiteral():
                cel_type = self._map(node, scope)
            case Fold():
                cel_type = self._fold(node, scope)
            case _:
                raise InvariantError(f"no type rule for {node}")
        node.type = cel_type
        return cel_type

    def finish(self, node: Node) -> None:
        """Replace type parameters by the types that were found for them."""
        node.type = self.bindings.finish(node.type)
        for child in children(node):
            self.finish(child)

    def _fail(self, node: Node, message: str) -> CompileError:
        return fail_at(self._expression, node.offset, message)

    def _show(self, cel_type: Type) -> str:
        return str(self.bindings.finish(cel_type))

    def _identifier(self, node: Identifier, scope: dict[str, Type]) -> Type:
        cel_type = scope.get(node.name) or TYPE_NAMES.get(node.name)
        if cel_type is None:
            raise self._fail(node, f"undeclared reference to '{node.name}' (in container '')")
        return cel_type

    def _select(self, node: Select, scope: dict[str, Type]) -> Type:
        name = dotted(node)
        if name in TYPE_NAMES:
            return TYPE_NAMES[name]
        operand = self.bindings.resolve(self.check(node.operand, scope))
        is_optional = operand.name == "optional_type"
        if is_optional:
            operand = self.bindings.resolve(operand.parameters[0])
        cel_type = self.bindings.substitute(self._field(node, operand, node.field))
        if node.is_test:
            return t.BOOL
        return t.optional_of(cel_type) if is_optional and cel_type.name != "optional_type" else cel_type

    def _field(self, node: Node, operand: Type, field: str) -> Type:
        if operand == t.DEVICE:
            if field not in DEVICE_FIELDS:
                raise self._fail(node, f"undefined field '{field}'")
            return DEVICE_FIELDS[field]
        if operand.name == "map":
            return operand.parameters[1]
        if operand.is_dynamic or operand.is_parameter:
            return t.DYN
        raise self._fail(node, f"type '{self._show(operand)}' does not support field selection")

    def _call(self, node: Call, scope: dict[str, Type]) -> Type:
        if node.target is not None:
            root = dotted(node.target)
            qualified = f"{root}.{node.name}"
            if root and self._functions.find(qualified, is_member=False):
                node.name, node.target = qualified, None
        given = [self.check(argument, scope) for argument in node.arguments]
        special = self._built_in(node, given)
        if special is not None:
            return special
        if node.target is not None:
            given = [self.check(node.target, scope), *given]
        return self._choose(node, tuple(given))

    def _built_in(self, node: Call, given: list[Type]) -> Type | None:
        """Check operators that are no functions of the registry."""
        match node.name if node.target is None else "":
            case "_&&_" | "_||_":
                if not all(self.bindings.fit(t.BOOL, cel_type) for cel_type in given):
                    raise self._no_match(node, given)
                return t.BOOL
            case "_==_" | "_!=_":
                kind = self.bindings.fresh()
                if not self.bindings.fit_all((kind, kind), tuple(given)):
                    raise self._no_match(node, given)
                node.overloads = (f"{node.name}(A, A) -> bool",)
                return t.BOOL
            case "_?_:_":
                joined = self.bindings.fresh()
                if not self.bindings.fit_all((t.BOOL, joined, joined), tuple(given)):
                    raise self._no_match(node, given)
                return self.bindings.substitute(joined)
            case "@not_strictly_false":
                node.overloads = ("@not_strictly_false(bool) -> bool",)
                return t.BOOL
            case "_?._" | "_[?_]":
                return self._optional_access(node, given)
            case _:
                return None

    def _optional_access(self, node: Call, given: list[Type]) -> Type:
        operand = self.bindings.resolve(given[0])
        if operand.name == "optional_type":
            operand = self.bindings.resolve(operand.parameters[0])
        field = node.arguments[1]
        if node.name == "_?._" and isinstance(field, Constant):
            node.overloads = ("_?._(A, string) -> optional<B>",)
            return t.optional_of(self._field(node, operand, str(field.value)))
        return self._choose(node, tuple(given))

    def _choose(self, node: Call, given: tuple[Type, ...]) -> Type:
        """Find the overloads that fit. Results of different types make `dyn`."""
        overloads = self._functions.find(node.name, is_member=node.target is not None)
        if not overloads:
            raise self._fail(node, f"undeclared reference to '{node.name}' (in container '')")
        results: list[Type] = []
        fitting: list[str] = []
        for overload in overloads:
            *parameters, result = self.bindings.instantiate((*overload.parameters, overload.result))
            if self.bindings.fit_all(tuple(parameters), given):
                results.append(self.bindings.substitute(result))
                fitting.append(overload.signature)
        if not results:
            raise self._no_match(node, given)
        node.overloads = tuple(fitting)
        return results[0] if all(cel_type == results[0] for cel_type in results) else t.DYN

    def _no_match(self, node: Call, given: list[Type] | tuple[Type, ...]) -> CompileError:
        shown = (
            f"{self._show(given[0])}.({', '.join(map(self._show, given[1:]))})"
            if node.target is not None
            else f"({', '.join(map(self._show, given))})"
        )
        return self._fail(node, f"found no matching overload for '{node.name}' applied to '{shown}'")

    def _list(self, node: ListLiteral, scope: dict[str, Type]) -> Type:
        item: Type | None = None
        for index, element in enumerate(node.items):
            cel_type = self.check(element, scope)
            if index in node.optional:
                cel_type = self._unwrapped(element, cel_type)
            item = self._same(item, cel_type)
        return t.list_of(item if item is not None else self.bindings.fresh())

    def _map(self, node: MapLiteral, scope: dict[str, Type]) -> Type:
        key: Type | None = None
        value: Type | None = None
        for entry in node.entries:
            key = self._same(key, self.check(entry.key, scope))
            cel_type = self.check(entry.value, scope)
            value = self._same(value, self._unwrapped(entry.value, cel_type) if entry.is_optional else cel_type)
        return t.map_of(key or self.bindings.fresh(), value or self.bindings.fresh())

    def _unwrapped(self, node: Node, cel_type: Type) -> Type:
        cel_type = self.bindings.resolve(cel_type)
        if cel_type.name == "optional_type":
            return cel_type.parameters[0]
        if cel_type.is_dynamic:
            return t.DYN
        raise self._fail(node, f"expected type 'optional_type' but found '{self._show(cel_type)}'")

    def _same(self, cel_type: Type | None, found_cel_type: Type) -> Type:
        """Join the types of a literal's parts.

        `validation` checks that they are one type, because `format` may mix them.
        """
        if cel_type is None:
            return found_cel_type
        if not self.bindings.fit(found_cel_type, cel_type):
            return t.DYN
        return self.bindings.most_general(cel_type, found_cel_type)

    def _fold(self, node: Fold, scope: dict[str, Type]) -> Type:
        over = self.bindings.substitute(self.check(node.over, scope))
        start = self.check(node.start, scope)
        inner = {**scope, node.accumulator: start}
        if node.variable != UNUSED:
            inner |= self._variables(node, over)
        self.check(node.condition, inner)
        step = self.check(node.step, inner)
        # Each macro's step has the type of its start, so the step determines the type of an empty
        # start.
        self.bindings.fit(start, step)
        return self.bindings.substitute(self.check(node.result, {**scope, node.accumulator: start}))

    def _variables(self, node: Fold, over: Type) -> dict[str, Type]:
        if over.name == "list":
            cel_types = {node.variable: over.parameters[0]}
            return (
                {node.variable: t.INT, node.second_variable: over.parameters[0]} if node.second_variable else cel_types
            )
        if over.name == "map":
            types = {node.variable: over.parameters[0]}
            return types | {node.second_variable: over.parameters[1]} if node.second_variable else types
        if over.is_dynamic or over.is_parameter:
            return {node.variable: t.DYN} | ({node.second_variable: t.DYN} if node.second_variable else {})
        raise self._fail(
            node.over,
            f"expression of type '{self._show(over)}' cannot be range of a comprehension (must be list, map, "
            "or dynamic)",
        )
