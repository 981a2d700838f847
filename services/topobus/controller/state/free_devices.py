"""Tracks the free devices of each node: slices, what claims and ledgers hold of them, and which
nodes changed since a mark.

A node's devices and their use are cached, and rebuilt only when something of that node changed, so
the cost of a query does not depend on other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from topobus.controller.state.holdings import ClaimHoldings
from topobus.controller.state.inventory_slices import consumed_by_pods, holders_from_ledger
from topobus.controller.state.links import Links
from topobus.controller.state.slice_index import Origin, SliceIndex
from topobus.engine.allocation.node_table import NodeTable
from topobus.engine.allocation.pools import DeviceViews, Slice
from topobus.engine.allocation.values import ALL_GATES, DeviceId, Gate, Node, Usage, node_of
from topobus.engine.claims.stored import Stored
from topobus.engine.shapes.shape_parts import in_use
from topobus.values.device import Device
from topobus.values.dra_names import node_of_pool
from topobus.values.ledger import Ledger
from topobus.values.quantity import Quantity
from topobus.values.request import Owner

__all__ = ["Changes", "FreeDevices", "Mark", "TakenDevices"]

# Changes remembered for readers. A reader with an older mark searches all nodes again.
_REMEMBERED_CHANGES = 20_000
# Numbers of columns kept, some 100 bytes each. Then they are made again, for they grow with every
# kind of node that was ever seen.
_MOST_NUMBERS = 1_000_000

Mark = tuple[int, int]
"""The last change that a reader has seen. (0, -1) means none."""


class TakenDevices(NamedTuple):
    """The devices in use on a node: a bit mask over its devices in order, and the amounts in use of
    shared devices.
    """

    taken: int
    shared: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] = ()


class Changes(NamedTuple):
    """The nodes that changed since a mark. `nodes` is None when that is unknown, or when all
    did.
    """

    mark: Mark
    nodes: tuple[tuple[str, bool], ...] | None
    """Nodes in order of change, with whether something may have become free there."""


class _Taken(NamedTuple):
    usage: Usage
    state: TakenDevices


class FreeDevices:
    """Slices and the devices in use.

    `count` grows with every change that may let a waiting claim fit. Args: describe — returns a
    node as node selectors see it, by its name; a change of its answer requires a call of `outdate`;
    views — derives what searches need of a device.
    """

    def __init__(
        self,
        describe: Callable[[str], Node] = node_of,
        views: DeviceViews | None = None,
        gates: frozenset[Gate] = ALL_GATES,
    ) -> None:
        self._describe = describe
        self.count = 0
        self.epoch = 0
        """Grows when everything may have changed."""
        self._book = SliceIndex(views, gates)
        self._held = ClaimHoldings()
        self._ledgers: dict[str, Ledger] = {}
        self._cpus: dict[str, tuple[Device, ...]] = {}
        self._owners: Links[str, str] = Links()
        """Each node with the owners in its ledger, by their keys."""
        self._in_ledgers: dict[str, dict[DeviceId, Owner]] = {}
        self._taken: dict[str, _Taken] = {}
        self._freedom: dict[str, int] = {}
        self._changes: list[tuple[str, bool]] = []
        self._forgotten = 0

    def put_slices(self, origin: Origin, slices: tuple[Slice, ...]) -> None:
        """Replace all slices of an origin."""
        nodes = self._book.put(origin, slices)
        if self._book.numbers > _MOST_NUMBERS:
            self._book.clear_tables()
            nodes = None
        if nodes is None:
            self.free(None)
            return
        for node in sorted(nodes):
            self.free(node)

    def put_cpus(self, node: str, cpus: tuple[Device, ...]) -> None:
        """Store the device names of a node's CPUs, which map the CPUs of its ledger to devices of
        claims.
        """
        self._cpus[node] = cpus
        self._in_ledgers.pop(node, None)
        self._taken.pop(node, None)

    def put_claim(self, key: Hashable, claim: Stored | None) -> None:
        """Store a claim, or remove it with None."""
        shift = self._held.put(key, claim)
        for pool in shift.touched:
            nodes = self._book.nodes_of(pool)
            is_freed = pool in shift.freed
            if nodes is None:
                # Any node may reach the pool. If devices were only taken, cached misses stay valid.
                self.free(None) if is_freed else self._taken.clear()
                continue
            for node in sorted(nodes):
                self.free(node) if is_freed else self._note(node, is_freed=False)

    def put_ledger(self, node: str, ledger: Ledger | None) -> None:
        """Store a node's ledger, or remove it with None."""
        before = self._ledgers.pop(node, None)
        if ledger is not None:
            self._ledgers[node] = ledger
        self._owners.put(node, ledger.allocations if ledger is not None else ())
        self._in_ledgers.pop(node, None)
        # A node's first ledger takes and frees nothing.
        if ledger is None or (before is not None and not _held_in(before) <= _held_in(ledger)):
            self.free(node)
        else:
            self._note(node, is_freed=False)

    def free(self, node: str | None) -> None:
        """Record that something may be free now: on one node, or (None) on all."""
        self.count += 1
        if node is None:
            self.epoch += 1
            self._taken.clear()
            self._forgotten += len(self._changes)
            self._changes.clear()
        else:
            self._freedom[node] = self._freedom.get(node, 0) + 1
            self._note(node, is_freed=True)

    def freedom_of(self, node: str) -> Hashable:
        """Return a value that changes when devices of the node become free. While it is the same, a
        request that did not fit still does not fit.
        """
        return self._freedom.get(node, 0), self.epoch

    def changes_since(self, mark: Mark) -> Changes:
        """List the nodes that changed since a mark."""
        now = (self._forgotten + len(self._changes), self.epoch)
        start = mark[0] - self._forgotten
        return Changes(now, tuple(self._changes[start:]) if start >= 0 and mark[1] == self.epoch else None)

    def nodes_holding(self, owner: str) -> tuple[str, ...]:
        """Name the nodes whose ledgers hold something for an owner, by its key."""
        return tuple(sorted(self._owners.keys_of(owner)))

    def is_new(self, key: Hashable, owner: Owner) -> bool:
        """Say whether a claim holds nothing yet. All such claims see the same free devices."""
        return not self._owners.keys_of(owner.key) and not self._held.holds(key)

    def holds(self, key: Hashable) -> bool:
        """Say whether a claim holds devices by its own record, which can be read."""
        return self._held.holds(key)

    def table_of(self, node: str) -> NodeTable:
        """Return a node's devices."""
        return self._book.table(self._describe(node))

    def outdate(self, node: str) -> None:
        """Drop the cached devices of a node whose description changed."""
        self._book.drop_table(node)
        self.free(node)

    def state_of(self, node: str) -> TakenDevices:
        """Return the devices in use on a node."""
        return self._taken_on(node).state

    def usage_for(
        self, node: str, owners: Sequence[Owner], excluded: Mapping[DeviceId, str], *, ignoring: Collection[str] = ()
    ) -> Usage:
        """Return the devices in use on a node, without those that these claims hold themselves.

        A claim that holds devices in the ledger already (a crash came between ledger and status) is
        to get those, or shapes of them, or none.
        Shapes: ignoring — uids of claims whose own record of what they hold is ignored here.
        """
        own_owners, table = self._in_ledger(node), self.table_of(node)
        parts = table.parts
        own = {device for device, holder in own_owners.items() if holder in owners}
        keys = [("resourceclaim", owner.namespace, owner.name) for owner in owners]
        if not own and not ignoring and not any(self._held.holds(key) for key in keys):
            usage = self._taken_on(node).usage
            return Usage(usage.holders, usage.consumed, excluded) if excluded else usage
        pools = table.pools
        names = {pool.id.pool for pool in pools}
        uids = frozenset(owner.uid for owner in owners) | frozenset(ignoring)
        others = (
            (
                candidate.id
                for pool in pools
                if node_of_pool(pool.id.pool) == node
                for candidate in pool.candidates
                if not own.issuperset(parts.get(candidate.id, (candidate.id,)))
            )
            if own
            else ()
        )
        return Usage(
            in_use(
                self._held.holders(names, except_uids=uids),
                {device_id: str(holder) for device_id, holder in own_owners.items() if device_id not in own},
                parts,
                table.counting,
            ),
            self._with_pods(node, self._held.consumed(names, except_uids=uids)),
            dict.fromkeys(others, f"{owners[0]} holds other devices here already") | dict(excluded),
        )

    def _note(self, node: str, *, is_freed: bool) -> None:
        """Record that a node changed."""
        self._taken.pop(node, None)
        self._changes.append((node, is_freed))
        if len(self._changes) > _REMEMBERED_CHANGES:
            self._forgotten += _REMEMBERED_CHANGES // 2
            del self._changes[: _REMEMBERED_CHANGES // 2]

    def _in_ledger(self, node: str) -> dict[DeviceId, Owner]:
        held = self._in_ledgers.get(node)
        if held is None:
            ledger = self._ledgers.get(node)
            held = self._in_ledgers[node] = (
                holders_from_ledger(ledger, self._cpus.get(node, ())) if ledger is not None else {}
            )
        return held

    def _with_pods(
        self, node: str, consumed: dict[DeviceId, dict[str, Quantity]]
    ) -> dict[DeviceId, dict[str, Quantity]]:
        """Add what pods hold of shared devices without a claim."""
        ledger = self._ledgers.get(node)
        for device, amounts in consumed_by_pods(ledger).items() if ledger is not None else ():
            used = consumed.setdefault(device, {})
            for name, amount in amounts.items():
                used[name] = used.get(name, Quantity(0)) + amount
        return consumed

    def _taken_on(self, node: str) -> _Taken:
        taken = self._taken.get(node)
        if taken is None:
            table = self.table_of(node)
            names = {pool.id.pool for pool in table.pools}
            holders = in_use(
                self._held.holders(names, except_uids=()),
                {device_id: str(holder) for device_id, holder in self._in_ledger(node).items()},
                table.parts,
                table.counting,
            )
            consumed = self._with_pods(node, self._held.consumed(names, except_uids=()))
            state = TakenDevices(_bits(table.places, holders), _amounts(table.places, consumed))
            taken = self._taken[node] = _Taken(Usage(holders, consumed), state)
        return taken


def _bits(places: Mapping[DeviceId, int], devices: Iterable[DeviceId]) -> int:
    bits = 0
    for device in devices:
        place = places.get(device)
        if place is not None:
            bits |= 1 << place
    return bits


def _amounts(
    places: Mapping[DeviceId, int], consumed: Mapping[DeviceId, Mapping[str, Quantity]]
) -> tuple[tuple[int, tuple[tuple[str, int], ...]], ...]:
    return tuple(
        (places[device], tuple(sorted((name, amount.nano) for name, amount in amounts.items())))
        for device, amounts in sorted(consumed.items())
        if device in places
    )


def _held_in(ledger: Ledger) -> set[tuple[str, str, str]]:
    """List what a ledger holds, with the holder."""
    return {
        (key, device_class, device)
        for key, allocation in ledger.allocations.items()
        for holding in allocation.holdings
        for device_class, devices in (*holding.devices.items(), ("cpu", tuple(str(cpu) for cpu in holding.cpus)))
        for device in devices
    }
