"""Finds the parts of a device that an expression reads: two devices that are equal there get the
same verdict, so it is evaluated once for both.

None where the places cannot be determined. A name that `cel.bind` gives to a part of the device
counts as that part.
"""

from __future__ import annotations

from topobus.engine.cel.macros import UNUSED
from topobus.engine.cel.seam import Reads
from topobus.engine.cel.tree import (
    Call,
    Constant,
    Fold,
    Identifier,
    Node,
    Select,
    children,
)

__all__ = ["read"]

_SCALARS = ("driver", "allowMultipleAllocations")
_MAPS = ("attributes", "capacity")


def read(node: Node) -> frozenset[Reads] | None:
    """List the places that a tree reads."""
    reads: set[Reads] = set()
    return frozenset(reads) if _collect(node, reads, {}) else None


_Names = dict[str, Node | None]
"""The values of `cel.bind` names, as far as they are a part of the device; None where a macro's
variable hides one."""


def _collect(node: Node, reads: set[Reads], names: _Names) -> bool:
    attribute = _access(node, names)
    if attribute is not None:
        reads.add(attribute)
        if isinstance(node, Call) and node.name == "@in":
            return True
        if attribute.domain is None and attribute.part in _MAPS:
            reads.add(Reads("driver"))
        return True
    if isinstance(node, Identifier):
        # A part of the device as a whole (`d == e`) is more than one place.
        return node.name != "device" and _resolve(node, names) is node
    if isinstance(node, Fold):
        if node.variable == UNUSED:
            return _collect_bound(node, reads, names)
        names = {**names, node.variable: None, node.second_variable: None, node.accumulator: None}
    return all(_collect(below, reads, names) for below in children(node))


def _collect_bound(node: Fold, reads: set[Reads], names: _Names) -> bool:
    value = _resolve(node.start, names)
    is_part = _is_part(value)
    if not is_part and not _collect(node.start, reads, names):
        return False
    return _collect(node.result, reads, {**names, node.accumulator: value if is_part else None})


def _is_part(node: Node) -> bool:
    """Say whether a node is `device`, one of its maps, or a domain of one, whose values differ only
    in their parts.
    """
    if _is_device(node) or _map_of(node):
        return True
    step = _step(node)
    if step is None or not _map_of(step[0]) or isinstance(node, Call):
        return (
            step is not None
            and isinstance(node, Call)
            and node.name == "_[_]"
            and bool(_map_of(step[0]))
            and _is_plain_key(step[1])
        )
    return isinstance(node, Select) and not node.is_test


def _is_plain_key(key: str | Node) -> bool:
    return isinstance(key, str) or _access(key, {}) == Reads("driver")


def _resolve(node: Node, names: _Names) -> Node:
    """Replace names by their values, down to the device."""
    match node:
        case Identifier(name=name):
            return names.get(name) or node
        case Select(operand=operand, is_test=False):
            whole = _resolve(operand, names)
            return node if whole is operand else Select(node.offset, whole, node.field)
        case Call(name="_[_]" | "_?._" | "_[?_]", target=None, arguments=[container, key]):
            whole, inner = _resolve(container, names), _resolve(key, names)
            return node if whole is container and inner is key else Call(node.offset, node.name, None, [whole, inner])
        case _:
            return node


def _access(node: Node, names: _Names) -> Reads | None:
    """Read one of the forms in which expressions access a device."""
    if isinstance(node, Select) and node.is_test:
        node = Select(node.offset, _resolve(node.operand, names), node.field, is_test=True)
    elif isinstance(node, Call) and node.name == "@in":
        node = Call(node.offset, node.name, None, [_resolve(argument, names) for argument in node.arguments])
    else:
        node = _resolve(node, names)
    if isinstance(node, Select) and _is_device(node.operand) and node.field in _SCALARS:
        return Reads(node.field)
    if isinstance(node, Call) and node.name == "@in":
        key, container = node.arguments
        part = _map_of(container)
        return (
            Reads(part, str(key.value)) if part and isinstance(key, Constant) and isinstance(key.value, str) else None
        )
    step = _step(node)
    if step is None:
        return None
    inner, name = step
    outer = _step(inner)
    if outer is None or not isinstance(name, str):
        return None
    part = _map_of(outer[0])
    if not part:
        return None
    if isinstance(outer[1], str):
        return Reads(part, outer[1], name)
    return Reads(part, None, name) if _access(outer[1], names) == Reads("driver") else None


def _step(node: Node) -> tuple[Node, str | Node] | None:
    """Take `x.field`, `x[key]` and their optional forms apart."""
    if isinstance(node, Select):
        return node.operand, node.field
    if isinstance(node, Call) and node.name in ("_[_]", "_?._", "_[?_]") and node.target is None:
        key = node.arguments[1]
        return node.arguments[0], key.value if isinstance(key, Constant) and isinstance(key.value, str) else key
    return None


def _map_of(node: Node) -> str:
    return (
        node.field
        if isinstance(node, Select) and _is_device(node.operand) and node.field in _MAPS and not node.is_test
        else ""
    )


def _is_device(node: Node) -> bool:
    return isinstance(node, Identifier) and node.name == "device"
