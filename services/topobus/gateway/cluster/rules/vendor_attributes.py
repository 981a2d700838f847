"""Adds to a device the attributes and capacities by which the users of its vendor's DRA driver
select, under that driver's names (`gpu.nvidia.com/productName`).

Pure. What flows in: a device as claims see it, and the setting `profiles`. What flows out: the same
device with qualified names added. A name whose fact the device does not carry is left out. A device
that is not for computing (a GPU in MIG mode beside its instances, one for a virtual machine) gets
none: the vendors' drivers offer it as another type or not at all.

The order of a table is that in which names get a place in a slice, for a slice has room for 32 in
all (`topobus.formats.kubernetes.slices`): what the vendors' samples select by comes first.

Source, for names and types: NVIDIA/k8s-dra-driver-gpu cmd/gpu-kubelet-plugin/deviceinfo.go (and
`index` of older releases: demo/specs/quickstart/gpu-test6.yaml of NVIDIA/k8s-dra-driver);
ROCm/k8s-gpu-dra-driver docs/driver-attributes.md; intel/intel-resource-drivers-for-kubernetes
cmd/kubelet-gpu-plugin/node_state.go and pkg/gpu/device/device.go (models and families);
k8snetworkplumbingwg/dra-driver-sriov pkg/consts/consts.go and pkg/devicestate/discovery.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct, structs

from topobus.gateway.device_plugins.rules.device_ids import address_of
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.vendor_profiles import VendorProfile, profile_of, resource_in_profile

__all__ = ["VENDOR_NAMES", "VendorNames", "with_vendor_names"]

_Source = Callable[[Device], AttributeValue | None]
# What Intel's driver calls the GPUs that our product table names in full.
_INTEL_MODEL = re.compile(r"Intel (?:(Data Center) GPU (Max|Flex) (\d+)|(Arc) (\w+))")
# Of a whole GPU, whatever its size.
_MILLICORES = 1000
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class VendorNames(Struct, frozen=True, kw_only=True):
    """The names of one vendor's driver, and where each comes from."""

    domain: str
    attributes: Mapping[str, _Source]
    """A source answers None where the device does not carry the fact."""
    capacity: Mapping[str, _Source] = {}


def with_vendor_names(device: Device, profiles: Collection[VendorProfile]) -> Device:
    """Add the names of the vendor's driver to a device of a profile that is switched on.

    Several claims may share a device: each takes from its capacities, and from one that is published
    twice a claim would take in one name alone. So such a device gets the attributes without the
    capacities.

    >>> gpu = Device(name="gpu-0", device_class="gpu", vendor="nvidia", model="NVIDIA L4", attributes={"driverVersion": "570.86.05"})
    >>> with_vendor_names(gpu, ["nvidia"]).attributes
    {'driverVersion': '570.86.05', 'gpu.nvidia.com/productName': 'NVIDIA L4', 'gpu.nvidia.com/driverVersion': '570.86.5'}
    """  # noqa: E501
    profile = profile_of(device, profiles)
    if profile is None or device.role is not DeviceRole.COMPUTE:
        return device
    names = VENDOR_NAMES[profile]
    attributes = _values(device, names.domain, names.attributes)
    capacity = {} if device.allows_multiple else _values(device, names.domain, names.capacity)
    return structs.replace(
        device,
        attributes={**device.attributes, **attributes},
        capacity={**device.capacity, **{name: int(amount) for name, amount in capacity.items()}},
    )


def _values(device: Device, domain: str, sources: Mapping[str, _Source]) -> dict[str, AttributeValue]:
    values = {(name if "/" in name else f"{domain}/{name}"): source(device) for name, source in sources.items()}
    return {name: value for name, value in values.items() if value is not None and value != ""}


def _attribute(name: str) -> _Source:
    return lambda device: device.attributes.get(name)


def _version(name: str) -> _Source:
    """Write an attribute as a semantic version: three numbers without leading zeros.

    >>> _version("v")(Device(name="gpu-0", device_class="gpu", attributes={"v": "9.0"}))
    '9.0.0'
    """

    def source(device: Device) -> AttributeValue | None:
        numbers = _NUMBERS.match(str(device.attributes.get(name, "")))
        return ".".join(str(int(number or 0)) for number in numbers.groups()) if numbers is not None else None

    return source


def _amount(name: str) -> _Source:
    return lambda device: device.capacity.get(name)


def _model(device: Device) -> AttributeValue | None:
    return device.model


def _uuid(device: Device) -> AttributeValue | None:
    return device.uuid


def _address(device: Device) -> AttributeValue | None:
    return str(device.pci) if device.pci is not None else None


