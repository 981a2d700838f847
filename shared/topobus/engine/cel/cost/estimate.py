"""Estimates the highest cost of an expression on any device, before it is evaluated.

An API server refuses an expression whose estimate is above the limit. `function_costs` has the cost
of each function and the size of its result. Each node is visited once, children first. The size of
a node comes from its form, else from the limits of that place of a device (32 domains or names,
texts and lists of at most 64, a driver's name of 63), else from its type, else it is unknown.
Source: cel-go checker/cost.go; k8s.io/dynamic-resource-allocation/cel (the sizes), 1.36.
"""

from __future__ import annotations

from dataclasses import dataclass

from topobus.engine.cel import types as t
from topobus.engine.cel.cost.function_costs import Operand, cost_of_function, size_after_function
from topobus.engine.cel.cost.sizes import (
    LIST_COST,
    MAP_COST,
    NOTHING,
    ONE,
    UNKNOWN,
    Size,
)
from topobus.engine.cel.macros import UNUSED
from topobus.engine.cel.tree import (
    Call,
    Constant,
    Fold,
    Identifier,
    ListLiteral,
    MapLiteral,
    Node,
    Select,
)
from topobus.formats.kubernetes.limits import MAX_ATTRIBUTE_VALUES, MAX_ATTRIBUTES, MAX_TEXT
from topobus.values.errors import InvariantError

__all__ = ["estimate"]

_MAX_DOMAIN, _MAX_IDENTIFIER, _MAX_DRIVER = 63, 32, 63
_SCALARS = frozenset(["bool", "int", "uint", "double", t.DURATION.name, t.TIMESTAMP.name])
_NO_ITEM = Size(0, 0)


@dataclass(frozen=True, slots=True)
class _Entries:
    """What is known of the entries of a list or map: which of the two it is, the sizes of indices
    or keys, and of items or values.
    """

    kind: str
    key: Size
    value: Size

    def widened(self, other: _Entries | None) -> _Entries | None:
        """Cover both. Unknown when one of them is."""
        return (
            _Entries(self.kind, self.key.widened(other.key), self.value.widened(other.value))
            if other is not None
            else None
        )


@dataclass(frozen=True, slots=True)
class _Local:
    """A variable of a macro: where on the device its value comes from, and what is known of its
    size.
    """

    path: tuple[str, ...]
    size: Size | None = None
    entries: _Entries | None = None


def estimate(node: Node) -> int:
    """Compute the most that a checked tree can cost. It is 2^64 - 1 when nothing bounds it."""
    return _Estimator().cost(node).most


