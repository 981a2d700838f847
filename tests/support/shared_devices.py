"""GPUs that their operator has shared, as an inventory shows them, and
claims with shares of them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import structs

from support.node_plane import NODE, device
from topobus.devicekit.sharing.shared_devices import SharedPool, with_sharing
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device
from topobus.values.device_sharing import SharePolicy
from topobus.values.dra_names import DRIVER
from topobus.values.pools import Condition

__all__ = ["GIB", "RESOURCE", "share_claim", "shared_gpus"]

GIB = 1 << 30
RESOURCE = "topobus.dev/gpu-shared"


def shared_gpus(
    *names: str, replicas: int = 4, policy: Literal["spread", "pack"] = "spread", refuses_many: bool = True
) -> tuple[Device, ...]:
    """GPUs of 80 GiB on one NUMA node (kubelet chooses the node before anybody is asked for a
    preference), shared as the setting has it.
    """
    pool = SharedPool(
        name="gpu-shared",
        where=(Condition(field="name", glob="gpu-*"),),
        replicas=replicas,
        policy=SharePolicy(policy),
        refuses_many=refuses_many,
    )
    whole = [
        structs.replace(device(name, 0), pool="gpu-shared", uuid=f"GPU-{name[-1] * 8}", capacity={"memory": 80 * GIB})
        for name in names
    ]
    return with_sharing(whole, [pool])


def share_claim(name: str, gpu: str, **amounts: str) -> ApiObject:
    """A claim that has a share of a GPU.

    What it does not name is what a claim gets that names nothing.
    """
    consumed = {"memory": "20Gi", "shares": "1"} | amounts
    result: dict[str, Any] = {
        "request": "r",
        "driver": DRIVER,
        "pool": NODE,
        "device": gpu,
        "shareID": f"share-{name}",
        "consumedCapacity": consumed,
    }
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    status = {"allocation": {"devices": {"results": [result], "config": []}}}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)