def _numa_node(device: Device) -> AttributeValue | None:
    return device.numa_nodes.lowest if device.numa_nodes is not None and len(device.numa_nodes) == 1 else None


def _pci_id(part: int, prefix: str = "") -> _Source:
    """Take the vendor's (0) or the device's (1) part of the PCI id, `1002:740f`."""

    def source(device: Device) -> AttributeValue | None:
        parts = str(device.attributes.get("pciID", "")).split(":")
        return f"{prefix}{parts[part]}" if len(parts) == 2 else None

    return source


def _amd_type(device: Device) -> AttributeValue | None:
    return "amdgpu-partition" if device.attributes.get("type") == "partition" else "amdgpu"


def _amd_mode(name: str) -> _Source:
    return lambda device: str(device.attributes.get(name, "")).lower()


def _amd_profile(device: Device) -> AttributeValue | None:
    modes = [str(device.attributes.get(name, "")).lower() for name in ("partitionMode", "memoryMode")]
    return "_".join(modes) if all(modes) else None


def _intel_model(device: Device) -> AttributeValue | None:
    """Shorten a product's name to what Intel's driver calls the model.

    >>> [_intel_model(Device(name="gpu-0", device_class="gpu", model=f"Intel {name}")) for name in ("Data Center GPU Max 1550", "Arc A770")]
    ['Max 1550', 'A770']
    """  # noqa: E501
    match = _INTEL_MODEL.fullmatch(device.model)
    return None if match is None else match[5] or f"{match[2]} {match[3]}"


def _intel_family(device: Device) -> AttributeValue | None:
    match = _INTEL_MODEL.fullmatch(device.model)
    return None if match is None else match[4] or f"{match[1]} {match[2]}"


def _intel_root(device: Device) -> AttributeValue | None:
    return device.pcie_root.rpartition(":")[2]


def _physical_address(device: Device) -> AttributeValue | None:
    address = address_of(device.parent, device.device_class)
    return str(address) if address is not None else None


def _sriov_resource(device: Device) -> AttributeValue | None:
    """Name the resource as the driver's SriovResourceFilter does: without a domain."""
    return resource_in_profile(device, device.pool, ["intel-sriov"]).rpartition("/")[2]


def _link_type(device: Device) -> AttributeValue | None:
    return str(device.attributes.get("linkLayer", "")).lower()


VENDOR_NAMES: Mapping[VendorProfile, VendorNames] = {
    "nvidia": VendorNames(
        domain="gpu.nvidia.com",
        attributes={
            # Of a MIG instance there is room for the first five or six.
            "profile": _attribute("profile"),
            "type": _attribute("type"),
            "parentUUID": _attribute("parentUUID"),
            "productName": _model,
            "driverVersion": _version("driverVersion"),
            "cudaComputeCapability": _version("cudaComputeCapability"),
            "architecture": _attribute("architecture"),
            "uuid": _uuid,
            "brand": _attribute("brand"),
            "cudaDriverVersion": _version("cudaDriverVersion"),
            "pcieBusID": _address,
            "index": _attribute("index"),
        },
        capacity={"memory": _amount("memory")},
    ),
    "amd": VendorNames(
        domain="gpu.amd.com",
        attributes={
            "type": _amd_type,
            "productName": _model,
            "deviceID": _pci_id(1, "0x"),
            "numaNode": _numa_node,
            "partitionProfile": _amd_profile,
            "computePartition": _amd_mode("partitionMode"),
            "memoryPartition": _amd_mode("memoryMode"),
            "pciAddr": _address,
        },
        capacity={"memory": _amount("memory"), "computeUnits": _attribute("computeUnits")},
    ),
    "intel": VendorNames(
        domain="gpu.intel.com",
        attributes={
            "model": _intel_model,
            "family": _intel_family,
            "pciId": _pci_id(1, "0x"),
            "driver": _attribute("kernelDriver"),
            "pciAddress": _address,
            "pciRoot": _intel_root,
        },
        capacity={"memory": _amount("memory"), "millicores": lambda _: _MILLICORES},
    ),
    "intel-sriov": VendorNames(
        domain="sriovnetwork.k8snetworkplumbingwg.io",
        attributes={
            "resourceName": _sriov_resource,
            "PFName": _attribute("physicalInterface"),
            "pciAddress": _address,
            "pfPciAddress": _physical_address,
            "vendor": _pci_id(0),
            "deviceID": _pci_id(1),
            "rdmaCapable": _attribute("rdma"),
            "linkType": _link_type,
            "interfaceName": _attribute("interface"),
            "dra.net/numaNode": _numa_node,
        },
    ),
}
