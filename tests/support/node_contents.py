"""The publications of a node for benchmarks' nodes, without running its services."""

from __future__ import annotations

from collections.abc import Iterable

from lab.leaves.node_content import NodeContent, Saying
from topobus.formats.messages import catalogue
from topobus.formats.messages.stored import to_stored
from topobus.values.device import Inventory
from topobus.values.machine import Machine

__all__ = ["content_of"]


def content_of(machine: Machine, inventories: Iterable[Inventory]) -> NodeContent:
    """Write down what discovery and the device services would publish."""
    sayings = [Saying("machine", {}, to_stored(catalogue.MACHINE, machine, where="test"))]
    sayings += [
        Saying("inventory", {"device_class": each.device_class}, to_stored(catalogue.INVENTORY, each, where="test"))
        for each in inventories
    ]
    return NodeContent(node=machine.node, sayings=tuple(sayings))
