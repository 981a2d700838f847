"""The names of the vendors' DRA drivers on devices: which there are, with which values and types,
and what does without them.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import Pool, SliceSpec
from topobus.formats.kubernetes.slices import slice_device
from topobus.gateway.cluster.rules.vendor_attributes import VENDOR_NAMES, with_vendor_names
from topobus.gateway.config import GatewaySettings
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.dra_names import DRIVER
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress
from topobus.values.vendor_profiles import VendorProfile

GIB = 1 << 30
NVIDIA = Device(
    name="gpu-0000-18-00-0",
    device_class="gpu",
    vendor="nvidia",
    model="NVIDIA H100 80GB HBM3",
    uuid="GPU-1",
    pci=PciAddress.parse("0000:18:00.0"),
    pcie_root="pci0000:15",
    pcie_switch=PciAddress.parse("0000:16:00.0"),
    numa_nodes=NodeSet(0),
    attributes={
        "type": "gpu",
        "architecture": "Hopper",
        "brand": "Nvidia",
        "cudaComputeCapability": "9.0",
        "cudaDriverVersion": "13.0.0",
        "driverVersion": "580.95.05",
        "index": 0,
        "kernelDriver": "nvidia",
        "migCapable": True,
        "migEnabled": False,
        "pciID": "10de:2330",
        "pciSubsystemID": "10de:16c1",
        "pcieMaxWidth": 16,
        "productName": "NVIDIA H100 80GB HBM3",
    },
    capacity={"memory": 80 * GIB},
)
MIG = structs.replace(
    NVIDIA,
    name="gpu-0000-18-00-0-mig-3g-40gb-4",
    parent="gpu-0000-18-00-0",
    uuid="MIG-1",
    attributes={
        **{name: value for name, value in NVIDIA.attributes.items() if name != "index"},
        "type": "mig",
        "profile": "3g.40gb",
        "parentUUID": "GPU-1",
        "gpuInstance": 2,
        "computeInstance": 0,
        "placement": 4,
        "memorySlices": 4,
        "computeSlices": 3,
    },
    capacity={
        "memory": 40 * GIB,
        "multiprocessors": 60,
        "copyEngines": 3,
        "decoders": 3,
        "encoders": 0,
        "jpegEngines": 3,
        "ofaEngines": 0,
    },
)
AMD = Device(
    name="gpu-0000-41-00-0-cpx-0",
    device_class="gpu",
    vendor="amd",
    model="AMD Instinct MI300X",
    pci=PciAddress.parse("0000:41:00.0"),
    numa_nodes=NodeSet(1),
    attributes={
        "type": "partition",
        "partitionMode": "CPX",
        "memoryMode": "NPS4",
        "pciID": "1002:74a1",
        "computeUnits": 38,
    },
    capacity={"memory": 24 * GIB},
)
INTEL = Device(
    name="gpu-0000-3a-00-0",
    device_class="gpu",
    vendor="intel",
    model="Intel Data Center GPU Max 1550",
    pci=PciAddress.parse("0000:3a:00.0"),
    pcie_root="pci0000:37",
    attributes={"type": "gpu", "pciID": "8086:0bd5", "kernelDriver": "xe"},
    capacity={"memory": 128 * GIB},
)
FUNCTION = Device(
    name="nic-0000-c2-00-1",
    device_class="nic",
    vendor="Intel",
    parent="nic-0000-c2-00-0",
    pool="nic-eth1-resource",
    pci=PciAddress.parse("0000:c2:00.1"),
    numa_nodes=NodeSet(5),
    attributes={
        "sriovVf": True,
        "rdma": True,
        "linkLayer": "InfiniBand",
        "interface": "ib0v0",
        "physicalInterface": "ib0",
        "pciID": "8086:1889",
    },
)
SRIOV = "sriovnetwork.k8snetworkplumbingwg.io"
ALL: tuple[VendorProfile, ...] = ("nvidia", "amd", "intel", "intel-sriov")

TypedValue = tuple[str, AttributeValue]


def published(device: Device, *profiles: VendorProfile) -> dict[str, TypedValue]:
    """The attributes of a vendor that the slice has, by name: type and value."""
    named: dict[str, TypedValue] = {}
    for name, attribute in slice_device(with_vendor_names(device, profiles)).attributes.items():
        if "/" in name and not name.startswith("resource.kubernetes.io/"):
            kinds = {kind: getattr(attribute, kind) for kind in ("string", "version", "int_", "bool_")}
            ((kind, value),) = ((kind, value) for kind, value in kinds.items() if value is not None)
            named[name] = (kind, value)
    return named


@pytest.mark.parametrize(
    ("device", "profile", "domain", "wanted"),
    [
        pytest.param(
            NVIDIA,
            "nvidia",
            "gpu.nvidia.com",
            {
                "type": ("string", "gpu"),
                "uuid": ("string", "GPU-1"),
                "productName": ("string", "NVIDIA H100 80GB HBM3"),
                "brand": ("string", "Nvidia"),
                "architecture": ("string", "Hopper"),
                "cudaComputeCapability": ("version", "9.0.0"),
                "cudaDriverVersion": ("version", "13.0.0"),
                "driverVersion": ("version", "580.95.5"),
                "pcieBusID": ("string", "0000:18:00.0"),
            },
            id="nvidia",
        ),
        pytest.param(
            MIG,
            "nvidia",
            "gpu.nvidia.com",
            {
                "profile": ("string", "3g.40gb"),
                "type": ("string", "mig"),
                "parentUUID": ("string", "GPU-1"),
                "productName": ("string", "NVIDIA H100 80GB HBM3"),
                "driverVersion": ("version", "580.95.5"),
            },
            id="mig-of-which-a-slice-has-room-for-five",
        ),
        pytest.param(
            AMD,
            "amd",
            "gpu.amd.com",
            {
                "type": ("string", "amdgpu-partition"),
                "productName": ("string", "AMD Instinct MI300X"),
                "deviceID": ("string", "0x74a1"),
                "numaNode": ("int_", 1),
                "partitionProfile": ("string", "cpx_nps4"),
                "computePartition": ("string", "cpx"),
                "memoryPartition": ("string", "nps4"),
                "pciAddr": ("string", "0000:41:00.0"),
            },
            id="amd",
        ),
        pytest.param(
            INTEL,
            "intel",
            "gpu.intel.com",
            {
                "model": ("string", "Max 1550"),
                "family": ("string", "Data Center Max"),
                "pciId": ("string", "0x0bd5"),
                "driver": ("string", "xe"),
                "pciAddress": ("string", "0000:3a:00.0"),
                "pciRoot": ("string", "37"),
            },
            id="intel",
        ),
        pytest.param(
            FUNCTION,
            "intel-sriov",
            SRIOV,
            {
                "resourceName": ("string", "eth1_resource"),
                "PFName": ("string", "ib0"),
                "pciAddress": ("string", "0000:c2:00.1"),
                "pfPciAddress": ("string", "0000:c2:00.0"),
                "vendor": ("string", "8086"),
                "deviceID": ("string", "1889"),
                "rdmaCapable": ("bool_", True),
                "linkType": ("string", "infiniband"),
                "interfaceName": ("string", "ib0v0"),
            },
            id="sriov",
        ),
    ],
)
def test_device_has_the_names_of_its_vendors_driver(
    device: Device, profile: VendorProfile, domain: str, wanted: dict[str, TypedValue]
) -> None:
    """Values and types are those of the vendor's driver. The SR-IOV driver has one of dra.net."""
    others = {"dra.net/numaNode": ("int_", 5)} if profile == "intel-sriov" else {}
    index = {"gpu.nvidia.com/index": ("int_", 0)} if device is NVIDIA else {}

    attributes = published(device, profile)

    assert attributes == {f"{domain}/{name}": value for name, value in wanted.items()} | others | index


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (NVIDIA, {"gpu.nvidia.com/memory": "80Gi"}),
        (MIG, {"gpu.nvidia.com/memory": "40Gi"}),
        (AMD, {"gpu.amd.com/memory": "24Gi", "gpu.amd.com/computeUnits": "38"}),
        (INTEL, {"gpu.intel.com/memory": "128Gi", "gpu.intel.com/millicores": "1k"}),
        (FUNCTION, {}),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_device_has_the_capacities_of_its_vendors_driver(device: Device, wanted: dict[str, str]) -> None:
    """The same amount as under our own name."""
    capacity = slice_device(with_vendor_names(device, ALL)).capacity

    assert {name: amount.value for name, amount in capacity.items() if "/" in name} == wanted


