"""Matches nodes with node selectors, those of slices, allocations, pods and volumes alike.

Source: k8s.io/component-helpers/scheduling/corev1/nodeaffinity, 1.36.
"""

from __future__ import annotations

from topobus.engine.allocation.values import Node
from topobus.formats.kubernetes.resource import NodeRequirement, NodeSelector, NodeSelectorTerm

__all__ = ["node_matches", "selector_matches", "term_matches"]


def node_matches(node: Node, name: str | None, selector: NodeSelector | None, *, is_everywhere: bool) -> bool:
    """Say whether name, selector or `is_everywhere` select a node. With none of them set no node is
    selected.
    """
    if name:
        return node.name == name
    return is_everywhere or (selector is not None and selector_matches(selector, node))


def selector_matches(selector: NodeSelector, node: Node) -> bool:
    """Say whether a node matches one of the terms of a selector."""
    return any(term_matches(term, node) for term in selector.node_selector_terms)


def term_matches(term: NodeSelectorTerm, node: Node) -> bool:
    """Say whether a node meets all requirements of a term. A term without any matches no node."""
    return (
        bool(term.match_expressions or term.match_fields)
        and all(_holds(expression, node.labels.get(expression.key)) for expression in term.match_expressions)
        and all(field.key == "metadata.name" and _holds(field, node.name) for field in term.match_fields)
    )


def _holds(node_requirement: NodeRequirement, value: str | None) -> bool:
    """Evaluate one requirement. An unknown operator never holds.

    Source: k8s.io/apimachinery/pkg/labels/selector.go.
    """
    match node_requirement.operator:
        case "In":
            return value is not None and value in node_requirement.values
        case "NotIn":
            return value is None or value not in node_requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            try:
                (limit,) = map(_whole, node_requirement.values)
                number = _whole(value or "")
            except ValueError:
                return False
            return number > limit if node_requirement.operator == "Gt" else number < limit
        case _:
            return False


def _whole(text: str) -> int:
    """Read a whole number in ASCII digits.

    Python's `int` accepts digits of all scripts, blanks and underscores.

    Errors: raises ValueError for any other text.
    """
    if not text.isascii() or not text.removeprefix("-").removeprefix("+").isdecimal():
        raise ValueError(f"not a whole number: {text!r}")
    return int(text)
