"""Checks whether a ResourceSlice that names our driver was published by the node that it describes.

Any user who may create ResourceSlices may name our driver and a higher generation, which hides the
node's own slices from every allocation. kube-apiserver checks neither. Slices of other drivers are
not checked.

Source: k8s.io/dynamic-resource-allocation/structured (only the newest generation of a pool counts),
1.36.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from topobus.engine.shapes.in_slices import cpus_of_shape, parts_of
from topobus.engine.shapes.shapes import is_shape
from topobus.formats.kubernetes.resource import SliceDevice, SliceSpec
from topobus.values.dra_names import DRIVER, class_of_device, node_of_pool, pool_of_class

__all__ = ["classes_in", "only_known_devices", "why_foreign"]

_SHOWN_DEVICES = 3


def classes_in(spec: SliceSpec) -> list[str]:
    """Name the classes of a slice's devices and counter sets, sorted: of shapes, of which no service
    publishes an inventory, those of the parts, CPUs among them. None of another driver's.
    """
    names = [name for device in spec.devices for name in _units(device)]
    for counter_set in spec.shared_counters:
        names += counter_set.counters if is_shape(spec.driver, counter_set.name) else [counter_set.name]
    return _classes(spec.driver, names)


def why_foreign(
    spec: SliceSpec,
    owners: Sequence[Mapping[str, Any]],
    *,
    node_uid: str | None,
    device_names: Mapping[str, Collection[str]],
) -> str:
    """Return why a slice of our driver is ignored.

    Empty for one that counts, and for any slice of another driver.

    Shapes: owners — metadata.ownerReferences; node_uid — of the Node object of the pool's node, None
    while that is not known; device_names — names of the node's devices, by those classes of the
    slice of which it has published an inventory.
    """
    if spec.driver != DRIVER:
        return ""
    pool, node = spec.pool.name, node_of_pool(spec.pool.name)
    if spec.node_name != node:
        place = f"node {spec.node_name}" if spec.node_name else "no one node"
        return f"pool {pool} of {spec.driver} is of node {node}, and the slice is of {place}"
    owner = next(
        (each_owner for each_owner in owners if each_owner.get("kind") == "Node" and each_owner.get("name") == node),
        None,
    )
    if owner is None or (node_uid is not None and owner.get("uid") != node_uid):
        return f"it is not owned by node {node}, as slices of the node's gateway are"
    # CPUs of shapes are counted in the pool of the shapes.
    names = [*(device.name for device in spec.devices), *(counter_set.name for counter_set in spec.shared_counters)]
    for device_class in _classes(spec.driver, names):
        if pool_of_class(node, device_class) != pool:
            return f"pool {pool} of {spec.driver} has no devices of class {device_class}"
    for device_class in classes_in(spec):
        if device_class not in device_names:
            return f"node {node} has published no inventory of class {device_class}"
    unknown = [device.name for device in spec.devices if not _is_known(device, device_names)]
    if unknown and len(unknown) == len(spec.devices):
        shown = ", ".join(unknown[:_SHOWN_DEVICES]) + (", ..." if len(unknown) > _SHOWN_DEVICES else "")
        return f"node {node} has no such device: {shown}"
    return ""


def only_known_devices(spec: SliceSpec, device_names: Mapping[str, Collection[str]]) -> SliceSpec:
    """Leave out devices that the node's inventories lack: the node would refuse them.

    A removed device stays in its slice until the gateway writes the slice again.

    Shapes: device_names — as in `why_foreign`, which has found that the slice counts.
    """
    if spec.driver != DRIVER or all(_is_known(device, device_names) for device in spec.devices):
        return spec
    return structs.replace(spec, devices=tuple(device for device in spec.devices if _is_known(device, device_names)))


def _is_known(device: SliceDevice, device_names: Mapping[str, Collection[str]]) -> bool:
    return all(name in device_names.get(class_of_device(DRIVER, name) or "", ()) for name in _units(device))


def _classes(driver: str, names: Iterable[str]) -> list[str]:
    return sorted({device_class for name in names if (device_class := class_of_device(driver, name)) is not None})


def _units(device: SliceDevice) -> tuple[str, ...]:
    """Name what inventories have of a device: itself, or the parts of a shape."""
    return ((*parts_of(device), *cpus_of_shape(device)) if is_shape(DRIVER, device.name) else ()) or (device.name,)
