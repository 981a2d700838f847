"""Plans with vendors' names: which devices `nvidia.com/gpu` means on a node, by profile."""

from __future__ import annotations

import pytest

from topobus.values.device import Device
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest
from topobus.values.vendor_profiles import (
    VendorProfile,
    asked_in_profiles,
    ids_of_profile,
    is_named_by,
    pool_in,
    pools_of_profiles,
    profile_in,
    renamed,
    resource_in_profile,
    socket_names,
)


def gpu(name: str, vendor: str = "nvidia", pool: str = "", profile: str = "") -> Device:
    """A GPU, or a MIG instance."""
    return Device(
        name=name, device_class="gpu", vendor=vendor, pool=pool, attributes={"profile": profile} if profile else {}
    )


def wants(*resources: str) -> PodRequest:
    """A pod that wants one of each."""
    devices = tuple(DeviceRequest(device_class=resource, count=1) for resource in resources)
    owner = Owner(kind=OwnerKind.POD, namespace="default", name="a", uid="u")
    return PodRequest(owner=owner, containers=(ContainerRequest(name="c", devices=devices),))


@pytest.mark.parametrize(
    ("devices", "profiles", "pools", "names"),
    [
        pytest.param([gpu("a"), gpu("b")], ["nvidia"], ["", ""], {"nvidia.com/gpu": "gpu"}, id="one-maker"),
        pytest.param([gpu("a"), gpu("b")], [], ["", ""], {}, id="no-profile"),
        pytest.param(
            [gpu("a"), gpu("b", "amd")],
            ["nvidia"],
            ["gpu-nvidia.com-gpu", ""],
            {"nvidia.com/gpu": "gpu-nvidia.com-gpu"},
            id="two-makers",
        ),
        pytest.param(
            [gpu("a"), gpu("b", profile="1g.10gb")],
            ["nvidia"],
            ["gpu-nvidia.com-gpu", "gpu-nvidia.com-mig-1g.10gb"],
            {"nvidia.com/gpu": "gpu-nvidia.com-gpu", "nvidia.com/mig-1g.10gb": "gpu-nvidia.com-mig-1g.10gb"},
            id="mig",
        ),
        pytest.param(
            [gpu("a", pool="gpu-h100")], ["nvidia"], ["gpu-h100"], {"nvidia.com/gpu-h100": "gpu-h100"}, id="pool"
        ),
        pytest.param(
            [Device(name="n", device_class="nic", pool="nic-intel-sriov-dpdk"), Device(name="o", device_class="nic")],
            ["intel-sriov"],
            ["nic-intel-sriov-dpdk", ""],
            {"intel.com/intel_sriov_dpdk": "nic-intel-sriov-dpdk"},
            id="nics",
        ),
    ],
)
def test_pools_of_profiles_has_a_pool_for_each_resource_that_is_a_part(
    devices: list[Device], profiles: list[VendorProfile], pools: list[str], names: dict[str, str]
) -> None:
    """A count of the resource is a count of the class or pool that it is named to, as in the lists
    that kubelet gets.
    """
    pooled, named = pools_of_profiles(devices, profiles)

    assert ([device.pool for device in pooled], named) == (pools, names)


def test_renamed_changes_the_resources_that_have_another_name_alone() -> None:
    """What is asked by our names, or is nobody's, stays."""
    request = renamed(wants("nvidia.com/gpu", "nic", "example.com/x"), {"nvidia.com/gpu": "gpu"})

    assert request == wants("gpu", "nic", "example.com/x")
    assert asked_in_profiles(wants("nvidia.com/gpu", "nic", "amd.com/gpu"), ["nvidia"]) == {"nvidia.com/gpu"}


def test_names_go_both_ways_in_each_profile() -> None:
    """What a device is called, by which profile, of which pool.

    How ids are made, and the vendors' sockets.
    """
    assert resource_in_profile(gpu("a", "amd"), "", ["nvidia", "amd"]) == "amd.com/gpu"
    assert resource_in_profile(Device(name="n", device_class="nic"), "", ["intel-sriov"]) == ""
    assert (profile_in("nvidia.com/gpu", "gpu", ["nvidia"]), profile_in("nvidia.com/gpu", "nic", ["nvidia"])) == (
        "nvidia",
        None,
    )
    assert [pool_in(*pair) for pair in (("nvidia.com/mig-1g.10gb", "nvidia"), ("intel.com/a_b", "intel-sriov"))] == [
        "",
        "nic-a-b",
    ]  # type: ignore[arg-type]  # literals of a profile
    assert (is_named_by("intel.com/x", ["intel-sriov"]), is_named_by("nvidia.com/pgpu", ["nvidia"])) == (True, False)
    assert (ids_of_profile(None), ids_of_profile("amd")) == ("topobus", "card")
    assert socket_names("amd.com/gpu") == ("amd-gpu.sock", "amd.com_gpu.sock", "amd.com_gpu")
