"""A small recorded node whose machine and inventories are published without their services, so that
the ledger alone is at work.
"""

from __future__ import annotations

from lab.chaos.workload import CPUS, GPUS, NICS
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode

__all__ = ["NODE", "SETTINGS", "publish_small_node"]

NODE = "chaos-node"
SETTINGS = {
    "TOPOBUS_ALL__NODE": NODE,
    # No device service runs, and most reservations are never committed.
    "TOPOBUS_TOPOLOGY__SILENCE__HUNG_S": "3600",
    "TOPOBUS_TOPOLOGY__SILENCE__GONE_S": "3600",
    "TOPOBUS_TOPOLOGY__RESERVATIONS__EXPIRE_S": "86400",
    # A write whose confirmation is swallowed blocks all others for so long.
    "TOPOBUS_ALL__NATS__TIMEOUT_S": "0.5",
}


async def publish_small_node(bus: Bus) -> None:
    """Publish two NUMA nodes with half of the CPUs, GPUs and NICs each."""
    half = len(CPUS) // 2
    cpus = tuple(
        Cpu(
            id=number,
            online=True,
            core=number,
            socket=number // half,
            numa_node=number // half,
            l3=number // half * half,
        )
        for number in range(len(CPUS))
    )
    nodes = tuple(
        NumaNode(id=node, cpus=CpuSet.of(range(node * half, (node + 1) * half)), memory_bytes=1 << 36)
        for node in (0, 1)
    )
    await bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=cpus, distances=((10, 21), (21, 10))), node=NODE)
    for device_class, names in (("gpu", GPUS), ("nic", NICS)):
        devices = tuple(
            Device(name=name, device_class=device_class, numa_nodes=NodeSet(place // (len(names) // 2)))
            for place, name in enumerate(names)
        )
        inventory = Inventory(node=NODE, device_class=device_class, generation=1, devices=devices)
        await bus.put(INVENTORY, inventory, node=NODE, device_class=device_class)
    cores = tuple(Device(name=name, device_class=CPU_CLASS, cpu=number) for number, name in enumerate(CPUS))
    await bus.put(
        INVENTORY,
        Inventory(node=NODE, device_class=CPU_CLASS, generation=1, devices=cores),
        node=NODE,
        device_class=CPU_CLASS,
    )
