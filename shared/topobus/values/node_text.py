"""Writes sets of NUMA nodes, lists of names and numbers of things for people.

An empty set of nodes is shown as unknown, never as a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.values.idset import NodeSet

__all__ = ["counted", "first_of", "on_nodes"]

_SHOWN = 8


def on_nodes(nodes: NodeSet, *, has_unknown: bool = False) -> str:
    """Write on which NUMA nodes something is.

    Shapes: has_unknown — True: the machine does not report the node of a part of it.

    >>> on_nodes(NodeSet(0, 1)), on_nodes(NodeSet(0), has_unknown=True), on_nodes(NodeSet())
    ('on NUMA node 0-1', 'on NUMA node 0 and an unknown one', 'on an unknown NUMA node')
    """
    if not nodes:
        return "on an unknown NUMA node"
    return f"on NUMA node {nodes}{' and an unknown one' if has_unknown else ''}"


def first_of(names: Sequence[str], most: int = _SHOWN) -> str:
    """List the first names, eight by default, and how many more there are.

    >>> first_of(["a", "b"]), first_of(["a", "b", "c"], 1)
    ('a, b', 'a and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, noun: str) -> str:
    """Count things.

    >>> counted(0, "owner"), counted(1, "owner"), counted(2, "owner")
    ('no owners', '1 owner', '2 owners')
    """
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
