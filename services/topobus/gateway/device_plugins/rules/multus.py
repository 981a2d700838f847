"""Builds the information about PCI devices that Multus, sriov-cni and programs for the SR-IOV
device plugin expect: two variables, a file for each device, two attributes in slices.

Pure.

Source: README of the SR-IOV network device plugin (PCIDEVICE_ variables); Device Information
Specification 1.1.0 of the Network Plumbing Working Group; how-to-use of Multus (attributes of
devices of claims).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec import Struct, structs

from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.pci import PciAddress

__all__ = ["PciUse", "device_info", "file_name", "is_file_of", "variables", "with_attributes"]

_VERSION = "1.1.0"
_DOMAIN = "k8s.cni.cncf.io"
# Kinds of RDMA nodes, which are keys in the _INFO variable.
_RDMA_NODES = ("uverbs", "umad", "issm", "rdma_cm")
_VFIO = "/dev/vfio/"
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]"


class PciUse(Struct, frozen=True, kw_only=True):
    """One device of a container."""

    address: PciAddress
    edits: ContainerEdits = ContainerEdits()
    """The edits for this device, including those in common with the others."""
    rdma_device: str = ""
    physical: PciAddress | None = None
    """Address of the physical function, where the device is a virtual one."""


def variables(resource: str, uses: Mapping[str, PciUse]) -> dict[str, str]:
    """Build the two variables.

    Shapes: uses — by the device's kubelet id; result — sorted by id.
    >>> variables("intel.com/sriov", {"0000:3b:00.1": PciUse(address=PciAddress.parse("3b:00.1"))})
    {'PCIDEVICE_INTEL_COM_SRIOV': '0000:3b:00.1', 'PCIDEVICE_INTEL_COM_SRIOV_INFO': '{"0000:3b:00.1":{"generic":{"deviceID":"0000:3b:00.1"}}}'}
    """  # noqa: E501
    # Hyphens are replaced as well: the SR-IOV plugin forbids them in names of resources, because
    # shells forbid them in names of variables.
    name = "PCIDEVICE_" + re.sub(r"[^A-Za-z0-9]", "_", resource).upper()
    info = {device_id: _info(use) for device_id, use in sorted(uses.items())}
    return {name: ",".join(sorted(uses)), f"{name}_INFO": json.dumps(info, sort_keys=True, separators=(",", ":"))}


def device_info(use: PciUse) -> bytes:
    """Build the document of a device.

    >>> device_info(PciUse(address=PciAddress.parse("01:02.2"), physical=PciAddress.parse("01:02.0"))).decode()
    '{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:01:02.2","pf-pci-address":"0000:01:02.0"}}'
    """
    pci = {"pci-address": str(use.address)}
    if any(node.path == "/dev/vhost-net" for node in use.edits.device_nodes):
        pci["vhost-net"] = "/dev/vhost-net"
    if use.rdma_device:
        pci["rdma-device"] = use.rdma_device
    if use.physical is not None:
        pci["pf-pci-address"] = str(use.physical)
    return json.dumps({"type": "pci", "version": _VERSION, "pci": pci}, separators=(",", ":")).encode()


def file_name(resource: str, device_id: str) -> str:
    """Return the name of a device's file.

    >>> file_name("intel.com/sriov", "0000:3b:00.1")
    'intel.com-sriov-0000:3b:00.1-device.json'
    """
    return f"{resource}-{device_id}-device.json".replace("/", "-")


def is_file_of(resource: str, name: str) -> bool:
    """Return whether a file belongs to a device of a resource, by its name: other resources may
    begin alike.

    >>> is_file_of("t.dev/nic", "t.dev-nic-0000:3b:00.1-device.json"), is_file_of("t.dev/nic", "t.dev-nic-vf-0000:3b:00.1-device.json")
    (True, False)
    """  # noqa: E501
    return re.fullmatch(re.escape(resource.replace("/", "-")) + f"-{_ADDRESS}-device\\.json", name) is not None


def with_attributes(device: Device, resource: str) -> Device:
    """Add the attributes by which Multus finds a claim's device: the resource that networks name,
    and the id that is passed to plugins.

    >>> with_attributes(Device(name="nic-0", device_class="nic", pci=PciAddress.parse("3b:00.1")), "intel.com/sriov").attributes
    {'k8s.cni.cncf.io/deviceID': '0000:3b:00.1', 'k8s.cni.cncf.io/resourceName': 'intel.com/sriov'}
    """  # noqa: E501
    if device.pci is None:
        return device
    added = {f"{_DOMAIN}/deviceID": str(device.pci), f"{_DOMAIN}/resourceName": resource}
    return structs.replace(device, attributes={**device.attributes, **added})


def _info(use: PciUse) -> dict[str, dict[str, str]]:
    """Return the information about a device that the SR-IOV plugin's providers give."""
    info: dict[str, dict[str, str]] = {"generic": {"deviceID": str(use.address)}}
    paths = [node.path for node in use.edits.device_nodes]
    rdma = {key: path for key in _RDMA_NODES for path in paths if path.startswith("/dev/infiniband/") and key in path}
    if rdma:
        info["rdma"] = rdma | ({"rdma_dev": use.rdma_device} if use.rdma_device else {})
    groups = [path for path in paths if path.startswith(_VFIO) and path != f"{_VFIO}vfio"]
    if groups:
        info["vfio"] = {"vfio-dev-mount": groups[0], "vfio-mount": f"{_VFIO}vfio"}
    return info
