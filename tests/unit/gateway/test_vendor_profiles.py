"""How resources and devices are called towards kubelet when a vendor's device plugin is stood in
for.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from topobus.gateway.config import GatewaySettings
from topobus.gateway.node_state import NodeState
from topobus.values.device import AttributeValue, Device, Inventory
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.names import is_extended_resource_name
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from topobus.values.vendor_profiles import VendorProfile, is_named_by, pool_in, profile_in, resource_in_profile

ALL: tuple[VendorProfile, ...] = ("nvidia", "amd", "intel", "intel-sriov")


def gpu(name: str, vendor: str, uuid: str = "", pool: str = "", **attributes: AttributeValue) -> Device:
    """A GPU at an address of its own, by its name's last letter."""
    address = PciAddress.parse(f"0000:{int(name[-1], 36):02x}:00.0")
    return Device(
        name=name, device_class="gpu", vendor=vendor, uuid=uuid, pool=pool, pci=address, attributes=attributes
    )


def nic(name: str, address: str, pool: str = "") -> Device:
    """A NIC."""
    return Device(name=name, device_class="nic", vendor="intel", pci=PciAddress.parse(address), pool=pool)


def state_of(
    device_class: str, *devices: Device, held_through: str = "", profiles: tuple[VendorProfile, ...] = ALL
) -> NodeState:
    """A gateway's view of these devices; the first may be held through a resource."""
    nobody: Any = None
    settings = GatewaySettings(node="n1", profiles=profiles)
    state = NodeState(nobody, "n1", lambda own: f"topobus.dev/{own}", settings.ids_of, profiles)
    if held_through:
        owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=held_through, uid="u")
        allocation = Allocation(owner=owner, holdings=(Holding(devices={device_class: (devices[0].name,)}),))
        state.take_ledger(Ledger(node="n1", allocations={owner.key: allocation}))
    state.take_inventory(device_class, Inventory(node="n1", device_class=device_class, generation=1, devices=devices))
    return state


def listed(state: NodeState) -> dict[str, list[tuple[str, bool]]]:
    """What kubelet is told: resource to id and health."""
    return {
        offer.resource: [(entry.wire_id, entry.is_healthy) for entry in state.entries(offer.resource)]
        for offer in state.offers()
    }


MIXED = (
    gpu("gpu-a", "nvidia", "GPU-1"),
    gpu("gpu-b", "nvidia", "GPU-2", pool="gpu-h100"),
    gpu("gpu-c", "nvidia", "MIG-1", profile="1g.10gb", type="mig"),
    gpu("gpu-d", "nvidia", "MIG-2", profile="1g.10gb+me", type="mig"),
    gpu("gpu-e", "amd", "amd-1"),
    gpu("gpu-f", "amd", type="partition"),
    gpu("gpu-g", "intel", "intel-1"),
)


def test_each_gpu_has_its_makers_resource_and_id_when_the_node_has_several_makes() -> None:
    """NVIDIA's by UUID, MIG instances by profile; AMD's by address, parts of a card by name.

    A maker without a profile goes on as before.
    """
    assert listed(state_of("gpu", *MIXED)) == {
        "nvidia.com/gpu": [("GPU-1", True)],
        "nvidia.com/gpu-h100": [("GPU-2", True)],
        "nvidia.com/mig-1g.10gb": [("MIG-1", True)],
        "nvidia.com/mig-1g.10gb.me": [("MIG-2", True)],
        "amd.com/gpu": [("0000:0e:00.0", True), ("gpu-f", True)],
        "topobus.dev/gpu": [("gpu-g", True)],
    }


def test_lists_are_as_without_the_setting_when_no_profile_is_named() -> None:
    """One resource for the class, one for the pool."""
    lists = listed(state_of("gpu", *MIXED, profiles=()))

    assert {resource: [wire_id for wire_id, _ in entries] for resource, entries in lists.items()} == {
        "topobus.dev/gpu": [f"gpu-{letter}" for letter in "acdefg"],
        "topobus.dev/gpu-h100": ["gpu-b"],
    }


def test_nics_have_the_sriov_plugins_names_when_they_are_in_a_pool() -> None:
    """Its resources have underscores where a pool has dashes.

    What no pool has was selected by nobody.
    """
    pooled, free = nic("nic-a", "3b:00.1", "nic-intel-sriov-netdevice"), nic("nic-b", "3b:00.0")
    settings = GatewaySettings(node="n1", profiles=ALL)

    assert listed(state_of("nic", pooled, free)) == {
        "intel.com/intel_sriov_netdevice": [("0000:3b:00.1", True)],
        "topobus.dev/nic": [("nic-b", True)],
    }
    shown = settings.shown(pooled)
    assert shown is not None
    assert shown.attributes["k8s.cni.cncf.io/resourceName"] == "intel.com/intel_sriov_netdevice"


def test_device_stays_in_the_list_through_which_it_is_held_when_it_leaves_the_inventory() -> None:
    """After a restart nothing but the holder's name says where it was.

    Kubelet would count a missing one as healthy.
    """
    state = state_of("gpu", MIXED[0], held_through="nvidia.com/gpu")

    state.take_inventory("gpu", Inventory(node="n1", device_class="gpu", generation=2, devices=()))

    assert listed(state) == {"nvidia.com/gpu": [("GPU-1", False)]}
    assert state.name_of("nvidia.com/gpu", "GPU-1") == "gpu-a"


def test_device_is_in_both_lists_when_it_is_held_by_the_resource_of_before_the_setting() -> None:
    """So that the pod that runs keeps it, and the vendor's resource does not give it away."""
    state = state_of("gpu", *MIXED[:1], held_through="topobus.dev/gpu")

    assert listed(state) == {"nvidia.com/gpu": [("GPU-1", False)], "topobus.dev/gpu": [("gpu-a", True)]}


def test_gpu_without_a_uuid_is_offered_to_nobody() -> None:
    """An exporter would look for it by that."""
    (offered,) = listed(state_of("gpu", gpu("gpu-a", "nvidia"))).values()

    assert offered == [("gpu-a", False)]


def test_setting_ids_goes_before_the_profile() -> None:
    """Whoever names a class there has a reason."""
    settings = GatewaySettings(node="n1", profiles=("nvidia",), ids={"gpu": "pci", "gpu-h100": "topobus"})

    resources = ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu-h100")
    assert [settings.ids_of("gpu", resource) for resource in resources] == ["pci", "pci", "topobus"]


@pytest.mark.parametrize(
    "device", [*MIXED[:6], nic("nic-a", "3b:00.1", "nic-vf"), nic("nic-b", "3b:00.2", "nic-intel-sriov-dpdk")]
)
def test_resource_tells_profile_and_pool_again(device: Device) -> None:
    """Each name that a profile gives is one that kubelet takes, and leads back to the pool whose
    exposure counts.

    No plugin of others may have it.
    """
    resource = resource_in_profile(device, device.pool, ALL)
    profile = profile_in(resource, device.device_class, ALL)

    assert profile is not None
    assert (pool_in(resource, profile), is_extended_resource_name(resource)) == (device.pool, True)
    assert is_named_by(resource, (profile,))


def test_nic_of_a_pool_keeps_its_topobus_name_when_the_class_is_another_ones() -> None:
    """A profile of GPUs says nothing of NICs."""
    pooled = structs.replace(MIXED[1], vendor="amd")

    assert resource_in_profile(nic("nic-a", "3b:00.1", "nic-vf"), "nic-vf", ("nvidia", "amd")) == ""
    assert resource_in_profile(pooled, "gpu-h100", ("nvidia",)) == ""
