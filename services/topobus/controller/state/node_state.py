"""What nodes that run Topobus say of themselves on the bus: machines, inventories, ledgers, how they align, and which of their services do not answer.

Flows in: values as the watches bring them. Flows out: the nodes by name, and a node as an alignment sees it. The planner of both homes needs no more than this;
what is free for claims is `ClusterState`. It reads and writes nothing; the one mutable thing in it is the copy itself, owned by the shell's one loop.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.domain.alignment.planning.node_view import aligned_view
from topobus.domain.device import Device, Inventory
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.strays import without_strays
from topobus.domain.view import NodeAlignment, NodeView

__all__ = ["NodeState"]


class NodeState:
    """Copies of what each node published. Nothing that is forgotten twice, or was never known, is an error."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.inventories: dict[tuple[str, str], Inventory] = {}
        """By node and device class."""
        self.ledgers: dict[str, Ledger] = {}
        self.alignments: dict[str, NodeAlignment] = {}
        self.silent: dict[tuple[str, str], str] = {}
        """Services that do not answer, by node and class, and since when (RFC 3339)."""
        self._inventories_of: dict[str, dict[str, Inventory]] = {}
        self._nodes: tuple[str, ...] | None = None

    def nodes(self) -> tuple[str, ...]:
        """List all nodes that published a machine or an inventory, by name; the same tuple as long as they are the same."""
        if self._nodes is None:
            self._nodes = tuple(sorted(self.machines.keys() | self._inventories_of.keys()))
        return self._nodes

    def put_machine(self, machine: Machine) -> None:
        """Take in a machine."""
        if machine.node not in self.machines:
            self._nodes = None
        self.machines[machine.node] = machine

    def drop_machine(self, node: str) -> None:
        """Forget a machine."""
        self._nodes = None
        self.machines.pop(node, None)

    def forget_machines(self) -> None:
        """Forget all machines: the store was lost, a new snapshot follows."""
        for node in tuple(self.machines):
            self.drop_machine(node)

    def put_inventory(self, inventory: Inventory) -> None:
        """Take in an inventory."""
        node, device_class = inventory.node, inventory.device_class
        if node not in self._inventories_of:
            self._nodes = None
        self.inventories[node, device_class] = inventory
        self._inventories_of.setdefault(node, {})[device_class] = inventory

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Forget an inventory."""
        self._nodes = None
        self.inventories.pop((node, device_class), None)
        self._inventories_of.get(node, {}).pop(device_class, None)
        if not self._inventories_of.get(node, True):
            del self._inventories_of[node]

    def forget_inventories(self) -> None:
        """Forget all inventories: the store was lost, a new snapshot follows."""
        for node, device_class in tuple(self.inventories):
            self.drop_inventory(node, device_class)

    def put_ledger(self, ledger: Ledger) -> None:
        """Take in a ledger."""
        self.ledgers[ledger.node] = ledger

    def drop_ledger(self, node: str) -> None:
        """Forget a ledger."""
        self.ledgers.pop(node, None)

    def forget_ledgers(self) -> None:
        """Forget all ledgers: the store was lost, a new snapshot follows."""
        for node in tuple(self.ledgers):
            self.drop_ledger(node)

    def put_alignment(self, node: str, alignment: NodeAlignment | None) -> None:
        """Take in how a node aligns, or that it does not say so any more: it has kubelet's defaults then."""
        self.alignments[node] = alignment or NodeAlignment(node=node)

    def note_silence(self, silent: Mapping[tuple[str, str], str]) -> None:
        """Learn which services do not answer, by node and class, and since when: their devices are Unknown, and are not allocated."""
        self.silent = dict(silent)

    def classes_on(self, node: str) -> tuple[str, ...]:
        """List the classes whose inventories a node published."""
        return tuple(self._inventories_of.get(node, ()))

    def cpu_devices(self, node: str) -> tuple[Device, ...]:
        """List a node's CPUs as devices."""
        cpus = self.inventories.get((node, "cpu"))
        return cpus.devices if cpus is not None else ()

    def view_of(self, node: str) -> NodeView | None:
        """Show a node as a plan sees it; None when it has published no machine. A node that does not say how it aligns has kubelet's defaults."""
        machine = self.machines.get(node)
        if machine is None:
            return None
        silent = {device_class: since for (there, device_class), since in self.silent.items() if there == node}
        inventories = {name: without_strays(inventory, machine) for name, inventory in self._inventories_of.get(node, {}).items()}
        asked = self.alignments.get(node, NodeAlignment(node=node))
        return aligned_view(machine, inventories, self.ledgers.get(node), asked, unheard_classes=silent)
