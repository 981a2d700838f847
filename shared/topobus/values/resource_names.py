"""Resource names of pods: which ones our device services offer, and which of our classes resembles a
resource that no service offers.

The resemblance is only a hint. Nothing is allocated because of it. The words are those of device
plugins: NVIDIA, AMD and Intel GPU plugins, the SR-IOV and RDMA shared device plugins, Xilinx and
Intel FPGA plugins.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = [
    "CLASS_RESOURCE_PREFIX",
    "RESOURCE_PREFIX",
    "SHAPE_LEVELS",
    "is_of_device_service",
    "is_resource_name",
    "similar_class",
]

RESOURCE_PREFIX = "topobus.dev/"
"""Before a class or a pool: the resource under which pods ask for it."""
CLASS_RESOURCE_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Before the name of a DeviceClass: the resource under which pods ask for devices by a claim
(KEP-5004)."""

SHAPE_LEVELS = ("gpu-nic", "switch", "numa", "socket", "quarter", "half", "machine")
"""Levels of shapes, smallest first. Only claims have shapes."""

_WORDS: dict[str, frozenset[str]] = {
    "fpga": frozenset({"fpga", "fpgas", "xilinx", "af", "region", "alveo"}),
    "gpu": frozenset({"gpu", "gpus", "vgpu", "mig", "i915", "xe", "cuda", "rocm"}),
    "nic": frozenset(
        {"nic", "nics", "rdma", "hca", "sriov", "netdevice", "roce", "ib", "infiniband", "mellanox", "mlnxnics", "vf"}
    ),
}


def is_of_device_service(resource: str) -> bool:
    """Say whether a resource is one that a device service offers, by its own class or pool.

    >>> is_of_device_service("topobus.dev/gpu"), is_of_device_service("topobus.dev/gpu-nic")
    (True, False)
    """
    return resource.startswith(RESOURCE_PREFIX) and resource.removeprefix(RESOURCE_PREFIX) not in SHAPE_LEVELS


def is_resource_name(text: str) -> bool:
    """Say whether a device request names a resource in full, instead of one of our classes or
    pools, which have no slash.

    >>> is_resource_name("nvidia.com/gpu"), is_resource_name("gpu-h100")
    (True, False)
    """
    return "/" in text


def similar_class(resource: str, classes: Collection[str]) -> str:
    """Name the class that a resource's name suggests.

    Empty when its words suggest none, or several.

    >>> similar_class("nvidia.com/gpu", ["gpu", "nic"]), similar_class("rdma/hca", ["gpu", "nic"]), similar_class("example.com/dongle", ["gpu"])
    ('gpu', 'nic', '')
    """  # noqa: E501
    words = set(re.split(r"[^a-z0-9]+", resource.lower()))
    alike = [name for name in sorted(classes) if words & ({name} | _WORDS.get(name, frozenset()))]
    return alike[0] if len(alike) == 1 else ""
