"""The objects of one node of the fill at the API server: its Node object and ResourceSlices, and the
classes of its devices.
"""

from __future__ import annotations

import msgspec

from lab.fleet.fleet_node import FleetNode
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.pool_slices import name_prefix, pool_slices
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.codec import encode
from topobus.testing.apiserver import Object
from topobus.values.dra_names import group_of_class, pool_of_class

__all__ = ["class_object", "node_object", "slice_objects"]


def class_object(device_class: str) -> Object:
    """Make the DeviceClass of a class of ours."""
    selector = {"cel": {"expression": class_selector(device_class)}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": group_of_class(device_class)},
        "spec": {"selectors": [selector]},
    }


def node_object(node: FleetNode) -> Object:
    """Make a node's Node object, as its kubelet would."""
    name = node.name
    allocatable = {"cpu": str(len(node.machine().cpus)), "memory": "1Ti", "pods": "250"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"allocatable": allocatable, "capacity": allocatable},
    }


def slice_objects(node: FleetNode, node_uid: str) -> list[Object]:
    """Make a node's ResourceSlices, as its gateway would: cut by pool, owned by the Node object."""
    name = node.name
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node_uid, "controller": True}
    pools: dict[str, list[SliceDevice]] = {}
    for inventory in node.inventories():
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
