"""Reads the DRM nodes of a PCI function, as its kernel driver registered them.

Source: Documentation/gpu/drm-uapi of the Linux kernel: `cardN` is the primary node (mode setting),
`renderDN` the render node (computing).
"""

from __future__ import annotations

from msgspec import Struct

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["DrmNodes", "folder_drm_nodes", "function_drm_nodes"]


class DrmNodes(Struct, frozen=True, kw_only=True):
    """Names of a function's nodes, such as `card0` and `renderD128`. Empty where it has none."""

    card: str = ""
    render: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The nodes relative to dev."""
        return tuple(f"dri/{name}" for name in (self.card, self.render) if name)


def function_drm_nodes(tree: Tree, address: PciAddress) -> DrmNodes:
    """Find the DRM card and render node of one PCI function.

    Shapes: result — names like `card0` and `renderD128`, empty where there is none; of several (no
    such driver is known) the first by name.
    Errors: raises HardwareError when the folder exists and cannot be read.
    """
    return folder_drm_nodes(tree, pci_folder(address))


def folder_drm_nodes(tree: Tree, folder: str) -> DrmNodes:
    """Find the DRM card and render node of the device with this folder, as `function_drm_nodes`
    does.
    """
    names = tree.names(f"{folder}/drm")
    return DrmNodes(
        # The folder also has connectors (card0-DP-1).
        card=next((name for name in names if name.startswith("card") and name[4:].isdecimal()), ""),
        render=next((name for name in names if name.startswith("renderD") and name[7:].isdecimal()), ""),
    )