@pytest.mark.parametrize(
    ("device", "profiles"),
    [
        pytest.param(NVIDIA, (), id="no-profile"),
        pytest.param(NVIDIA, ("amd", "intel", "intel-sriov"), id="profiles-of-others"),
        pytest.param(structs.replace(FUNCTION, attributes={"sriovVf": False}), ALL, id="a-nic-as-a-whole"),
        pytest.param(structs.replace(NVIDIA, role=DeviceRole.PARTITION_PARENT), ALL, id="cut-into-instances"),
        pytest.param(structs.replace(NVIDIA, role=DeviceRole.PASSTHROUGH), ALL, id="for-a-virtual-machine"),
        pytest.param(structs.replace(NVIDIA, device_class="gpu-nvidia"), ALL, id="of-another-vendors-plugin"),
    ],
)
def test_device_is_unchanged_when_no_profile_covers_it(device: Device, profiles: tuple[VendorProfile, ...]) -> None:
    """Such a device would be none of the vendor's driver, or one of another type."""
    assert with_vendor_names(device, profiles) == device


def test_shared_device_has_the_names_without_the_capacities() -> None:
    """A claim takes from one capacity, and would find the same amount whole under the other name."""
    shared = with_vendor_names(structs.replace(NVIDIA, allows_multiple=True), ALL)

    assert shared.attributes["gpu.nvidia.com/productName"] == NVIDIA.model
    assert shared.capacity == NVIDIA.capacity


