"""What an expression reads of a device: two devices that agree on that get the same verdict, so it is evaluated once for both.

Flows in: a checked tree. Flows out: the places that are read, or None where that cannot be told.
"""

from __future__ import annotations

from topobus.controller.core.selectors import Reads
from topobus.controller.expressions.tree import Call, Constant, Identifier, Node, Select, children

__all__ = ["read"]

_SCALARS = ("driver", "allowMultipleAllocations")
_MAPS = ("attributes", "capacity")


def read(node: Node) -> frozenset[Reads] | None:
    """List what a tree reads."""
    found: set[Reads] = set()
    return frozenset(found) if _collect(node, found) else None


def _collect(node: Node, found: set[Reads]) -> bool:
    one = _access(node)
    if one is not None:
        found.add(one)
        if isinstance(node, Call) and node.name == "@in":
            return True
        if one.domain is None and one.part in _MAPS:
            found.add(Reads("driver"))
        return True
    if isinstance(node, Identifier):
        return node.name != "device"
    return all(_collect(below, found) for below in children(node))


def _access(node: Node) -> Reads | None:
    """Read one of the forms in which expressions look at a device."""
    if isinstance(node, Select) and _is_device(node.operand) and node.field in _SCALARS:
        return Reads(node.field)
    if isinstance(node, Call) and node.name == "@in":
        key, container = node.arguments
        part = _map_of(container)
        return Reads(part, str(key.value)) if part and isinstance(key, Constant) and isinstance(key.value, str) else None
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
    return Reads(part, None, name) if _access(outer[1]) == Reads("driver") else None


def _step(node: Node) -> tuple[Node, str | Node] | None:
    """Take `x.field`, `x[key]` and their optional forms apart."""
    if isinstance(node, Select):
        return node.operand, node.field
    if isinstance(node, Call) and node.name in ("_[_]", "_?._", "_[?_]") and node.target is None:
        key = node.arguments[1]
        return node.arguments[0], key.value if isinstance(key, Constant) and isinstance(key.value, str) else key
    return None


def _map_of(node: Node) -> str:
    return node.field if isinstance(node, Select) and _is_device(node.operand) and node.field in _MAPS and not node.is_test else ""


def _is_device(node: Node) -> bool:
    return isinstance(node, Identifier) and node.name == "device"
