"""Builders of small clusters of one driver's GPUs, for the tests of answers from a snapshot."""

from __future__ import annotations

from typing import Any

__all__ = ["DRA", "gpu_class", "gpu_node", "gpu_pod"]

DRA = "resource.k8s.io/v1"


def gpu_class(name: str = "gpu") -> dict[str, Any]:
    """Describe a class of all GPUs."""
    selector = {"cel": {"expression": 'device.driver == "gpu.example.com"'}}
    return {"apiVersion": DRA, "kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": [selector]}}


def gpu_node(name: str, gpus: int, *, cpu: str = "64", **spec: Any) -> list[dict[str, Any]]:
    """Describe a node, and the slice of its GPUs `gpu-0`, `gpu-1` and so on."""
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"gpu-{index}"} for index in range(gpus)]
    published = {"driver": "gpu.example.com", "nodeName": name, "pool": pool, "devices": devices}
    status = {"allocatable": {"cpu": cpu, "pods": "20"}}
    return [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec, "status": status},
        {"apiVersion": DRA, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": published},
    ]


def gpu_pod(
    name: str,
    *counts: int,
    node: str = "",
    first: int = 0,
    priority: int = 0,
    cpu: str = "1",
    device_class: str = "gpu",
) -> list[dict[str, Any]]:
    """Describe a claim with a request for each count, and its pod.

    Shapes: node — where the pod is, with the node's devices from `first` on; empty while it waits.
    """
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    requests = [
        {"name": f"r{place}", "exactly": {"deviceClassName": device_class, "count": count}}
        for place, count in enumerate(counts)
    ]
    results = [
        {"request": "r0", "driver": "gpu.example.com", "pool": node, "device": f"gpu-{index}"}
        for index in range(first, first + sum(counts))
    ]
    user = {"resource": "pods", "name": name, "uid": f"uid-{name}"}
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": [user]} if node else {}
    spec = {
        "priority": priority,
        "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}],
        "resourceClaims": [{"name": "g", "resourceClaimName": name}],
        **({"nodeName": node} if node else {}),
    }
    claim = {"devices": {"requests": requests}}
    return [
        {"apiVersion": DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": claim, "status": status},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    ]
