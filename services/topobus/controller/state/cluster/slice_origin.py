"""Checks whether a ResourceSlice that names a Topobus driver was published by the node that it
describes.

Any user who may create ResourceSlices may name a Topobus driver and a higher generation, which
hides the node's own slices from every allocation. kube-apiserver checks neither. Slices of other
drivers are not checked.

Source: k8s.io/dynamic-resource-allocation/structured (only the newest generation of a pool counts),
1.36.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from topobus.formats.kubernetes.resource import SliceSpec
from topobus.values.device import class_of_driver

__all__ = ["only_known_devices", "why_foreign"]

_SHOWN_DEVICES = 3


def why_foreign(
    spec: SliceSpec, owners: Sequence[Mapping[str, Any]], *, node_uid: str | None, inventory: Collection[str] | None
) -> str:
    """Return why a slice of a Topobus driver is ignored.

    Empty for one that counts, and for any slice of another driver.

    Shapes: owners — metadata.ownerReferences; node_uid — of the Node object of the pool's name,
    None while that is not known; inventory — names of the node's devices of the class, None when
    the node has published no inventory of it.
    """
    device_class = class_of_driver(spec.driver)
    if device_class is None:
        return ""
    node = spec.pool.name
    if spec.node_name != node:
        place = f"node {spec.node_name}" if spec.node_name else "no one node"
        return f"pool {node} of {spec.driver} is of node {node}, and the slice is of {place}"
    owner = next(
        (each_owner for each_owner in owners if each_owner.get("kind") == "Node" and each_owner.get("name") == node),
        None,
    )
    if owner is None or (node_uid is not None and owner.get("uid") != node_uid):
        return f"it is not owned by node {node}, as slices of the node's gateway are"
    if inventory is None:
        return f"node {node} has published no inventory of class {device_class}"
    unknown = [device.name for device in spec.devices if device.name not in inventory]
    if unknown and len(unknown) == len(spec.devices):
        shown = ", ".join(unknown[:_SHOWN_DEVICES]) + (", ..." if len(unknown) > _SHOWN_DEVICES else "")
        return f"node {node} has no such device of class {device_class}: {shown}"
    return ""


def only_known_devices(spec: SliceSpec, inventory: Collection[str] | None) -> SliceSpec:
    """Leave out devices that the node's inventory lacks: the node would refuse them.

    A removed device stays in its slice until the gateway writes the slice again.
    """
    if (
        class_of_driver(spec.driver) is None
        or inventory is None
        or all(device.name in inventory for device in spec.devices)
    ):
        return spec
    return structs.replace(spec, devices=tuple(device for device in spec.devices if device.name in inventory))