class _Estimator:
    """Costs of nodes, with the known sizes and places of the nodes below.

    Keyed by node, because a node may be used twice (`optMap`).
    """

    def __init__(self) -> None:
        self._sizes: dict[Node, Size] = {}
        self._entries: dict[Node, _Entries] = {}
        self._paths: dict[Node, tuple[str, ...]] = {}
        self._locals: dict[str, list[_Local]] = {}

    def cost(self, node: Node) -> Size:
        """Compute the least and the most that a node can cost, all nodes below it included."""
        match node:
            case Constant():
                return NOTHING
            case Identifier(name=name):
                local = self._local(name)
                self._paths[node] = local.path if local is not None else (name,)
                return ONE
            case Select():
                return self._select(node)
            case Call():
                return self._call(node)
            case ListLiteral(items=items):
                cost = self._sum(items)
                self._entries[node] = _Entries("list", ONE, self._cover(items))
                return cost.plus(LIST_COST)
            case MapLiteral(entries=entries):
                keys, values = [entry.key for entry in entries], [entry.value for entry in entries]
                cost = self._sum(keys).plus(self._sum(values))
                self._entries[node] = _Entries("map", self._cover(keys), self._cover(values))
                return cost.plus(MAP_COST)
            case Fold():
                return self._bind(node) if node.variable == UNUSED else self._fold(node)
            case _:
                raise InvariantError(f"no estimate for {node}")

    def _sum(self, nodes: list[Node]) -> Size:
        total = NOTHING
        for node in nodes:
            total = total.plus(self.cost(node))
        return total

    def _cover(self, nodes: list[Node]) -> Size:
        covered: Size | None = None
        for node in nodes:
            size = self._size_or_unknown(node)
            covered = size if covered is None else covered.widened(size)
        return covered if covered is not None else _NO_ITEM

    def _local(self, name: str) -> _Local | None:
        known_locals = self._locals.get(name)
        return known_locals[-1] if known_locals else None

    def _path(self, node: Node) -> tuple[str, ...]:
        if isinstance(node, Identifier):
            local = self._local(node.name)
            if local is not None:
                return local.path
        return self._paths.get(node, ())

    def _size(self, node: Node) -> Size | None:
        size = self._sizes.get(node)
        if size is None:
            size = _size_of_form(node)
        if size is None:
            size = _size_on_device(self._path(node))
            if size is not None:
                self._sizes[node] = size
        if size is None and _is_scalar(node.type):
            size = ONE
        if size is None and isinstance(node, Identifier):
            local = self._local(node.name)
            size = local.size if local is not None else None
        return size

    def _size_or_unknown(self, node: Node) -> Size:
        size = self._size(node)
        return size if size is not None else UNKNOWN

    def _entries_of(self, node: Node) -> _Entries | None:
        entries = self._entries.get(node)
        if entries is None and isinstance(node, Identifier):
            local = self._local(node.name)
            entries = local.entries if local is not None else None
        return entries

    def _learn(self, node: Node, size: Size | None, entries: _Entries | None = None) -> None:
        if size is not None:
            self._sizes[node] = size
        if entries is not None:
            self._entries[node] = entries

    def _select(self, node: Select) -> Size:
        cost = self.cost(node.operand)
        if node.is_test:
            return cost
        kind = node.operand.type
        self._paths[node] = (*self._path(node.operand), node.field)
        return cost.plus(ONE) if kind.name == "map" or kind == t.DEVICE else cost

    def _call(self, node: Call) -> Size:
        if node.name == "dyn" and node.target is None:
            cost = self.cost(node.arguments[0]).plus(ONE)
            self._learn(node, self._size(node.arguments[0]), self._entries_of(node.arguments[0]))
            return cost
        costs = [self.cost(argument) for argument in node.arguments]
        if node.target is None and node.name in ("_&&_", "_||_"):
            total = NOTHING
            for cost in costs:
                total = total.plus(cost)
            self._learn(node, self._size(node))
            return Size(costs[0].least, total.most)
        before = self.cost(node.target) if node.target is not None else NOTHING
        if node.target is None and node.name == "_?_:_":
            first, second = node.arguments[1:]
            size = self._size_or_unknown(first).widened(self._size_or_unknown(second))
            entries = self._entries_of(first)
            self._learn(node, size, entries.widened(self._entries_of(second)) if entries is not None else None)
            return costs[0].plus(costs[1].widened(costs[2]))
        for cost in costs:
            before = before.plus(cost)
        return before.plus(self._function(node))

    def _function(self, node: Call) -> Size:
        """Cover all overloads that may be meant, and record the size that the node can have."""
        target = self._operand(node.target) if node.target is not None else None
        arguments = [self._operand(argument) for argument in node.arguments]
        covered: Size | None = None
        result: Size | None = None
        for signature in node.overloads:
            if signature.startswith("_+_(") and ("string" in signature or "bytes" in signature or "list" in signature):
                self._add_entries(node)
            own = cost_of_function(node.name, signature, target, arguments)
            covered = own if covered is None else covered.widened(own)
            size = size_after_function(node.name, signature, target, arguments)
            if size is not None:
                result = size if result is None else result.widened(size)
            if signature.startswith("_[_](") and not signature.startswith("_[_](optional"):
                entries = self._entries_of(node.arguments[0])
                result = entries.value if entries is not None else None
                part = "@items" if signature.startswith("_[_](list") else "@values"
                self._paths[node] = (*self._path(node.arguments[0]), part)
            if result is None:
                result = self._size(node)
        self._learn(node, result)
        return covered if covered is not None else NOTHING

    def _add_entries(self, node: Call) -> None:
        left = self._entries_of(node.arguments[0])
        both = left.widened(self._entries_of(node.arguments[1])) if left is not None else None
        if both is not None:
            self._entries[node] = both

    def _operand(self, node: Node) -> Operand:
        """Describe an operand for the costs of functions: sizes of itself and of its items, as far
        as known.
        """
        path = self._path(node)
        item = _size_on_device((*path, "@items")) if path else None
        return Operand(node, self._size(node), item)

    def _bind(self, node: Fold) -> Size:
        cost = self.cost(node.over).plus(self.cost(node.start))
        self._push(
            node.accumulator, _Local(self._path(node.start), self._size(node.start), self._entries_of(node.start))
        )
        cost = cost.plus(self.cost(node.result))
        self._locals[node.accumulator].pop()
        self._learn(node, self._size(node.result), self._entries_of(node.result))
        return cost

    def _fold(self, node: Fold) -> Size:
        cost = self.cost(node.over).plus(self.cost(node.start))
        self._push(
            node.accumulator, _Local(self._path(node.start), self._size(node.start), self._entries_of(node.start))
        )
        self._push_variables(node)
        each = self.cost(node.condition).plus(self.cost(node.step))
        self._locals[node.variable].pop()
        if node.second_variable:
            self._locals[node.second_variable].pop()
        cost = cost.plus(self.cost(node.result))
        self._locals[node.accumulator].pop()
        rounds = self._size_or_unknown(node.over)
        if isinstance(node.start, Constant):
            self._learn(node, self._size(node.start))
        else:
            self._learn(node, rounds, self._entries_of(node.step))
        return cost.plus(rounds.times(each))

    def _push_variables(self, node: Fold) -> None:
        entries, path = self._entries_of(node.over), self._path(node.over)
        is_list = (entries.kind if entries is not None else node.over.type.name) == "list"
        key, value = (entries.key, entries.value) if entries is not None else (None, None)
        keys = _Local((*path, "@indices" if is_list else "@keys"), key)
        values = _Local((*path, "@items" if is_list else "@values"), value)
        if node.second_variable:
            self._push(node.variable, keys)
            self._push(node.second_variable, values)
        else:
            self._push(node.variable, values if is_list else keys)

    def _push(self, name: str, local: _Local) -> None:
        self._locals.setdefault(name, []).append(local)