@pytest.mark.parametrize(
    ("device", "dispensable"),
    [
        (NVIDIA, {"migCapable", "pcieMaxWidth", "pciSubsystemID"}),
        (MIG, {"brand", "cudaDriverVersion", "kernelDriver", "migEnabled", "pciID", "productName"}),
        (AMD, set()),
        (INTEL, set()),
        (FUNCTION, set()),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_names_take_only_dispensable_places_when_a_slice_is_full(device: Device, dispensable: set[str]) -> None:
    """Our other attributes stay, and a fault takes away none of either."""
    fault = Condition(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc", since="")
    sick = structs.replace(device, health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(fault,)))
    alone = slice_device(device)

    named = slice_device(with_vendor_names(device, ALL))
    with_fault = slice_device(with_vendor_names(sick, ALL))

    assert alone.attributes.keys() - named.attributes.keys() == dispensable
    assert with_fault.attributes.keys() - named.attributes.keys() == {"healthReason"}
    assert named.attributes.keys() <= with_fault.attributes.keys()
    spec = SliceSpec(driver=DRIVER, node_name="n", pool=Pool(name="n", resource_slice_count=1), devices=(with_fault,))
    assert check_slice(spec) == []


def test_mig_instance_keeps_its_profile_and_type_when_no_profile_is_on() -> None:
    """It has more attributes and capacities than a slice has room for: what identifies it goes
    before what describes the card.
    """
    attributes = slice_device(MIG).attributes

    assert {name: attributes[name].string for name in ("profile", "type", "parentUUID", "uuid")} == {
        "profile": "3g.40gb",
        "type": "mig",
        "parentUUID": "GPU-1",
        "uuid": "MIG-1",
    }


def test_gateway_shows_the_names_when_its_setting_says_so() -> None:
    """The setting `profiles` switches them on, beside the attributes of Multus."""
    settings = GatewaySettings(node="n1", profiles=("intel-sriov",))

    shown = settings.shown(FUNCTION)

    assert shown is not None
    assert shown.attributes[f"{SRIOV}/resourceName"] == "eth1_resource"
    assert shown.attributes["k8s.cni.cncf.io/resourceName"] == "intel.com/eth1_resource"


def test_every_profile_has_a_domain_of_its_own() -> None:
    """Two vendors' names are never taken for each other's."""
    assert {profile: names.domain for profile, names in VENDOR_NAMES.items()} == {
        "nvidia": "gpu.nvidia.com",
        "amd": "gpu.amd.com",
        "intel": "gpu.intel.com",
        "intel-sriov": SRIOV,
    }
