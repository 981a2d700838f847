"""What is special about an NVIDIA GPU that is switched to VFIO: a node that sysfs does not list,
the NVML session, and NVIDIA's container runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from topobus.devicekit.driver import DeviceDriver
from topobus.gpu.nvidia_proc import information_if_readable
from topobus.gpu.nvml.nvml import Nvml
from topobus.sysfs.tree import Tree
from topobus.values.device import Device

__all__ = ["LetsGpusGo"]


class LetsGpusGo(DeviceDriver):
    """Base of NVIDIA's driver: the part for devices that are switched to VFIO."""

    # Without it NVIDIA's runtime would add every GPU that it finds to an image that sets "all".
    passthrough_variables = MappingProxyType({"NVIDIA_VISIBLE_DEVICES": "void"})
    _nvml: Nvml | None

    def own_nodes(self, tree: Tree, device: Device) -> Sequence[str]:
        """Name the GPU's own node. Nodes that all GPUs share do not show the use of this one."""
        minor = information_if_readable(tree, device.pci).get("Device Minor", "") if device.pci is not None else ""
        return (f"nvidia{minor}",) if minor else ()

    def let_go(self, tree: Tree, device: Device) -> None:
        """Close what NVML has open on the GPU: otherwise NVIDIA's module would wait for it in
        `unbind` without end.
        """
        if self._nvml is not None and device.pci is not None:
            self._nvml.give_away(device.pci, is_away=True)

    def take_back(self, tree: Tree, device: Device) -> None:
        """Begin a session that includes the GPU again."""
        if self._nvml is not None and device.pci is not None:
            self._nvml.give_away(device.pci, is_away=False)
