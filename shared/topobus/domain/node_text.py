"""Writes sets of NUMA nodes and lists of names for people: an empty set of nodes is told as unknown, never printed as a name."""

from __future__ import annotations

from collections.abc import Sequence

from topobus.domain.idset import NodeSet

__all__ = ["first_of", "on_nodes"]

_SHOWN = 8


def on_nodes(nodes: NodeSet, *, has_unknown: bool = False) -> str:
    """Say on which NUMA nodes something is; `has_unknown`: the machine does not tell the node of a part of it.

    >>> on_nodes(NodeSet(0, 1)), on_nodes(NodeSet(0), has_unknown=True), on_nodes(NodeSet())
    ('on NUMA node 0-1', 'on NUMA node 0 and an unknown one', 'on an unknown NUMA node')
    """
    if not nodes:
        return "on an unknown NUMA node"
    return f"on NUMA node {nodes}{' and an unknown one' if has_unknown else ''}"


def first_of(names: Sequence[str]) -> str:
    """List the first eight names, and how many more there are.

    >>> first_of(["a", "b"])
    'a, b'
    """
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
