"""The order of fitness: which of two masks kubelet's Topology Manager would keep.

A merge is the least element of a strict total order (docs/knowledge/topology-merge.md#theorem-1),
so neither the order of resources nor the number of times that a mask arises matters. This module
owns that order. The reachable masks are found elsewhere.
Source: kubelet 1.36 pkg/kubelet/cm/topologymanager/{policy,numa_info}.go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topobus.values.idset import NodeSet

__all__ = ["Distances", "Fit", "fit_order", "width_class"]

Distances = Sequence[Sequence[int]]
"""SLIT rows and columns by position in the sorted node set; empty when
the machine does not show them."""

Fit = Callable[[int], tuple[int, int, int]]
"""Sort key of a mask among masks with the same preference: the smallest is the fittest."""


def width_class(count: int, width: int) -> tuple[int, int]:
    """Rank the width of a mask that is not preferred: the target width, then the widest below it,
    then the narrowest above it.

    >>> sorted([1, 2, 3, 4], key=lambda count: width_class(count, 2))
    [2, 1, 3, 4]
    """
    if count == width:
        return (0, 0)
    return (1, -count) if count < width else (2, count)


def fit_order(nodes: NodeSet, distances: Distances = ()) -> Fit:
    """Make the order of fitness: fewer nodes, then nearer nodes when distances are given, then the
    smaller mask value.

    Shapes: distances — a row and a column per node of `nodes`, in its order.
    Units: distances as in SLIT, 10 = local.
    Cost: of one key: O(nodes of the mask x nodes / 8) with distances, O(1) without.
    Source: kubelet compares mean distances, the diagonal included, and only for masks of equal
            size, so the integer sum orders them the same.
    """
    if not distances:
        return lambda mask: (mask.bit_count(), 0, mask)
    ids = nodes.ids
    rows = {node: dict(zip(ids, row, strict=False)) for node, row in zip(ids, distances, strict=False)}

    # The sum over a mask's ordered pairs, by node: its row's sum over the mask,
    # looked up eight nodes at a time.
    tables = {node: _row_tables([rows[node].get(other, 0) for other in ids]) for node in ids if node in rows}
    place = {node: position for position, node in enumerate(ids)}

    def key(mask: int) -> tuple[int, int, int]:
        members = [node for node in ids if mask >> node & 1]
        packed = 0
        for node in members:
            packed |= 1 << place[node]
        chunks = packed.to_bytes(-(-len(ids) // 8), "little")
        total = 0
        for node in members:
            if node in tables:
                for table, chunk in zip(tables[node], chunks, strict=True):
                    total += table[chunk]
        return (len(members), total, mask)

    return key


def _row_tables(row: Sequence[int]) -> list[list[int]]:
    """For each eight columns the sums over all their subsets."""
    tables: list[list[int]] = []
    for start in range(0, len(row), 8):
        sums = [0]
        for distance in row[start : start + 8]:
            sums += [total + distance for total in sums]
        tables.append(sums)
    return tables
