"""Names resources and devices for kubelet as a vendor's own device plugin does, so that pods,
charts and exporters written for that plugin work unchanged.

Pure. The profiles are those of the gateway's setting `profiles`.

Source: NVIDIA/k8s-device-plugin internal/rm/rm.go (`mig-` and the profile, `+` becomes `.`) and
internal/plugin/server.go (sockets); ROCm/k8s-device-plugin internal/pkg/plugin/plugin.go;
sriov-network-device-plugin cmd/sriovdp/main.go (prefix intel.com), pkg/resources/server.go
(sockets).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import structs

from topobus.values.device import Device
from topobus.values.pools import resource_of
from topobus.values.request import PodRequest
from topobus.values.resource_names import is_resource_name

__all__ = [
    "IdProfile",
    "VendorProfile",
    "asked_in_profiles",
    "ids_of_profile",
    "is_named_by",
    "pool_in",
    "pools_of_profiles",
    "profile_in",
    "profile_of",
    "renamed",
    "resource_in_profile",
    "socket_names",
]

IdProfile = Literal["topobus", "pci", "uuid", "card"]
"""How the devices of a resource are named towards kubelet."""

VendorProfile = Literal["nvidia", "amd", "intel", "intel-sriov"]
"""The vendor whose device plugin and DRA driver are replaced; of `intel` (GPUs) the DRA driver
alone, and its resources keep our names."""

_DOMAINS: dict[VendorProfile, str] = {"nvidia": "nvidia.com", "amd": "amd.com", "intel-sriov": "intel.com"}
_CLASSES: dict[VendorProfile, str] = {"nvidia": "gpu", "amd": "gpu", "intel": "gpu", "intel-sriov": "nic"}
_IDS: dict[VendorProfile, IdProfile] = {"nvidia": "uuid", "amd": "card", "intel-sriov": "pci"}
_MIG = "mig-"


def resource_in_profile(device: Device, pool: str, profiles: Collection[VendorProfile]) -> str:
    """Name the resource of a device as its vendor's plugin does.

    Empty where no profile covers it.

    Shapes: pool — of the device, empty for none. A GPU's profile is its maker's. A NIC in a pool
            has profile intel-sriov whatever its maker: the SR-IOV plugin offers what its
            configuration selects, and its resources have underscores.
    >>> resource_in_profile(Device(name="gpu-0", device_class="gpu", vendor="nvidia", attributes={"profile": "1g.10gb+me"}), "", ["nvidia"])
    'nvidia.com/mig-1g.10gb.me'
    >>> resource_in_profile(Device(name="nic-0", device_class="nic"), "nic-intel-sriov-netdevice", ["intel-sriov"])
    'intel.com/intel_sriov_netdevice'
    """  # noqa: E501
    for profile in profiles:
        domain = _DOMAINS.get(profile, "")
        is_of_maker = device.device_class != "gpu" or device.vendor == profile
        if not domain or device.device_class != _CLASSES[profile] or not is_of_maker:
            continue
        if profile == "intel-sriov":
            name = pool.removeprefix("nic-").replace("-", "_") if pool else ""
        else:
            name = pool or _mig_name(device, profile) or device.device_class
        if name:
            return f"{domain}/{name}"
    return ""


def profile_in(resource: str, device_class: str, profiles: Collection[VendorProfile]) -> VendorProfile | None:
    """Find the profile by which a class has a resource.

    >>> profile_in("nvidia.com/mig-1g.10gb", "gpu", ["nvidia"]), profile_in("nvidia.com/gpu", "gpu", ["amd"])
    ('nvidia', None)
    """
    domain = resource.partition("/")[0]
    return next(
        (profile for profile in profiles if _DOMAINS.get(profile) == domain and _CLASSES[profile] == device_class), None
    )


def profile_of(device: Device, profiles: Collection[VendorProfile]) -> VendorProfile | None:
    """Find the profile whose vendor's driver would offer a device: a GPU by its maker, a virtual
    function of a NIC whatever its maker.

    >>> gpu = Device(name="gpu-0", device_class="gpu", vendor="amd")
    >>> profile_of(gpu, ["nvidia", "amd"]), profile_of(gpu, ["nvidia"])
    ('amd', None)
    """
    for profile in profiles:
        is_its_own = device.attributes.get("sriovVf") is True if profile == "intel-sriov" else device.vendor == profile
        if device.device_class == _CLASSES[profile] and is_its_own:
            return profile
    return None


def pool_in(resource: str, profile: VendorProfile) -> str:
    """Name the pool of a resource of a profile. Empty when it is the class itself or a MIG profile.

    >>> pool_in("nvidia.com/gpu", "nvidia"), pool_in("nvidia.com/gpu-h100", "nvidia"), pool_in("intel.com/intel_sriov_dpdk", "intel-sriov")
    ('', 'gpu-h100', 'nic-intel-sriov-dpdk')
    """  # noqa: E501
    name = resource.partition("/")[2]
    if profile == "intel-sriov":
        return f"nic-{name.replace('_', '-')}"
    return "" if name == _CLASSES[profile] or name.startswith(_MIG) else name


def is_named_by(resource: str, profiles: Collection[VendorProfile]) -> bool:
    """Say whether a profile could offer a resource: no other plugin may offer it beside us.

    >>> is_named_by("nvidia.com/gpu", ["nvidia"]), is_named_by("nvidia.com/pgpu", ["nvidia"]), is_named_by("amd.com/gpu", ["nvidia"])
    (True, False, False)
    """  # noqa: E501
    names = {"nvidia": ("gpu", _MIG), "amd": ("gpu",), "intel-sriov": ("",)}
    return any(
        resource.startswith(f"{_DOMAINS[profile]}/{name}") for profile in profiles for name in names.get(profile, ())
    )


def ids_of_profile(profile: VendorProfile | None) -> IdProfile:
    """Return how the plugin of a profile names its devices: by UUID, by PCI address, or by the PCI
    address of whole cards.
    """
    return "topobus" if profile is None else _IDS[profile]


def socket_names(resource: str) -> tuple[str, ...]:
    """Name the sockets by which the vendors' plugins serve a resource: NVIDIA's, the SR-IOV
    plugin's, and those made with AMD's library.

    >>> socket_names("nvidia.com/gpu")
    ('nvidia-gpu.sock', 'nvidia.com_gpu.sock', 'nvidia.com_gpu')
    """
    domain, _, name = resource.partition("/")
    return (f"{domain.partition('.')[0]}-{name}.sock", f"{domain}_{name}.sock", f"{domain}_{name}")


def asked_in_profiles(request: PodRequest, profiles: Collection[VendorProfile]) -> frozenset[str]:
    """List the resources of a pod that a profile could offer."""
    return frozenset(
        device.device_class
        for container in request.containers
        for device in container.devices
        if is_resource_name(device.device_class) and is_named_by(device.device_class, profiles)
    )


def pools_of_profiles(
    devices: Sequence[Device], profiles: Collection[VendorProfile]
) -> tuple[tuple[Device, ...], Mapping[str, str]]:
    """Add a pool for each resource of a profile that has only some of a pool's (or of the class's)
    devices, as a MIG profile has.

    Shapes: result — the devices in their order, and resources (`nvidia.com/gpu`) to what has
            exactly their devices: the class, or a pool.
    """
    named = {device.name: resource_in_profile(device, device.pool, profiles) for device in devices}
    users: dict[str, set[str]] = {}
    for device in devices:
        users.setdefault(resource_of(device), set()).add(named[device.name])
    pooled: list[Device] = []
    names: dict[str, str] = {}
    for device in devices:
        resource = named[device.name]
        pool = device.pool
        if resource and len(users[resource_of(device)]) > 1:
            pool = f"{device.device_class}-{resource.replace('/', '-')}"
        pooled.append(structs.replace(device, pool=pool))
        if resource:
            names[resource] = pool or device.device_class
    return tuple(pooled), names


def renamed(request: PodRequest, names: Mapping[str, str]) -> PodRequest:
    """Return the same request with resources by other names."""
    containers = tuple(
        structs.replace(
            container,
            devices=tuple(
                structs.replace(device, device_class=names.get(device.device_class, device.device_class))
                for device in container.devices
            ),
        )
        for container in request.containers
    )
    return structs.replace(request, containers=containers)


def _mig_name(device: Device, profile: VendorProfile) -> str:
    """Name a MIG instance's resource by its profile. Empty for a whole GPU."""
    mig_profile = device.attributes.get("profile")
    return (
        f"{_MIG}{mig_profile.replace('+', '.')}"
        if profile == "nvidia" and isinstance(mig_profile, str) and mig_profile
        else ""
    )
