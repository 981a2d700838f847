"""Macros: calls that the parser expands to a loop or a test.

`has`; `all`, `exists`, `exists_one`, `map`, `filter` over one variable; `all`, `exists`,
`existsOne`, `transformList`, `transformMap` and `transformMapEntry` over two (index or key, then
value); `cel.bind`; `sortBy`; `optMap` and `optFlatMap`.
Source: cel-spec, langdef.md, "Macros"; cel-go/ext/README.md.
"""

from __future__ import annotations

from topobus.engine.cel import types as t
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
    measure,
)

__all__ = ["ACCUMULATOR", "MACROS", "UNUSED", "expand"]

ACCUMULATOR = "@result"
UNUSED = "#unused"
_SORTED = "@__sortBy_input__"

# Name to the numbers of arguments with which it is a macro. The reference page lists them.
MACROS: dict[str, tuple[int, ...]] = {
    "all": (2, 3),
    "exists": (2, 3),
    "exists_one": (2, 3),
    "existsOne": (3,),
    "map": (2, 3),
    "filter": (2,),
    "sortBy": (2,),
    "transformList": (3, 4),
    "transformMap": (3, 4),
    "transformMapEntry": (3, 4),
    "optMap": (2,),
    "optFlatMap": (2,),
}


def expand(expression: str, offset: int, name: str, target: Node | None, arguments: list[Node]) -> Node:
    """Make the node of a call. Of a macro, make its expansion.

    Errors: raises CompileError for a macro whose arguments are wrong.
    """
    if target is None:
        if name == "has" and len(arguments) == 1:
            tested = arguments[0]
            if not isinstance(tested, Select) or tested.is_test:
                raise fail_at(expression, tested.offset, "invalid argument to has() macro")
            return Select(offset, tested.operand, tested.field, is_test=True)
        return Call(offset, name, None, arguments)
    if isinstance(target, Identifier) and target.name == "cel" and name == "bind" and len(arguments) == 3:
        return _bind(offset, _variable(expression, arguments[0]), arguments[1], arguments[2])
    if len(arguments) not in MACROS.get(name, ()):
        return Call(offset, name, target, arguments)
    if name == "sortBy":
        return _sorted(offset, target, _variable(expression, arguments[0]), arguments[1])
    if name in ("optMap", "optFlatMap"):
        return _optional(expression, offset, name, target, arguments)
    has_two = name.startswith("transform") or (len(arguments) == 3 and name != "map")
    names = [_variable(expression, argument) for argument in arguments[: 2 if has_two else 1]]
    second = names[1] if has_two else ""
    if second == names[0]:
        raise fail_at(expression, arguments[1].offset, "overlapping variable names in comprehension")
    rest = arguments[len(names) :]
    if name == "exists_one" and has_two:
        name = "existsOne"
    return _loop(offset, name, target, names[0], second, rest)


def _variable(expression: str, node: Node) -> str:
    if not isinstance(node, Identifier):
        raise fail_at(expression, node.offset, "argument must be a simple name")
    return node.name


def _loop(offset: int, name: str, over: Node, first: str, second: str, rest: list[Node]) -> Node:
    def accumulated() -> Node:
        return Identifier(offset, ACCUMULATOR)

    def call(function: str, *arguments: Node) -> Node:
        return measure(Call(offset, function, None, list(arguments)))

    true: Node = Constant(offset, value=True, kind=t.BOOL)
    start, condition, result = true, true, accumulated()
    test = rest[0]
    match name:
        case "all":
            condition = call("@not_strictly_false", accumulated())
            step = call("_&&_", accumulated(), test)
        case "exists":
            start = Constant(offset, value=False, kind=t.BOOL)
            condition = call("@not_strictly_false", call("!_", accumulated()))
            step = call("_||_", accumulated(), test)
        case "exists_one" | "existsOne":
            start, constant = Constant(offset, 0, t.INT), Constant(offset, 1, t.INT)
            step = call("_?_:_", test, call("_+_", accumulated(), constant), accumulated())
            result = call("_==_", accumulated(), constant)
        case "filter":
            start = ListLiteral(offset, [])
            kept = measure(ListLiteral(offset, [Identifier(offset, first)]))
            step = call("_?_:_", test, call("_+_", accumulated(), kept), accumulated())
        case "map" | "transformList":
            start = ListLiteral(offset, [])
            step = call("_+_", accumulated(), measure(ListLiteral(offset, [rest[-1]])))
        case "transformMap":
            start = MapLiteral(offset, [])
            step = call("cel.@mapInsert", accumulated(), Identifier(offset, first), rest[-1])
        case _:
            start = MapLiteral(offset, [])
            step = call("cel.@mapInsert", accumulated(), rest[-1])
    if len(rest) == 2:
        step = call("_?_:_", test, step, accumulated())
    return Fold(offset, first, second, over, ACCUMULATOR, start, condition, step, result)


def _bind(offset: int, name: str, value: Node, result: Node) -> Fold:
    """Name a value: a loop that never runs, whose accumulator is the name."""
    return Fold(
        offset,
        UNUSED,
        "",
        ListLiteral(offset, []),
        name,
        value,
        Constant(offset, value=False, kind=t.BOOL),
        Identifier(offset, name),
        result,
    )


def _sorted(offset: int, target: Node, variable: str, key: Node) -> Node:
    """Bind the list to a name, compute its keys, and sort it by them."""

    def values() -> Node:
        return Identifier(offset, _SORTED)

    keys = measure(_loop(offset, "map", values(), variable, "", [key]))
    return _bind(offset, _SORTED, target, measure(Call(offset, "@sortByAssociatedKeys", values(), [keys])))


def _optional(expression: str, offset: int, name: str, target: Node, arguments: list[Node]) -> Node:
    variable = _variable(expression, arguments[0])
    value = measure(Call(offset, "value", target, []))
    bound: Node = measure(_bind(offset, variable, value, arguments[1]))
    if name == "optMap":
        bound = measure(Call(offset, "optional.of", None, [bound]))
    test = measure(Call(offset, "hasValue", target, []))
    return Call(offset, "_?_:_", None, [test, bound, Call(offset, "optional.none", None, [])])
