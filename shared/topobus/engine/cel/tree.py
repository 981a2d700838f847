"""The syntax tree of an expression, with macros expanded.

Each node has its position in the text (an offset in characters) and, once checked, its type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from topobus.engine.cel.types import DYN, Type

__all__ = [
    "Call",
    "Constant",
    "Entry",
    "Fold",
    "Identifier",
    "ListLiteral",
    "MapLiteral",
    "Node",
    "Select",
    "children",
    "dotted",
    "measure",
]


@dataclass(slots=True, eq=False)
class Node:
    """The position and the type that all nodes have."""

    offset: int
    type: Type = field(default=DYN, init=False)
    depth: int = field(default=1, init=False)
    size: int = field(default=1, init=False)
    """Nodes from here down. A node in two places counts twice, because it is walked twice."""
    levels: int = field(default=0, init=False)
    """Operators, selections, calls on a target and indices from here
    down, as the text nests them."""


@dataclass(slots=True, eq=False)
class Constant(Node):
    """A literal."""

    value: object
    kind: Type


@dataclass(slots=True, eq=False)
class Identifier(Node):
    """A variable, or the name of a type."""

    name: str


@dataclass(slots=True, eq=False)
class Select(Node):
    """`operand.field`, or as a test `has(operand.field)`."""

    operand: Node
    field: str
    is_test: bool = False


@dataclass(slots=True, eq=False)
class Call(Node):
    """A function, an operator (`_+_`) or a member function when it has a target.

    `&&` and `||` have two arguments or more.
    """

    name: str
    target: Node | None
    arguments: list[Node]
    overloads: tuple[str, ...] = field(default=(), init=False)
    """Which of the function's overloads may be meant; filled in by the check."""


@dataclass(slots=True, eq=False)
class ListLiteral(Node):
    """`[a, ?b]`."""

    items: list[Node]
    optional: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Entry:
    """`key: value` of a map."""

    key: Node
    value: Node
    is_optional: bool = False


@dataclass(slots=True, eq=False)
class MapLiteral(Node):
    """`{a: b}`."""

    entries: list[Entry]


@dataclass(slots=True, eq=False)
class Fold(Node):
    """A loop over a list or the keys of a map. Macros expand to it."""

    variable: str
    second_variable: str
    over: Node
    accumulator: str
    start: Node
    condition: Node
    step: Node
    result: Node


def children(node: Node) -> Iterator[Node]:
    """List the direct children of a node."""
    match node:
        case Select(operand=operand):
            yield operand
        case Call(target=target, arguments=arguments):
            if target is not None:
                yield target
            yield from arguments
        case ListLiteral(items=items):
            yield from items
        case MapLiteral(entries=entries):
            for entry in entries:
                yield entry.key
                yield entry.value
        case Fold():
            yield from (node.over, node.start, node.condition, node.step, node.result)
        case _:
            return


def dotted(node: Node) -> str:
    """Read `a.b.c` as a name. Empty for any other node."""
    if isinstance(node, Identifier):
        return node.name
    if isinstance(node, Select) and not node.is_test:
        before = dotted(node.operand)
        return f"{before}.{node.field}" if before else ""
    return ""


def measure(node: Node) -> Node:
    """Write depth and size of a node whose children have theirs."""
    node.depth, node.size = 1, 1
    for other_node in children(node):
        node.depth = max(node.depth, other_node.depth + 1)
        node.size += other_node.size
    return node
