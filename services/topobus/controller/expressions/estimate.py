"""The most that an expression can cost on any device, before it is evaluated.

An API server refuses an expression whose estimate is above the limit. The sizes of what a device may carry are known: 32 domains or names, texts and lists of at
most 64, a driver's name of 63. Source: cel-go checker/cost.go; k8s.io/apiserver/pkg/cel/library/cost.go; k8s.io/dynamic-resource-allocation/cel, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from topobus.contracts.kubernetes.limits import MAX_ATTRIBUTE_VALUES, MAX_ATTRIBUTES, MAX_TEXT
from topobus.controller.expressions import types as t
from topobus.controller.expressions.macros import UNUSED
from topobus.controller.expressions.tree import Call, Constant, Fold, Identifier, ListLiteral, MapLiteral, Node, Select

__all__ = ["estimate"]

_WORST = (1 << 64) - 1
_MAX_DOMAIN, _MAX_IDENTIFIER, _MAX_DRIVER = 63, 32, 63
# Upstream knows no size of its own types and so takes comparing two of them for endless; here they have one.
_SCALARS = frozenset(["bool", "int", "uint", "double", "type", "null_type", t.DURATION.name, t.TIMESTAMP.name, t.DEVICE.name])
_OWN = ("kubernetes.", "net.")
_NOMINAL = frozenset(
    "masked prefixLength family isUnspecified isLoopback isLinkLocalMulticast isLinkLocalUnicast "  # noqa: SIM905
    "sign asInteger isInteger asApproximateFloat isGreaterThan isLessThan compareTo add sub".split()
)


class Size(NamedTuple):
    """The least and the most that a value can be."""

    least: int
    most: int

    def plus(self, other: Size) -> Size:
        """Add sizes."""
        return Size(min(self.least + other.least, _WORST), min(self.most + other.most, _WORST))

    def times(self, other: Size) -> Size:
        """Multiply sizes."""
        return Size(min(self.least * other.least, _WORST), min(self.most * other.most, _WORST))

    def over(self, divisor: int) -> Size:
        """Divide, rounded up."""
        return Size(-(-self.least // divisor), self.most if self.most == _WORST else -(-self.most // divisor))

    def widened(self, other: Size) -> Size:
        """Cover both."""
        return Size(min(self.least, other.least), max(self.most, other.most))


_UNKNOWN, _ONE, _NOTHING = Size(0, _WORST), Size(1, 1), Size(0, 0)


@dataclass(frozen=True)
class _Known:
    """What is known of a value: its cost, its size, the sizes of its keys and items, and where on the device it comes from."""

    cost: Size
    size: Size | None = None
    key: Size | None = None
    item: Size | None = None
    path: tuple[str, ...] = ()
    type: t.Type = t.DYN

    @property
    def some_size(self) -> Size:
        return self.size if self.size is not None else _UNKNOWN


def estimate(node: Node) -> int:
    """Give the most that a checked tree can cost."""
    return _estimate(node, {}).cost.most


def _device_size(path: tuple[str, ...]) -> Size | None:
    """Give the size of what stands at a place of the device."""
    match path:
        case ("device", "driver"):
            return Size(0, _MAX_DRIVER)
        case ("device", "allowMultipleAllocations"):
            return Size(0, 1)
        case ("device", "attributes" | "capacity"):
            return Size(0, MAX_ATTRIBUTES)
        case ("device", "attributes" | "capacity", "@keys"):
            return Size(0, _MAX_DOMAIN)
        case ("device", "attributes" | "capacity", _):
            return Size(0, MAX_ATTRIBUTES)
        case ("device", "attributes" | "capacity", _, "@keys"):
            return Size(0, _MAX_IDENTIFIER)
        case ("device", "attributes", _, _):
            return Size(0, max(MAX_TEXT, MAX_ATTRIBUTE_VALUES))
        case _:
            return None


def _finish(known: _Known, node: Node) -> _Known:
    size = known.size
    if size is None and known.path:
        size = _device_size(known.path)
    if size is None and _is_scalar(node.type):
        size = _ONE
    return replace(known, size=size, type=node.type)


def _is_scalar(one: t.Type) -> bool:
    return one.name in _SCALARS or one.name.startswith(_OWN) or (one.name == "optional_type" and _is_scalar(one.parameters[0]))


def _estimate(node: Node, scope: dict[str, _Known]) -> _Known:
    match node:
        case Constant(value=value):
            found = _Known(_NOTHING, Size(len(value), len(value)) if isinstance(value, str | bytes) else _ONE)
        case Identifier(name=name):
            known = scope.get(name)
            found = replace(known, cost=_ONE) if known is not None else _Known(_ONE, path=(name,))
        case Select():
            found = _select(node, scope)
        case ListLiteral(items=items):
            inside = [_estimate(one, scope) for one in items]
            found = _Known(_sum(inside).plus(Size(10, 10)), Size(len(items), len(items)), _ONE, _cover(inside))
        case MapLiteral(entries=entries):
            keys, values = [_estimate(one.key, scope) for one in entries], [_estimate(one.value, scope) for one in entries]
            cost = _sum([*keys, *values]).plus(Size(30, 30))
            found = _Known(cost, Size(len(entries), len(entries)), _cover(keys), _cover(values))
        case Fold():
            found = _bind(node, scope) if node.variable == UNUSED else _fold(node, scope)
        case Call():
            found = _call(node, scope)
        case _:
            raise AssertionError(f"no estimate for {node}")
    return _finish(found, node)


def _sum(found: list[_Known]) -> Size:
    total = _NOTHING
    for one in found:
        total = total.plus(one.cost)
    return total


def _cover(found: list[_Known]) -> Size:
    size: Size | None = None
    for one in found:
        size = one.some_size if size is None else size.widened(one.some_size)
    return size if size is not None else _NOTHING


def _select(node: Select, scope: dict[str, _Known]) -> _Known:
    operand = _estimate(node.operand, scope)
    if node.is_test:
        return _Known(operand.cost)
    has_cost = node.operand.type.name in ("map", t.DEVICE.name)
    path = (*operand.path, node.field) if operand.path else ()
    return _Known(operand.cost.plus(_ONE if has_cost else _NOTHING), operand.item if operand.type.name == "map" else None, path=path)


def _bind(node: Fold, scope: dict[str, _Known]) -> _Known:
    value = _estimate(node.start, scope)
    result = _estimate(node.result, {**scope, node.accumulator: value})
    return replace(result, cost=Size(10, 10).plus(value.cost).plus(result.cost))


def _fold(node: Fold, scope: dict[str, _Known]) -> _Known:
    over, start = _estimate(node.over, scope), _estimate(node.start, scope)
    is_list = over.type.name == "list" or over.type.is_dynamic
    inner = {**scope, node.accumulator: replace(start, path=())}
    keys = _Known(_ONE, over.key if not is_list else _ONE, path=_below(over, "@keys" if not is_list else "@indices"))
    values = _Known(_ONE, over.item, path=_below(over, "@items" if is_list else "@values"))
    if node.second_variable:
        inner |= {node.variable: keys, node.second_variable: values}
    else:
        inner[node.variable] = values if is_list else keys
    condition, step = _estimate(node.condition, inner), _estimate(node.step, inner)
    result = _estimate(node.result, {**scope, node.accumulator: replace(start, path=())})
    cost = over.cost.plus(start.cost).plus(result.cost).plus(over.some_size.times(condition.cost.plus(step.cost)))
    size = over.some_size if isinstance(node.start, ListLiteral | MapLiteral) else start.size
    return _Known(cost, size, step.key, step.item)


def _below(known: _Known, part: str) -> tuple[str, ...]:
    return (*known.path, part) if known.path else ()


def _call(node: Call, scope: dict[str, _Known]) -> _Known:
    target = _estimate(node.target, scope) if node.target is not None else None
    arguments = [_estimate(one, scope) for one in node.arguments]
    before = _sum([*([target] if target is not None else []), *arguments])
    match node.name if target is None else "":
        case "_&&_" | "_||_":
            return _Known(Size(arguments[0].cost.least, before.most))
        case "_?_:_":
            chosen = arguments[1].cost.widened(arguments[2].cost)
            size = arguments[1].some_size.widened(arguments[2].some_size)
            return _Known(arguments[0].cost.plus(chosen), size, None, _either(arguments[1].item, arguments[2].item))
        case "_[_]":
            container = arguments[0]
            part = "@values" if container.type.name == "map" else "@items"
            return _Known(before.plus(_ONE), container.item, path=_below(container, part))
        case "dyn":
            return replace(arguments[0], cost=before.plus(_ONE))
        case "_+_":
            return _addition(node, before, arguments)
    own, result = _function(node, target, arguments)
    return _Known(before.plus(own), result)


def _either(one: Size | None, other: Size | None) -> Size | None:
    return one.widened(other) if one is not None and other is not None else None


def _addition(node: Call, before: Size, arguments: list[_Known]) -> _Known:
    left, right = arguments
    kinds = {one.type.name for one in arguments}
    if not kinds & {"string", "bytes", "list", "dyn"}:
        return _Known(before.plus(_ONE))
    size = left.some_size.plus(right.some_size)
    is_text = bool(kinds & {"string", "bytes", "dyn"})
    return _Known(before.plus(size.over(10) if is_text else _ONE), size, _ONE, _either(left.item, right.item) or right.item)


def _function(node: Call, target: _Known | None, arguments: list[_Known]) -> tuple[Size, Size | None]:
    """Give the cost of a function itself, and the size of its result where that is known."""
    name = node.name
    if name in _NOMINAL:
        return _ONE, None
    if target is not None and name in _MEMBERS:
        return _MEMBERS[name](target, arguments)
    first = arguments[0].some_size if arguments else _NOTHING
    match name:
        case "url" | "ip" | "isIP" | "cidr" | "isCIDR" | "isURL" | "quantity" | "isQuantity":
            # As upstream, a text of no known size counts as a short one.
            return (first.over(10).widened(_ONE) if first.most < _WORST else _ONE), None
        case "ip.isCanonical":
            return (first.times(Size(2, 2)).over(10).widened(_ONE) if first.most < _WORST else _ONE), None
        case "bytes":
            return first.over(10), Size(first.least, min(first.most * 4, _WORST))
        case "string" if arguments and arguments[0].type.name in ("bytes", "dyn"):
            return first.over(10).widened(_ONE), None
        case "sets.contains" | "sets.intersects" | "sets.equivalent":
            rounds = Size(2, 2) if name == "sets.equivalent" else _ONE
            return _ONE.plus(first.times(arguments[1].some_size).times(rounds)), None
        case "strings.quote":
            return first.over(10), Size(first.least + 2, min(first.most * 2 + 2, _WORST))
        case "@in" if arguments[1].type.name != "map":
            return arguments[1].some_size.widened(_ONE if arguments[1].type.is_dynamic else arguments[1].some_size), None
        case "matches" if len(arguments) == 2:
            return _ONE, None
        case "_==_" | "_!=_":
            return _comparison(arguments), None
        case "_<_" | "_<=_" | "_>_" | "_>=_" if any(one.type.name in ("string", "bytes") for one in arguments):
            return _comparison(arguments), None
        case "_<_" | "_<=_" | "_>_" | "_>=_" if all(one.type.is_dynamic for one in arguments):
            return _comparison(arguments).widened(_ONE), None
        case _:
            return _ONE, None


def _comparison(arguments: list[_Known]) -> Size:
    most = min(one.some_size.most for one in arguments)
    return Size(1 if most else 0, most).over(10)


_Rule = Callable[[_Known, list[_Known]], tuple[Size, Size | None]]


def _walk(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    return target.some_size.over(10), target.some_size


def _walk_values(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    if not target.type.parameters:
        return target.some_size.over(10), None
    item = _ONE
    if target.type.parameters[0].name in ("string", "bytes"):
        size = _device_size((*target.path, "@items")) if target.path else None
        item = item.plus((size or target.item or _UNKNOWN).over(10))
    return target.some_size.times(item), None


def _pattern(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    return target.some_size.plus(_ONE).over(10).times(arguments[0].some_size.over(4)), Size(0, target.some_size.most)


def _split(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    return target.some_size.times(Size(2, 2)).over(10), Size(0, target.some_size.most)


def _replace(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    size, old, new = target.some_size, arguments[0].some_size, arguments[1].some_size
    if old.least == 0:
        most = min((size.most + 1) * new.most + size.most, _WORST)
    elif new.most <= old.least:
        most = size.most
    else:
        most = min(-(-size.most // old.least) * new.most, _WORST)
    return size.times(Size(2, 2)).over(10), Size(0, most)


def _join(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    count = target.some_size
    size = count.times(target.item or _UNKNOWN)
    if arguments:
        size = size.plus(arguments[0].some_size.times(Size(max(count.least - 1, 0), max(count.most - 1, 0))))
    return size.over(10), size


def _contains_address(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    cost = Size(8, 32).over(10)
    return cost.plus(arguments[0].some_size.over(10)) if arguments[0].type.name == "string" else cost, None


def _contains_network(target: _Known, arguments: list[_Known]) -> tuple[Size, Size | None]:
    return _contains_address(target, arguments)[0].plus(Size(4, 16).over(10)).plus(_ONE), None


_MEMBERS: dict[str, _Rule] = {
    **dict.fromkeys(("lowerAscii", "upperAscii", "substring", "trim"), _walk),
    **dict.fromkeys(("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), _walk_values),
    **dict.fromkeys(("matches", "find", "findAll"), _pattern),
    "split": _split,
    "replace": _replace,
    "join": _join,
    "contains": lambda target, given: (target.some_size.over(10).times(given[0].some_size.over(10)), None),
    "startsWith": lambda target, given: (given[0].some_size.over(10), None),
    "endsWith": lambda target, given: (given[0].some_size.over(10), None),
    "format": lambda target, given: (target.some_size.over(10), None),
    "includes": lambda target, given: (Size(MAX_ATTRIBUTE_VALUES, MAX_ATTRIBUTE_VALUES), None),
    "containsIP": _contains_address,
    "containsCIDR": _contains_network,
}
