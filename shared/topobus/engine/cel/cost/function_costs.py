"""The cost that each function adds to the estimate, and the size of its result.

A function without a rule costs 1. An unknown size counts as the largest number, so that a function
that walks such a value is refused.
Source: cel-go checker/cost.go (standard functions), ext/lists.go and ext/sets.go (theirs);
k8s.io/apiserver/pkg/cel/library/cost.go, EstimateCallCost (those of Kubernetes);
k8s.io/dynamic-resource-allocation/cel (`includes`), 1.36.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topobus.engine.cel.cost.sizes import (
    LIST_COST,
    NOTHING,
    ONE,
    UNKNOWN,
    WORST,
    Size,
)
from topobus.engine.cel.tree import Constant, Node
from topobus.formats.kubernetes.limits import MAX_ATTRIBUTE_VALUES

__all__ = ["Operand", "cost_of_function", "size_after_function"]

_TENTH = 0.1
_QUARTER = 0.25
# Bytes of an address: 4 or 16.
_ADDRESS = Size(4, 16)
_FORMAT_NAME = 64
_FORMAT_PATTERN = 128
_OPAQUE = frozenset(["kubernetes.Quantity", "kubernetes.Semver", "net.IP", "net.CIDR"])
_ORDERS = frozenset(["_<_", "_<=_", "_>_", "_>=_"])
_TEXTS = ("string", "bytes")


@dataclass(frozen=True, slots=True)
class Operand:
    """A node with what is known of its size, and of the size of its items if it is a place of the
    device.
    """

    node: Node
    size: Size | None
    item: Size | None

    @property
    def some_size(self) -> Size:
        """The size, or the largest range when it is not known."""
        return self.size if self.size is not None else UNKNOWN


_Cost = Callable[[str, Operand | None, list[Operand]], Size]


def cost_of_function(name: str, signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    """Compute the cost of a call itself, without that of its operands."""
    rule = (_MEMBERS if target is not None else _GLOBALS).get(name)
    return rule(signature, target, arguments) if rule is not None else ONE


def size_after_function(name: str, signature: str, target: Operand | None, arguments: list[Operand]) -> Size | None:
    """Compute the size of a call's result. None when it does not depend on its operands."""
    rule = (_MEMBER_SIZES if target is not None else _GLOBAL_SIZES).get(name)
    return rule(signature, target, arguments) if rule is not None else None


def _first(arguments: list[Operand]) -> Size:
    return arguments[0].some_size


def _of(target: Operand | None) -> Size:
    return target.some_size if target is not None else UNKNOWN


