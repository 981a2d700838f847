"""An index of all slices by node and by pool, so that the devices of a node are built from its own
slices only.

Slices are stored by origin (an inventory or an object). A node's table is built at its first use
and cached until a slice that concerns the node changes. Upstream reads all slices of the cluster
for each node. The index gives the same result from the pools that the node can reach.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from topobus.controller.state.links import Links
from topobus.engine.allocation.node_table import NodeTable, Numbers
from topobus.engine.allocation.pools import DeviceViews, PoolState, Slice, gather_pools
from topobus.engine.allocation.values import ALL_GATES, Gate, Node, PoolId

__all__ = ["Origin", "SliceIndex"]

Origin = tuple[int, Hashable]
"""The source of slices: a rank, then a name. Slices of one pool with equal names are tried in this
order."""


class SliceIndex:
    """Slices, and the tables made of them."""

    def __init__(self, views: DeviceViews | None = None, gates: frozenset[Gate] = ALL_GATES) -> None:
        self._views = views or DeviceViews()
        self._gates = gates
        self._slices: dict[Origin, tuple[Slice, ...]] = {}
        self._nodes: Links[Origin, str] = Links()
        """The nodes that the slices of an origin name. Empty for a slice that names none."""
        self._pools: Links[Origin, PoolId] = Links()
        self._broken: set[PoolId] = set()
        self._tables: dict[str, NodeTable] = {}
        self._numbers = Numbers()

    def put(self, origin: Origin, slices: tuple[Slice, ...]) -> frozenset[str] | None:
        """Replace all slices of an origin.

        Returns the nodes that this may concern, None for all.
        """
        before = self._slices.pop(origin, ())
        if slices:
            self._slices[origin] = slices
        self._nodes.put(origin, [resource_slice.spec.node_name or "" for resource_slice in slices])
        self._pools.put(origin, map(_pool_of, slices))
        concerned = [
            self._outdate(pool, (*before, *slices))
            for pool in {_pool_of(resource_slice) for resource_slice in (*before, *slices)}
        ]
        node_sets = [nodes for nodes in concerned if nodes is not None]
        return frozenset().union(*node_sets) if len(node_sets) == len(concerned) else None

    def table(self, node: Node) -> NodeTable:
        """Return a node's devices, built once until a slice that concerns the node changes."""
        node_table = self._tables.get(node.name)
        if node_table is None:
            node_table = self._tables[node.name] = NodeTable(
                node, gather_pools(self._relevant(node.name), node, self._gates, self._views), self._numbers
            )
        return node_table

    def drop_table(self, node: str) -> None:
        """Drop the cached table of one node whose labels changed."""
        self._tables.pop(node, None)

    def clear_tables(self) -> None:
        """Drop all cached tables and their numbers, which grow with
        every kind of node ever seen.
        """
        self._tables.clear()
        self._numbers = Numbers()

    @property
    def numbers(self) -> int:
        """How many different things were numbered."""
        return len(self._numbers)

    def nodes_of(self, pool: PoolId) -> frozenset[str] | None:
        """Name the nodes to which a pool belongs. None when any node may reach it."""
        nodes = [
            resource_slice.spec.node_name
            for origin in self._pools.keys_of(pool)
            for resource_slice in self._slices[origin]
            if _pool_of(resource_slice) == pool
        ]
        return frozenset(node for node in nodes if node) if all(nodes) else None

    def _outdate(self, pool: PoolId, changed: Iterable[Slice]) -> frozenset[str] | None:
        """Drop the tables that a change in a pool may concern: those of the nodes that its slices
        name, or all when a slice names none.
        """
        slices = [
            *changed,
            *(resource_slice for origin in self._pools.keys_of(pool) for resource_slice in self._slices[origin]),
        ]
        slices = [resource_slice for resource_slice in slices if _pool_of(resource_slice) == pool]
        was_broken = pool in self._broken
        self._broken.discard(pool)
        # Upstream lets counters concern every node, whatever node they name. Another node observes
        # only whether their pool is complete.
        if any(
            resource_slice.spec.shared_counters and resource_slice.spec.node_name for resource_slice in slices
        ) and not self._is_whole(pool):
            self._broken.add(pool)
        if was_broken or pool in self._broken or not all(resource_slice.spec.node_name for resource_slice in slices):
            self._tables.clear()
            return None
        nodes = frozenset([resource_slice.spec.node_name or "" for resource_slice in slices])
        for node in nodes:
            self._tables.pop(node, None)
        return nodes

    def _is_whole(self, pool: PoolId) -> bool:
        slices = [
            resource_slice
            for origin in sorted(self._pools.keys_of(pool), key=str)
            for resource_slice in self._slices[origin]
        ]
        pools = gather_pools(slices, Node(""), self._gates)
        return all(other_pool.state is PoolState.READY for other_pool in pools if other_pool.id == pool)

    def _relevant(self, node: str) -> list[Slice]:
        """Collect the slices that an allocation on a node may read, in the order of all slices."""
        origins = self._nodes.keys_of(node) | self._nodes.keys_of("")
        pools = {
            _pool_of(resource_slice) for origin in origins for resource_slice in self._slices[origin]
        } | self._broken
        origins = frozenset(origins).union(*map(self._pools.keys_of, pools))
        return [
            resource_slice
            for origin in sorted(origins, key=_order)
            for resource_slice in self._slices[origin]
            if _pool_of(resource_slice) in pools
        ]


def _pool_of(resource_slice: Slice) -> PoolId:
    return PoolId(resource_slice.spec.driver, resource_slice.spec.pool.name)


def _order(origin: Origin) -> tuple[int, str]:
    return origin[0], str(origin[1])
