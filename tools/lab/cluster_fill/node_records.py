"""The publications of one node of the fill: machine and inventories as real services read them from
a recorded machine.

Other nodes repeat them under their own names.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, structs

from lab.bench.node_processes import NODE, bench_node
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.pool_slices import name_prefix, pool_slices
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import encode
from topobus.testing.apiserver import Object
from topobus.values.device import Inventory
from topobus.values.dra_names import group_of_class, pool_of_class
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine

__all__ = ["CLASSES", "NodeRecord", "class_object", "node_name", "node_object", "record_node", "slice_objects"]

CLASSES = ("gpu", "nic")


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node's machine and inventories."""

    machine: Machine
    inventories: tuple[Inventory, ...]

    def named(self, node: str) -> NodeRecord:
        """Return the same for a node of another name."""
        return NodeRecord(
            machine=structs.replace(self.machine, node=node),
            inventories=tuple(structs.replace(inventory, node=node) for inventory in self.inventories),
        )


async def record_node(machine: str) -> NodeRecord:
    """Run discovery and the device services on a recorded machine until they are ready, and read
    what they wrote. Cost: some seconds.

    Errors: raises PeerUnavailable when one of them ends or has written nothing.
    """
    async with bench_node(("discovery", *CLASSES), machine=machine) as node:
        read = await node.bus.get(catalogue.MACHINE, node=NODE)
        inventories = [await node.bus.get(catalogue.INVENTORY, node=NODE, device_class=name) for name in CLASSES]
        if read is None or any(entry is None for entry in inventories):
            raise PeerUnavailable(
                f"recorded machine {machine}: its services are ready and have not published machine and inventories"
            )
        return NodeRecord(
            machine=read.value, inventories=tuple(entry.value for entry in inventories if entry is not None)
        )


def node_name(index: int) -> str:
    """Name a node, so that names sort like numbers.

    >>> node_name(7)
    'node-00007'
    """
    return f"node-{index:05d}"


def class_object(device_class: str) -> Object:
    """Make the DeviceClass of a class of ours."""
    selector = {"cel": {"expression": class_selector(device_class)}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": group_of_class(device_class)},
        "spec": {"selectors": [selector]},
    }


def node_object(record: NodeRecord) -> Object:
    """Make a node's Node object, as its kubelet would."""
    name = record.machine.node
    allocatable = {"cpu": str(len(record.machine.cpus)), "memory": "1Ti", "pods": "250"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"allocatable": allocatable, "capacity": allocatable},
    }


def slice_objects(record: NodeRecord, node_uid: str) -> list[Object]:
    """Make a node's ResourceSlices, as its gateway would: cut by pool, owned by the Node object."""
    name = record.machine.node
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node_uid, "controller": True}
    pools: dict[str, list[SliceDevice]] = {}
    for inventory in record.inventories:
        pool = pool_of_class(name, inventory.device_class)
        pools.setdefault(pool, []).extend(map(slice_device, inventory.devices))
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{name_prefix(index, spec)}made", "ownerReferences": [owner]},
            "spec": msgspec.json.decode(encode(spec)),
        }
        for pool, devices in pools.items()
        for index, spec in pool_slices(pool, devices).items()
    ]