def _walk_target(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _of(target).scaled(_TENTH)


def _walk_first(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).scaled(_TENTH)


def _walk_target_twice(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _of(target).scaled(2 * _TENTH)


def _walk_first_twice(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).scaled(2 * _TENTH)


def _walk_values(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    """Count 1 for each item, and its length where items are texts. `indexOf` of a text walks the
    text.
    """
    if target is None or not target.node.type.parameters:
        return _walk_target(signature, target, arguments)
    item = ONE
    if target.node.type.parameters[0].name in _TEXTS:
        item = item.plus((target.item or UNKNOWN).scaled(_TENTH))
    return target.some_size.times(item)


def _pattern(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    # One more than the length of the text, because a pattern has a cost even on an empty text. An
    # element of a pattern has about four characters.
    return _of(target).plus(ONE).scaled(_TENTH).times(_first(arguments).scaled(_QUARTER))


def _contains(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _of(target).scaled(_TENTH).times(_first(arguments).scaled(_TENTH))


def _join(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _size_of_joined(signature, target, arguments).scaled(_TENTH)


def _size_of_joined(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    # A list of no known type (an attribute) has items of no known size, which upstream leaves out.
    count, size = _of(target), NOTHING
    if target is not None and target.node.type.parameters:
        size = count.times(target.item if target.item is not None else UNKNOWN)
    if arguments:
        size = size.plus(_first(arguments).times(Size(max(count.least - 1, 0), max(count.most - 1, 0))))
    return size


def _contains_address(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    cost = _ADDRESS.plus(_ADDRESS).scaled(_TENTH)
    return cost.plus(_first(arguments).scaled(_TENTH)) if "(string)" in signature else cost


def _contains_network(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _contains_address(signature, target, arguments).plus(_ADDRESS.scaled(_TENTH)).plus(ONE)


def _validate(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).scaled(_TENTH).scaled(_FORMAT_PATTERN * _QUARTER)


def _includes(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return Size(0, MAX_ATTRIBUTE_VALUES)


def _sets(rounds: int) -> _Cost:
    return lambda signature, target, arguments: _first(arguments).times(arguments[1].some_size).scaled(rounds).plus(ONE)


def _within(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return arguments[1].some_size if "list" in signature else ONE


def _comparison(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    most = min(operand.some_size.most for operand in arguments)
    return Size(1 if most else 0, most).scaled(_TENTH)


def _equality(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    left, right = (operand.node.type for operand in arguments)
    if left == right and left.name in _OPAQUE:
        return ONE
    if left == right and left.name == "kubernetes.NamedFormat":
        return Size(1, _FORMAT_NAME).scaled(_TENTH)
    if left == right and left.name == "kubernetes.URL":
        size = arguments[1].size
        return Size(1, size.most if size is not None else 1).scaled(_TENTH)
    return _comparison(signature, target, arguments)


def _order(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _comparison(signature, target, arguments) if any(f"({text}, " in signature for text in _TEXTS) else ONE


def _addition(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    if not any(f"({text}, " in signature for text in _TEXTS):
        return ONE
    return _first(arguments).plus(arguments[1].some_size).scaled(_TENTH)


def _size_of_sum(signature: str, target: Operand | None, arguments: list[Operand]) -> Size | None:
    is_sized = any(f"({text}" in signature for text in (*_TEXTS, "list"))
    return _first(arguments).plus(arguments[1].some_size) if is_sized else None


def _text(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).scaled(_TENTH) if "(bytes)" in signature else ONE


def _bytes(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).scaled(_TENTH) if "(string)" in signature else ONE


def _size_of_replaced(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    """Compute the longest result as the longest text put in for the shortest part as often as that
    can occur, and the shortest result the other way round.
    """
    size, old, new = _of(target), _first(arguments), arguments[1].some_size
    if old.least == 0:
        most = min(min(size.most + 1, WORST) * new.most + size.most, WORST)
    elif new.most <= old.least:
        most = size.most
    else:
        most = min(-(-size.most // old.least) * new.most, WORST)
    if old.most == 0:
        least = min(min(size.least + 1, WORST) * new.least + size.least, WORST)
    elif old.most <= new.least:
        least = size.least
    else:
        least = min(-(-size.least // old.most) * new.least, WORST)
    return Size(least, most)


def _size_of_split(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    limit = arguments[1].node if len(arguments) > 1 else None
    if isinstance(limit, Constant) and isinstance(limit.value, int):
        return Size(0, limit.value % (WORST + 1))  # as upstream: a negative limit is no limit
    return Size(0, _of(target).most)


def _number(operand: Operand, otherwise: int) -> int:
    """Read a whole number that is written out. A negative one counts as zero."""
    node = operand.node
    return max(node.value, 0) if isinstance(node, Constant) and type(node.value) is int else otherwise


def _size_of_slice(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    length = (_number(arguments[1], _of(target).most) - _number(arguments[0], 0)) % (WORST + 1)
    return Size(length, length)


def _size_of_range(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    length = _number(arguments[0], WORST)
    return Size(length, length)


def _flatten(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    depth = float(_number(arguments[0], WORST)) if arguments else 1.0
    return _of(target).scaled(depth).plus(ONE).plus(LIST_COST)


def _squared(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _of(target).times(_of(target))


def _squared_keys(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _first(arguments).times(_first(arguments))


def _target_size(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
    return _of(target)


def _listing(size: _Cost, factor: float = 1.0) -> _Cost:
    """Make the cost of a function that makes a list: that of the values it visits, by a factor, and
    that of the list.
    """
    return lambda signature, target, arguments: (
        size(signature, target, arguments).scaled(factor).plus(ONE).plus(LIST_COST)
    )


def _sorting(size: _Cost) -> _Cost:
    def cost(signature: str, target: Operand | None, arguments: list[Operand]) -> Size:
        factor = 2.0 + _TENTH if signature.startswith(_SORTED_TEXTS) else 2.0
        return _listing(size, factor)(signature, target, arguments)

    return cost


_SORTED_TEXTS = (
    "list<string>.sort",
    "list<bytes>.sort",
    "list<A>.@sortByAssociatedKeys(list<string>",
    "list<A>.@sortByAssociatedKeys(list<bytes>",
)

_MEMBERS: dict[str, _Cost] = {
    **dict.fromkeys(("lowerAscii", "upperAscii", "substring", "trim", "format"), _walk_target),
    **dict.fromkeys(("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), _walk_values),
    **dict.fromkeys(("matches", "find", "findAll"), _pattern),
    **dict.fromkeys(("replace", "split"), _walk_target_twice),
    **dict.fromkeys(("startsWith", "endsWith"), _walk_first),
    "join": _join,
    "contains": _contains,
    "includes": _includes,
    "containsIP": _contains_address,
    "containsCIDR": _contains_network,
    "validate": _validate,
    "slice": _listing(_size_of_slice),
    "reverse": _listing(_target_size),
    "flatten": _flatten,
    "distinct": _listing(_squared, 2.0),
    "sort": _sorting(_squared),
    "@sortByAssociatedKeys": _sorting(_squared_keys),
}
_GLOBALS: dict[str, _Cost] = {
    **dict.fromkeys(
        ("url", "ip", "isIP", "cidr", "isCIDR", "quantity", "isQuantity", "semver", "isSemver", "strings.quote"),
        _walk_first,
    ),
    **dict.fromkeys(_ORDERS, _order),
    "ip.isCanonical": _walk_first_twice,
    "bytes": _bytes,
    "string": _text,
    "sets.contains": _sets(1),
    "sets.intersects": _sets(1),
    "sets.equivalent": _sets(2),
    "@in": _within,
    "_==_": _equality,
    "_!=_": _comparison,
    "_+_": _addition,
    "lists.range": _listing(_size_of_range),
}

_SizeRule = Callable[[str, Operand | None, list[Operand]], Size | None]
_MEMBER_SIZES: dict[str, _SizeRule] = {
    **dict.fromkeys(("lowerAscii", "upperAscii", "substring", "trim"), _target_size),
    **dict.fromkeys(("find", "findAll"), lambda signature, target, arguments: Size(0, _of(target).most)),
    "replace": _size_of_replaced,
    "split": _size_of_split,
    "join": _size_of_joined,
    "slice": _size_of_slice,
    "reverse": _target_size,
    "flatten": _target_size,
    "distinct": _squared,
    "sort": _squared,
    "@sortByAssociatedKeys": _squared_keys,
}
_GLOBAL_SIZES: dict[str, _SizeRule] = {
    "_+_": _size_of_sum,
    "bytes": lambda signature, target, arguments: (
        Size(_first(arguments).least, _first(arguments).most * 4 % (WORST + 1)) if "(string)" in signature else None
    ),
    "string": lambda signature, target, arguments: (
        Size(_first(arguments).least // 4, _first(arguments).most) if "(bytes)" in signature else None
    ),
    "strings.quote": lambda signature, target, arguments: Size(
        (_first(arguments).least + 2) % (WORST + 1), (_first(arguments).most * 2 + 2) % (WORST + 1)
    ),
    "url": lambda signature, target, arguments: _first(arguments),
    "lists.range": _size_of_range,
}