def _size_of_form(node: Node) -> Size | None:
    """Return the size that a literal shows."""
    match node:
        case Constant(value=str() | bytes() as value):
            return Size(len(value), len(value))
        case Constant():
            return ONE
        case ListLiteral(items=items):
            return Size(len(items), len(items))
        case MapLiteral(entries=entries):
            return Size(len(entries), len(entries))
        case _:
            return None


def _size_on_device(path: tuple[str, ...]) -> Size | None:
    """Return the size limit of a place of the device.

    Shapes: path — each step a field's name, @keys, @values or @items; result — None without a
            place, or beyond the device.
    """
    match path:
        case ("device",):
            return _NO_ITEM
        case ("device", "driver"):
            return Size(0, _MAX_DRIVER)
        case ("device", "allowMultipleAllocations"):
            return Size(0, 1)
        case ("device", "attributes" | "capacity"):
            return Size(0, MAX_ATTRIBUTES)
        case ("device", "attributes" | "capacity", "@keys"):
            return Size(0, _MAX_DOMAIN)
        case ("device", "attributes" | "capacity", "@items" | "@values"):
            return Size(0, MAX_ATTRIBUTES)
        case ("device", "attributes" | "capacity", "@items" | "@values", "@keys"):
            return Size(0, _MAX_IDENTIFIER)
        case ("device", "capacity", "@items" | "@values", "@items" | "@values"):
            return _NO_ITEM  # upstream declares no size for a quantity
        case ("device", "attributes", "@items" | "@values", _):
            return Size(0, max(MAX_TEXT, MAX_ATTRIBUTE_VALUES))
        case _:
            return None


def _is_scalar(kind: t.Type) -> bool:
    return kind.name in _SCALARS or (kind.name == "optional_type" and _is_scalar(kind.parameters[0]))
