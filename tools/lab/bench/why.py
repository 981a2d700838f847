"""Measures `topobus why` on a made cluster: `python -m lab.bench why [--nodes N] [--pods N] [--json]`.

Nodes have eight GPUs each, of which running pods hold six; the pod that is explained wants four. It
prints processor time for reading the objects and for the verdict, beside the time that plain JSON
decoding of the same objects takes, and the memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.engine.cel.selector import CelCompiler

__all__ = ["main"]

_DRA = "resource.k8s.io/v1"
_DRIVER = "gpu.nvidia.com"
_GPUS = 8
_HOLDERS = 3
_EACH = 2


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench why", description="Measure `topobus why`.")
    parser.add_argument("--nodes", type=int, default=5000, metavar="N", help="nodes (5000)")
    parser.add_argument("--pods", type=int, default=20_000, metavar="N", help="pods that run (20000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(argv)
    content = msgspec.json.encode({"items": list(_objects(asked.nodes, asked.pods // asked.nodes))})
    times = [time.process_time()]
    snapshot = msgspec.json.decode(content, type=Snapshot)
    times.append(time.process_time())
    view = ClusterView(snapshot)
    times.append(time.process_time())
    verdict = explain_pod(view, ("default", "train"), CelCompiler())
    times.append(time.process_time())
    names = ("decoding", "reading", "verdict")
    figures = {f"{name}_s": round(times[at + 1] - times[at], 2) for at, name in enumerate(names)}
    figures["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    shown = {"nodes": asked.nodes, "pods": asked.pods, **figures, "code": verdict.code, "changes": len(verdict.changes)}
    print(json.dumps(shown) if asked.json else "\n".join(f"{name:12} {value}" for name, value in shown.items()))
    return 0


def _objects(nodes: int, pods: int) -> Iterator[dict[str, Any]]:
    expression = f"device.driver == '{_DRIVER}' && device.attributes['{_DRIVER}'].type == 'gpu'"
    yield _object(
        _DRA, "DeviceClass", _DRIVER, {"selectors": [{"cel": {"expression": expression}}]}, is_of_cluster=True
    )
    for number in range(nodes):
        node = f"node-{number:05}"
        taints = [{"key": "team", "effect": "NoSchedule"}] if number % 4 == 0 else []
        yield {
            **_object("v1", "Node", node, {"taints": taints}, is_of_cluster=True),
            "status": {"allocatable": {"cpu": "96", "memory": "1Ti", "pods": "110"}},
        }
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        devices = [_device(node, index) for index in range(_GPUS)]
        spec = {"driver": _DRIVER, "nodeName": node, "pool": pool, "devices": devices}
        yield _object(_DRA, "ResourceSlice", f"{node}-gpus", spec, is_of_cluster=True)
        for place in range(pods):
            name = f"{node}-{place}"
            yield {
                **_pod(name, f"claim-{name}" if place < _HOLDERS else "", nodeName=node),
                "status": {"phase": "Running"},
            }
            if place < _HOLDERS:
                held = range(_EACH * place, _EACH * (place + 1))
                results = [
                    {"request": "gpus", "driver": _DRIVER, "pool": node, "device": f"gpu-{index}"} for index in held
                ]
                user = {"resource": "pods", "name": name, "uid": f"uid-{name}"}
                status = {"allocation": {"devices": {"results": results}}, "reservedFor": [user]}
                yield {**_claim(f"claim-{name}", _EACH), "status": status}
    yield _claim("train", 4)
    yield _pod("train", "train")


def _object(
    api_version: str, kind: str, name: str, spec: dict[str, Any], *, is_of_cluster: bool = False
) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", **({} if is_of_cluster else {"namespace": "default"})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def _device(node: str, index: int) -> dict[str, Any]:
    attributes = {
        "type": {"string": "gpu"},
        "uuid": {"string": f"GPU-{node}-{index}"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{index // 2:02}"},
    }
    return {"name": f"gpu-{index}", "attributes": attributes, "capacity": {"memory": {"value": "81559Mi"}}}


def _claim(name: str, count: int) -> dict[str, Any]:
    exactly = {"deviceClassName": _DRIVER, "allocationMode": "ExactCount", "count": count}
    return _object(_DRA, "ResourceClaim", name, {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}})


def _pod(name: str, claim: str, **more: Any) -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"requests": {"cpu": "4", "memory": "8Gi"}}}]
    claims = {"resourceClaims": [{"name": "gpus", "resourceClaimName": claim}]} if claim else {}
    return _object("v1", "Pod", name, {"containers": containers, **claims, **more})
