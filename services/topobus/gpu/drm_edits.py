"""Container edits for a GPU that the kernel's DRM serves: its card and render node with their
groups, and the variable that names it.

The names below /dev/dri/by-path, by which media libraries find the GPU of an address, become device
nodes in the container, because CDI has no links.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.edits_text import gone, own_variable, unusable
from topobus.devicekit.pci import function_role
from topobus.sysfs.drm import DrmNodes, function_drm_nodes
from topobus.sysfs.nodes import device_node, node_groups
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

__all__ = ["by_path_nodes", "drm_edits", "groups_of", "node_edits", "parent_edits"]


def drm_edits(tree: Tree, devices: Sequence[Device], owner: Owner) -> dict[str, ContainerEdits] | Refusal:
    """Make each GPU's edits, by device name.

    Errors: raises nothing; refuses when one of the cards has left the bus or cannot be used any
    more.
    """
    if (refusal := unusable(tree, devices)) is not None:
        return refusal
    return node_edits(tree, devices, owner)


def parent_edits(tree: Tree, devices: Sequence[Device], owner: Owner) -> dict[str, ContainerEdits] | Refusal:
    """Make the edits of physical functions that are offered beside their virtual ones.

    Errors: raises nothing; refuses when one has no virtual functions any more.
    """
    if (refusal := gone(tree, devices)) is not None:
        return refusal
    for device in devices:
        if device.pci is not None and function_role(tree, device.pci)[0] is not DeviceRole.PARTITION_PARENT:
            text = f"{device.name}: it was offered with virtual functions on, and has none now"
            return refuse("device-not-offered", text, devices=(device.name,))
    return node_edits(tree, devices, owner)


def node_edits(tree: Tree, devices: Sequence[Device], owner: Owner) -> dict[str, ContainerEdits]:
    """Make the edits of GPUs, whatever they are used for."""
    edits: dict[str, ContainerEdits] = {}
    for address, device in sorted(
        ((device.pci, device) for device in devices if device.pci is not None), key=lambda pair: pair[0]
    ):
        drm = function_drm_nodes(tree, address)
        edits[device.name] = ContainerEdits(
            env={own_variable(device): str(address)},
            device_nodes=(*(device_node(node) for node in drm.paths), *by_path_nodes(tree, address, drm)),
            additional_gids=groups_of(tree, drm.paths, owner),
        )
    return edits


def groups_of(tree: Tree, names: Sequence[str], owner: Owner) -> tuple[int, ...]:
    """Return the groups (video, render) that a container's processes need to open nodes.

    Empty for a device plugin, whose API has no field for groups.
    """
    return node_groups(tree, names) if owner.kind is OwnerKind.CLAIM else ()


def by_path_nodes(tree: Tree, address: PciAddress, drm: DrmNodes) -> tuple[DeviceNode, ...]:
    """Return a GPU's names by its address, where the host has them (udev makes them)."""
    names = ((f"pci-{address}-card", drm.card), (f"pci-{address}-render", drm.render))
    return tuple(
        DeviceNode(path=f"/dev/dri/by-path/{name}", host_path=f"/dev/dri/{node}")
        for name, node in names
        if node and tree.is_link(f"dev/dri/by-path/{name}")
    )
