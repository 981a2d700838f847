"""A small node for tests of the node's ledger: eight cards on two NUMA nodes, two under each PCIe
root.
"""

from __future__ import annotations

from topobus.engine.alignment.planning.node_view import node_view
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.view import AlignmentOptions, NodeView

__all__ = ["CARDS", "MACHINE", "VIEW"]

_NODE = "card-node"
CARDS = Inventory(
    node=_NODE,
    device_class="gpu",
    generation=1,
    devices=tuple(
        Device(
            name=f"card-{card}", device_class="gpu", numa_nodes=NodeSet(card // 4), pcie_root=f"pci0000:{card // 2:02x}"
        )
        for card in range(8)
    ),
)
MACHINE = Machine(
    node=_NODE,
    numa_nodes=tuple(NumaNode(id=position, cpus=CpuSet(position), memory_bytes=0) for position in range(2)),
    cpus=tuple(
        Cpu(id=position, online=True, core=position, numa_node=position, socket=position) for position in range(2)
    ),
)
VIEW: NodeView = node_view(MACHINE, {"gpu": CARDS}, None, AlignmentOptions(), CpuSet())
