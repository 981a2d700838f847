"""What the controller knows: copies of all machines, inventories, ledgers and objects, and what an allocation needs of them.

Flows in: values as the watches bring them. Flows out: the nodes to try for a claim and the input for each. It reads and writes nothing; the one mutable thing
in it is the copy itself, owned by the shell's one loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from topobus.contracts.kubernetes import limits
from topobus.contracts.kubernetes.objects import NODE_ANNOTATION, metadata_of, name_of
from topobus.contracts.kubernetes.resource import CelSelector, ClaimSpec, DeviceClassSpec, Selector, SliceSpec
from topobus.contracts.kubernetes.shape import Problem, read_as
from topobus.contracts.messages import ApiObject
from topobus.controller.core.claims import attempt_of, held_by, owner_of, status_of
from topobus.controller.core.inventory import holders_from_ledger, slices_from_inventory
from topobus.controller.core.pods import owner_pod_uid
from topobus.controller.core.values import AllocationInput, ClaimToAllocate, DeviceId, Mode, Node, Slice, Usage
from topobus.domain.device import Device, Inventory, driver_name
from topobus.domain.errors import ContractError
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.quantity import Quantity

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
        self._slices: dict[tuple[str, str], tuple[Slice, ...]] = {}
        self._classes: dict[str, DeviceClassSpec] = {}
        self._foreign: dict[ObjectKey, Slice] = {}

    def put_machine(self, machine: Machine) -> None:
        """Take in a machine."""
        self.machines[machine.node] = machine
        self.supply += 1

    def drop_machine(self, node: str) -> None:
        """Forget a machine."""
        self.machines.pop(node, None)

    def put_inventory(self, inventory: Inventory) -> None:
        """Take in an inventory."""
        key = (inventory.node, inventory.device_class)
        self.inventories[key] = inventory
        self._slices[key] = slices_from_inventory(inventory)
        self.supply += 1

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Forget an inventory."""
        self.inventories.pop((node, device_class), None)
        self._slices.pop((node, device_class), None)

    def put_ledger(self, ledger: Ledger) -> None:
        """Take in a ledger."""
        self.ledgers[ledger.node] = ledger
        self.supply += 1

    def drop_ledger(self, node: str) -> None:
        """Forget a ledger."""
        self.ledgers.pop(node, None)

    def put_object(self, key: ObjectKey, stored: Stored) -> None:
        """Take in an object.

        Errors: raises ContractError for a class or slice that nobody can read; it counts as absent then.
        """
        self.drop_object(key)
        self.objects[key] = stored
        if key.kind in ("deviceclass", "resourceslice"):
            self.supply += 1
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

    def drop_object(self, key: ObjectKey) -> Stored | None:
        """Forget an object; gives what was known of it."""
        self._classes.pop(key.name if key.kind == "deviceclass" else "", None)
        self._foreign.pop(key, None)
        known = self.objects.pop(key, None)
        if known is not None and key.kind == "resourceclaim":
            self.supply += 1  # what it held may be free now
        return known

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
        named = metadata_of(claim).annotations.get(NODE_ANNOTATION) or self._sibling_node(claim)
        return (named,) if named else self.nodes()

    def _sibling_node(self, claim: ApiObject) -> str | None:
        """Name the node on which another claim of the same pod is allocated: a pod runs on one node."""
        pod = owner_pod_uid(claim)
        if pod is None:
            return None
        for other in self._other_claims(claim):
            if owner_pod_uid(other) == pod:
                try:
                    attempt, allocation = attempt_of(other), status_of(other).allocation
                except ContractError:
                    continue
                pools = {one.pool for one in allocation.devices.results} if allocation is not None else set()
                nodes = ({attempt.node} if attempt is not None else set()) | (pools & set(self.nodes()))
                if nodes:
                    return min(nodes)
        return None

    def nodes(self) -> tuple[str, ...]:
        """List all nodes that published a machine or an inventory, by name."""
        return tuple(sorted(self.machines.keys() | {node for node, _ in self.inventories}))

    def cpu_devices(self, node: str) -> tuple[Device, ...]:
        """List a node's CPUs as devices."""
        cpus = self.inventories.get((node, "cpu"))
        return cpus.devices if cpus is not None else ()

    def input_for(self, node: str, claim: ApiObject, spec: ClaimSpec, mode: Mode = Mode.CORRECTED) -> AllocationInput:
        """Collect what an allocation of one claim on one node depends on."""
        metadata = metadata_of(claim)
        slices = [one for key in sorted(self._slices) if key[0] == node for one in self._slices[key]]
        slices.extend(self._foreign[key] for key in sorted(self._foreign))
        return AllocationInput(
            node=Node(node, {"kubernetes.io/hostname": node}),
            claims=(ClaimToAllocate(f"{metadata.namespace or 'default'}/{metadata.name}", spec),),
            classes=self._built_in_classes() | self._classes,
            slices=tuple(slices),
            usage=Usage(self._holders(node, claim), self._consumed(claim)),
            mode=mode,
        )

    def _built_in_classes(self) -> dict[str, DeviceClassSpec]:
        """Offer one class for each driver of ours, named like it; a stored DeviceClass of the same name wins."""
        drivers = sorted({driver_name(device_class) for _, device_class in self.inventories})
        return {name: DeviceClassSpec(selectors=(Selector(cel=CelSelector(expression=f'device.driver == "{name}"')),)) for name in drivers}

    def _holders(self, node: str, claim: ApiObject) -> dict[DeviceId, str]:
        """Say who holds what: the node's ledger, and other claims' allocations and attempts. What the claim itself holds is free to it.

        A claim that holds devices already (a crash came between ledger and status) gets those or none: all others count as taken.
        """
        mine = owner_of(claim)
        held: dict[DeviceId, str] = {}
        for other in self._other_claims(claim):
            try:
                held |= held_by(other)
            except ContractError:
                continue  # a malformed claim is told so where it is reconciled; what it holds stands in the ledger
        ledger = self.ledgers.get(node)
        if ledger is None:
            return held
        in_ledger = holders_from_ledger(ledger, self.cpu_devices(node))
        own = {one for one, holder in in_ledger.items() if holder == mine}
        held |= {one: str(holder) for one, holder in in_ledger.items() if one not in own}
        if own:
            for key, slices in self._slices.items():
                for one in slices if key[0] == node else ():
                    for device in one.spec.devices:
                        device_id = DeviceId(one.spec.driver, node, device.name)
                        if device_id not in own:
                            held.setdefault(device_id, f"nobody, but {mine} holds others already")
        return held

    def _consumed(self, claim: ApiObject) -> dict[DeviceId, dict[str, Quantity]]:
        """Add up the shares that other claims hold."""
        found: dict[DeviceId, dict[str, Quantity]] = {}
        for other in self._other_claims(claim):
            try:
                attempt = attempt_of(other)
                allocation = status_of(other).allocation or (attempt.allocation if attempt is not None else None)
                for granted in allocation.devices.results if allocation is not None else ():
                    if granted.share_id is not None:
                        used = found.setdefault(DeviceId(granted.driver, granted.pool, granted.device), {})
                        for name, amount in granted.consumed_capacity.items():
                            used[name] = used.get(name, Quantity(0)) + Quantity.parse(amount)
            except (ContractError, ValueError):
                continue  # as above
        return found

    def _other_claims(self, claim: ApiObject) -> Iterator[ApiObject]:
        uid = claim.metadata.get("uid")
        return (
            stored.value for key, stored in self.objects.items() if key.kind == "resourceclaim" and stored.value.metadata.get("uid") != uid
        )


def _refuse(problems: list[Problem], where: str) -> None:
    if problems:
        raise ContractError(f"{where}: " + "; ".join(str(one) for one in problems))
