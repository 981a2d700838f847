"""Container edits for a GPU that the kernel's DRM serves: its card and render node, and the variable that names it."""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.edits_text import own_variable, unusable
from topobus.domain.device import Device
from topobus.domain.edits import ContainerEdits
from topobus.domain.outcome import Refusal
from topobus.sysfs.drm import function_drm_nodes
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree

__all__ = ["drm_edits"]


def drm_edits(tree: Tree, devices: Sequence[Device]) -> dict[str, ContainerEdits] | Refusal:
    """Make each GPU's edits, by device name; refused when one of the cards has left the bus or cannot be used any more."""
    if (refusal := unusable(tree, devices)) is not None:
        return refusal
    edits: dict[str, ContainerEdits] = {}
    for address, device in sorted(((device.pci, device) for device in devices if device.pci is not None), key=lambda pair: pair[0]):
        nodes = function_drm_nodes(tree, address).paths
        edits[device.name] = ContainerEdits(
            env={own_variable(device): str(address)}, device_nodes=tuple(device_node(node) for node in nodes)
        )
    return edits
