"""What the controller knows: copies of all machines, inventories, ledgers and objects, and what an allocation needs of them.

Flows in: values as the watches bring them. Flows out: the nodes to try for a claim and the input for each. It reads and writes nothing; the one mutable thing
in it is the copy itself, owned by the shell's one loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from topobus.contracts.kubernetes import limits
from topobus.contracts.kubernetes.objects import NODE_ANNOTATION, metadata_of, name_of
from topobus.contracts.kubernetes.resource import CelSelector, ClaimSpec, DeviceClassSpec, Selector, SliceSpec
from topobus.contracts.kubernetes.shape import Problem, read_as
from topobus.contracts.messages import ApiObject
from topobus.controller.core.claims import allocation_of, owner_of
from topobus.controller.core.holdings import ClaimHoldings
from topobus.controller.core.inventory import holders_from_ledger, slices_from_inventory
from topobus.controller.core.pods import claim_names
from topobus.controller.core.pools import Pool, gather_pools
from topobus.controller.core.values import ALL_GATES, AllocationInput, ClaimToAllocate, DeviceId, Mode, Node, Slice, Usage
from topobus.domain.alignment.view import node_view
from topobus.domain.device import Device, Inventory, driver_name
from topobus.domain.errors import ContractError
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.request import Owner
from topobus.domain.view import AlignmentOptions, NodeView

__all__ = ["ObjectKey", "Stored", "World"]


class ObjectKey(NamedTuple):
    """Where an object is stored."""

    kind: str
    namespace: str
    name: str


class Stored(NamedTuple):
    """An object with the revision it was read at."""

    revision: int
    value: ApiObject


class World:
    """All copies. `supply` grows with every change that may let a waiting claim fit."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.inventories: dict[tuple[str, str], Inventory] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.objects: dict[ObjectKey, Stored] = {}
        self.supply = 0
        self._slices: dict[str, dict[str, tuple[Slice, ...]]] = {}
        self._classes: dict[str, DeviceClassSpec] = {}
        self._foreign: dict[ObjectKey, Slice] = {}
        self._held = ClaimHoldings()
        self._pools: dict[str, tuple[Pool, ...]] = {}
        self._claims_of: dict[ObjectKey, tuple[str, ...]] = {}
        self._users: dict[tuple[str, str], set[ObjectKey]] = {}
        self._built_in: dict[str, DeviceClassSpec] = {}
        self._in_ledgers: dict[str, dict[DeviceId, Owner]] = {}
        self._freedom: dict[str, int] = {}
        self._freedom_everywhere = 0

    def put_machine(self, machine: Machine) -> None:
        """Take in a machine."""
        if machine.node not in self.machines:
            self._free(machine.node)
        self.machines[machine.node] = machine

    def drop_machine(self, node: str) -> None:
        """Forget a machine."""
        self.machines.pop(node, None)

    def put_inventory(self, inventory: Inventory) -> None:
        """Take in an inventory."""
        key = (inventory.node, inventory.device_class)
        self.inventories[key] = inventory
        self._slices.setdefault(inventory.node, {})[inventory.device_class] = slices_from_inventory(inventory)
        self._pools.pop(inventory.node, None)
        self._in_ledgers.pop(inventory.node, None)
        self._built_in = _built_in_classes(device_class for _, device_class in self.inventories)
        self._free(inventory.node)

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Forget an inventory."""
        self.inventories.pop((node, device_class), None)
        self._slices.get(node, {}).pop(device_class, None)
        self._pools.pop(node, None)

    def put_ledger(self, ledger: Ledger) -> None:
        """Take in a ledger."""
        before = self.ledgers.get(ledger.node)
        self.ledgers[ledger.node] = ledger
        self._in_ledgers.pop(ledger.node, None)
        if before is None or not _held_in(before) <= _held_in(ledger):
            self._free(ledger.node)

    def drop_ledger(self, node: str) -> None:
        """Forget a ledger."""
        self.ledgers.pop(node, None)
        self._in_ledgers.pop(node, None)
        self._free(node)

    def freedom_of(self, node: str) -> Hashable:
        """Tell states of a node apart between which something may have become free; while it is the same, what did not fit does not fit."""
        return self._freedom.get(node, 0), self._freedom_everywhere

    def _free(self, node: str | None) -> None:
        """Note that something may be free now: on one node, or on all."""
        self.supply += 1
        if node is None:
            self._freedom_everywhere += 1
        else:
            self._freedom[node] = self._freedom.get(node, 0) + 1

    def put_object(self, key: ObjectKey, stored: Stored) -> None:
        """Take in an object.

        Errors: raises ContractError for a class or slice that nobody can read; it counts as absent then.
        """
        self._classes.pop(key.name if key.kind == "deviceclass" else "", None)
        self._foreign.pop(key, None)
        self.objects[key] = stored
        if key.kind in ("deviceclass", "resourceslice"):
            self._free(None)
            self._pools.clear()
        elif key.kind == "resourceclaim":
            self._let_go(self._held.put(key, stored.value))
        elif key.kind == "pod":
            self._put_pod(key, stored.value)
        where = name_of(stored.value)
        if key.kind == "deviceclass":
            device_class = read_as(stored.value.spec, DeviceClassSpec, where=where)
            _refuse(limits.check_class(device_class), where)
            self._classes[key.name] = device_class
        elif key.kind == "resourceslice":
            spec = read_as(stored.value.spec, SliceSpec, where=where)
            # One wrong amount in a slice would end every search that meets it.
            _refuse(limits.check_slice(spec), where)
            self._foreign[key] = Slice(key.name, spec)

    def _let_go(self, pools: frozenset[str]) -> None:
        """Note in which pools claims let something go; a pool that is not a node's is everybody's."""
        for pool in pools:
            self._free(pool if pool in self._slices else None)

    def _put_pod(self, key: ObjectKey, pod: ApiObject | None) -> None:
        """Remember which claims a pod uses."""
        for name in self._claims_of.pop(key, ()):
            self._users[key.namespace, name].discard(key)
        if pod is not None:
            self._claims_of[key] = claim_names(pod)
            for name in self._claims_of[key]:
                self._users.setdefault((key.namespace, name), set()).add(key)

    def drop_object(self, key: ObjectKey) -> Stored | None:
        """Forget an object; gives what was known of it."""
        self._classes.pop(key.name if key.kind == "deviceclass" else "", None)
        self._foreign.pop(key, None)
        if key.kind in ("deviceclass", "resourceslice"):
            self._free(None)
            self._pools.clear()
        elif key.kind == "resourceclaim":
            self._let_go(self._held.put(key, None))
        elif key.kind == "pod":
            self._put_pod(key, None)
        return self.objects.pop(key, None)

    def forget_objects(self) -> None:
        """Forget all objects: the store was lost, a new snapshot follows."""
        for key in tuple(self.objects):
            self.drop_object(key)

    def claims(self) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List all claims, oldest first."""
        found = [(key, stored) for key, stored in self.objects.items() if key.kind == "resourceclaim"]
        return tuple(sorted(found, key=lambda item: (str(item[1].value.metadata.get("creationTimestamp") or ""), item[0])))

    def nodes_for(self, claim: ApiObject) -> tuple[str, ...]:
        """List the nodes to try, in order.

        The one where the claim holds devices already, else the one it names, else that of other claims of its pod, else all by name.
        """
        key = owner_of(claim).key
        holding = sorted(node for node, ledger in self.ledgers.items() if key in ledger.allocations)
        if holding:
            return tuple(holding)
        named = metadata_of(claim).annotations.get(NODE_ANNOTATION) or self._node_of_mates(claim)
        return (named,) if named else self.nodes()

    def mates(self, claim: ApiObject) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List the other claims of the pods that use this one, by name: a pod runs on one node, so they are best served together."""
        metadata = metadata_of(claim)
        namespace = metadata.namespace or "default"
        names = {name for pod in self._users.get((namespace, metadata.name), ()) for name in self._claims_of[pod]} - {metadata.name}
        keys = (ObjectKey("resourceclaim", namespace, name) for name in sorted(names))
        return tuple((key, self.objects[key]) for key in keys if key in self.objects)

    def missing_mates(self, claim: ApiObject) -> tuple[str, ...]:
        """List claims that are not stored yet and without which no pod that uses this one can start; none when one pod has all of its own."""
        metadata = metadata_of(claim)
        namespace = metadata.namespace or "default"
        missing = [
            tuple(name for name in self._claims_of[pod] if ObjectKey("resourceclaim", namespace, name) not in self.objects)
            for pod in sorted(self._users.get((namespace, metadata.name), ()))
        ]
        return min(missing, key=len, default=())

    def _node_of_mates(self, claim: ApiObject) -> str | None:
        """Name the node on which another claim of the same pod is allocated."""
        for _, other in self.mates(claim):
            try:
                allocation = allocation_of(other.value)
            except ContractError:
                continue
            pools = {one.pool for one in allocation.devices.results} if allocation is not None else set()
            nodes = pools & set(self.nodes())
            if nodes:
                return min(nodes)
        return None

    def nodes(self) -> tuple[str, ...]:
        """List all nodes that published a machine or an inventory, by name."""
        return tuple(sorted(self.machines.keys() | {node for node, _ in self.inventories}))

    def view_of(self, node: str) -> NodeView | None:
        """Show a node as a plan sees it; None when it has published no machine. Its settings are its own to apply: these are the defaults."""
        machine = self.machines.get(node)
        if machine is None:
            return None
        inventories = {device_class: one for (there, device_class), one in self.inventories.items() if there == node}
        return node_view(machine, inventories, self.ledgers.get(node), AlignmentOptions(), CpuSet())

    def devices_of(self, node: str) -> tuple[DeviceId, ...]:
        """List the devices that a node publishes itself."""
        return tuple(one.id for pool in self._pools_of(node) if pool.id.pool == node for one in pool.candidates)

    def cpu_devices(self, node: str) -> tuple[Device, ...]:
        """List a node's CPUs as devices."""
        cpus = self.inventories.get((node, "cpu"))
        return cpus.devices if cpus is not None else ()

    def input_for(
        self,
        node: str,
        wanted: Sequence[tuple[ApiObject, ClaimSpec]],
        *,
        mode: Mode = Mode.CORRECTED,
        excluded: Mapping[DeviceId, str] | None = None,
    ) -> AllocationInput:
        """Collect what an allocation of these claims on one node depends on.

        Shapes: wanted — one claim, or several of one pod; excluded — devices that they must not get now, and why.
        """
        owners = [owner_of(claim) for claim, _ in wanted]
        pools = self._pools_of(node)
        names = {one.id.pool for one in pools}
        in_ledger, own = self._in_ledger(node, owners)
        uids = frozenset(one.uid for one in owners)
        others = (one.id for pool in pools if pool.id.pool == node for one in pool.candidates if one.id not in own) if own else ()
        return AllocationInput(
            node=_node(node),
            claims=tuple(
                ClaimToAllocate(f"{owner.namespace}/{owner.name}", spec, len(owners) > 1)
                for owner, (_, spec) in zip(owners, wanted, strict=True)
            ),
            classes=self._built_in | self._classes,
            pools=pools,
            usage=Usage(
                self._held.holders(names, except_uids=uids) | in_ledger,
                self._held.consumed(names, except_uids=uids),
                dict.fromkeys(others, f"{owners[0]} holds other devices here already") | dict(excluded or {}),
            ),
            mode=mode,
        )

    def holds_devices(self, claim: ApiObject) -> bool:
        """Say whether a ledger shows devices of the claim, whatever its status says."""
        key = owner_of(claim).key
        return any(key in ledger.allocations for ledger in self.ledgers.values())

    def _pools_of(self, node: str) -> tuple[Pool, ...]:
        """Gather a node's pools, once until a slice changes."""
        known = self._pools.get(node)
        if known is None:
            slices = [one for _, found in sorted(self._slices.get(node, {}).items()) for one in found]
            slices.extend(self._foreign[key] for key in sorted(self._foreign))
            known = self._pools[node] = gather_pools(slices, _node(node), ALL_GATES)
        return known

    def _in_ledger(self, node: str, owners: Sequence[Owner]) -> tuple[dict[DeviceId, str], frozenset[DeviceId]]:
        """Say what a node's ledger holds for others, and what it holds for the claims themselves.

        A claim that holds devices already (a crash came between ledger and status) is to get those or none.
        """
        held = self._in_ledgers.get(node)
        if held is None:
            ledger = self.ledgers.get(node)
            held = self._in_ledgers[node] = holders_from_ledger(ledger, self.cpu_devices(node)) if ledger is not None else {}
        own = frozenset(one for one, holder in held.items() if holder in owners)
        return {one: str(holder) for one, holder in held.items() if one not in own}, own


def _built_in_classes(device_classes: Iterable[str]) -> dict[str, DeviceClassSpec]:
    """Offer one class for each driver of ours, named like it; a stored DeviceClass of the same name wins."""
    drivers = sorted({driver_name(device_class) for device_class in set(device_classes)})
    return {name: DeviceClassSpec(selectors=(Selector(cel=CelSelector(expression=f'device.driver == "{name}"')),)) for name in drivers}


def _held_in(ledger: Ledger) -> set[tuple[str, str, str]]:
    """List what a ledger holds, with the holder."""
    return {
        (key, device_class, device)
        for key, allocation in ledger.allocations.items()
        for holding in allocation.holdings
        for device_class, devices in (*holding.devices.items(), ("cpu", tuple(str(cpu) for cpu in holding.cpus)))
        for device in devices
    }


def _node(name: str) -> Node:
    return Node(name, {"kubernetes.io/hostname": name})


def _refuse(problems: list[Problem], where: str) -> None:
    if problems:
        raise ContractError(f"{where}: " + "; ".join(str(one) for one in problems))
