"""What a container of a virtual machine gets: VFIO's nodes, and the variables by which its program
finds the functions.

KubeVirt's launcher finds the functions of a resource in PCI_RESOURCE_<RESOURCE>, separated by
commas. QEMU under any other name reads `TOPOBUS_<CLASS>_PCI_ADDRESSES`.
Source: kubevirt pkg/util (ResourceNameToEnvVar), pkg/virt-launcher/virtwrap/device/hostdevice;
Documentation/userspace-api/iommufd.rst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.edits_text import own_variable
from topobus.devicekit.passthrough import iommu_groups
from topobus.devicekit.passthrough.passthrough_request import Passthrough
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.resource_names import RESOURCE_PREFIX

__all__ = ["missing_nodes", "passthrough_edits"]

_COMMON = {"vfio": "vfio/vfio", "iommufd": "iommu"}


def missing_nodes(tree: Tree, devices: Sequence[Device], passthrough: Passthrough) -> tuple[str, ...]:
    """Name the nodes that do not exist yet."""
    tree = Tree(tree.settings)
    nodes = [_COMMON[passthrough.backend], *(_own_node(tree, device, passthrough) for device in devices)]
    return tuple(node for node in nodes if not node or not tree.exists(f"dev/{node}"))


def passthrough_edits(
    tree: Tree, devices: Sequence[Device], passthrough: Passthrough, driver: DeviceDriver
) -> Mapping[str, ContainerEdits]:
    """Return the nodes of functions that VFIO has, and the variables.

    The key "" holds what is common to all.
    """
    tree = Tree(tree.settings)
    device_class = driver.device_class.upper().replace("-", "_")
    addresses = ",".join(str(address) for address in sorted(device.pci for device in devices if device.pci is not None))
    # A resource's name in capitals, `/` and `.` as `_`; a pool's has a
    # `-`, which no variable can have.
    resource = f"{RESOURCE_PREFIX}{driver.device_class}".upper().replace("/", "_").replace(".", "_").replace("-", "_")
    env = {
        f"PCI_RESOURCE_{resource}": addresses,
        f"TOPOBUS_{device_class}_PCI_ADDRESSES": addresses,
        f"TOPOBUS_{device_class}_PASSTHROUGH": passthrough.backend,
        **driver.passthrough_variables,
    }
    edits = {
        device.name: ContainerEdits(
            env={own_variable(device): str(device.pci)},
            device_nodes=(device_node(_own_node(tree, device, passthrough)),),
        )
        for device in devices
    }
    return {**edits, "": ContainerEdits(env=env, device_nodes=(device_node(_COMMON[passthrough.backend]),))}


def _own_node(tree: Tree, device: Device, passthrough: Passthrough) -> str:
    """Name the node of a device. Empty when VFIO has made none."""
    if device.pci is None:
        return ""
    if passthrough.backend == "iommufd":
        number = iommu_groups.function_number(tree, device.pci)
        return f"vfio/devices/{number}" if number else ""
    group = iommu_groups.read_group(tree, device.pci)
    return f"vfio/{group.number}" if group is not None else ""
