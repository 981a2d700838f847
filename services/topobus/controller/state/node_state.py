"""What the nodes publish on the bus: machines, inventories, ledgers, alignments, and the services
that do not answer.

The planner of both homes uses this class alone. What is free for claims is in `ClusterState`. There
is no I/O. The copy is the only mutable value, and belongs to the event loop that runs the
controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from topobus.controller.state.shared_values import SharedValues
from topobus.engine.alignment.planning.node_view import aligned_view
from topobus.engine.allocation.values import DeviceId
from topobus.engine.health.strays import without_strays
from topobus.engine.scheduling.closer_devices import is_closest
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import class_of_device, node_of_pool
from topobus.values.idset import NodeSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.view import NodeAlignment, NodeView

__all__ = ["NodeState"]


class NodeState:
    """Copies of what each node published. Removing an unknown value has no effect."""

    def __init__(self) -> None:
        self.shared = SharedValues()
        """Shares equal parts of machines and inventories before they are put here."""
        self.machines: dict[str, Machine] = {}
        self.inventories: dict[tuple[str, str], Inventory] = {}
        """By node and device class."""
        self.ledgers: dict[str, Ledger] = {}
        self.alignments: dict[str, NodeAlignment] = {}
        self.maintenances: dict[tuple[str, str], ClassMaintenance] = {}
        """By node and device class: what operators, and repairs, did to devices."""
        self.silent: dict[tuple[str, str], str] = {}
        """Services that do not answer, by node and class, with the time of the first silence (RFC
        3339)."""
        self._inventories_of: dict[str, dict[str, Inventory]] = {}
        self._by_name: dict[tuple[str, str], dict[str, Device]] = {}
        self._nodes: tuple[str, ...] | None = None

    def nodes(self) -> tuple[str, ...]:
        """List all nodes that published a machine or an inventory, by name.

        Returns the same tuple while the names are the same.
        """
        if self._nodes is None:
            self._nodes = tuple(sorted(self.machines.keys() | self._inventories_of.keys()))
        return self._nodes

    def put_machine(self, machine: Machine) -> None:
        """Store a machine."""
        if machine.node not in self.machines:
            self._nodes = None
        self.machines[machine.node] = machine

    def drop_machine(self, node: str) -> None:
        """Remove a machine."""
        self._nodes = None
        self.machines.pop(node, None)

    def clear_machines(self) -> None:
        """Remove all machines: the store was lost, and a new snapshot follows."""
        for node in tuple(self.machines):
            self.drop_machine(node)

    def put_inventory(self, inventory: Inventory) -> None:
        """Store an inventory."""
        node, device_class = inventory.node, inventory.device_class
        if node not in self._inventories_of:
            self._nodes = None
        self.inventories[node, device_class] = inventory
        self._by_name.pop((node, device_class), None)
        self._inventories_of.setdefault(node, {})[device_class] = inventory

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Remove an inventory."""
        self._nodes = None
        self.inventories.pop((node, device_class), None)
        self._by_name.pop((node, device_class), None)
        self._inventories_of.get(node, {}).pop(device_class, None)
        if not self._inventories_of.get(node, True):
            del self._inventories_of[node]

    def clear_inventories(self) -> None:
        """Remove all inventories: the store was lost, and a new snapshot follows."""
        for node, device_class in tuple(self.inventories):
            self.drop_inventory(node, device_class)

    def put_ledger(self, ledger: Ledger) -> None:
        """Store a ledger."""
        self.ledgers[ledger.node] = ledger

    def drop_ledger(self, node: str) -> None:
        """Remove a ledger."""
        self.ledgers.pop(node, None)

    def clear_ledgers(self) -> None:
        """Remove all ledgers: the store was lost, and a new snapshot follows."""
        for node in tuple(self.ledgers):
            self.drop_ledger(node)

    def put_alignment(self, node: str, alignment: NodeAlignment | None) -> None:
        """Store a node's alignment options. None removes them, and kubelet's defaults apply."""
        self.alignments[node] = alignment or NodeAlignment(node=node)

    def note_silence(self, silent: Mapping[tuple[str, str], str]) -> None:
        """Store the services that do not answer, by node and class, with the time of the first
        silence.

        Their devices are Unknown and are not allocated.
        """
        self.silent = dict(silent)

    def classes_on(self, node: str) -> tuple[str, ...]:
        """List the classes whose inventories a node published."""
        return tuple(self._inventories_of.get(node, ()))

    def cpu_devices(self, node: str) -> tuple[Device, ...]:
        """List a node's CPUs as devices."""
        cpus = self.inventories.get((node, "cpu"))
        return cpus.devices if cpus is not None else ()

    def view_of(self, node: str) -> NodeView | None:
        """Build the view of a node that a plan needs. None when it has published no machine.

        Without alignment options kubelet's defaults apply.
        """
        machine = self.machines.get(node)
        if machine is None:
            return None
        silent = {device_class: since for (there, device_class), since in self.silent.items() if there == node}
        inventories = {
            name: without_strays(inventory, machine) for name, inventory in self._inventories_of.get(node, {}).items()
        }
        asked = self.alignments.get(node, NodeAlignment(node=node))
        return aligned_view(machine, inventories, self.ledgers.get(node), asked, unheard_classes=silent)

    def numa_nodes_of(self, device_id: DeviceId) -> NodeSet | None:
        """Return the NUMA nodes of a device. None when they are unknown."""
        device = self.device(device_id)
        return device.numa_nodes if device is not None else None

    def device(self, device_id: DeviceId) -> Device | None:
        """Return one of our devices as its node published it.

        None for another vendor's, and for one that is not published.

        Cost: O(1). The first device of an inventory is found in O(devices).
        """
        place = (node_of_pool(device_id.pool), class_of_device(device_id.driver, device_id.device) or "")
        by_name = self._by_name.get(place)
        if by_name is None:
            inventory = self.inventories.get(place)
            if inventory is None:
                return None
            by_name = self._by_name[place] = {device.name: device for device in inventory.devices}
        return by_name.get(device_id.device)

    def lie_together(self, node: str, devices: Iterable[DeviceId]) -> bool:
        """Say whether devices lie so close that nothing on the node lies closer.

        False where only a search can find that out.
        """
        machine = self.machines.get(node)
        published = [self.device(device_id) for device_id in devices]
        return machine is not None and is_closest(
            [device for device in published if device is not None], machine.node_set
        )
