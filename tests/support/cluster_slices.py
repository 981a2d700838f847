"""Slices and claims of a simulated API server, as tests of the gateway read and put them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from support.gateway_rig import Rig
from support.node_plane import claim
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER, class_of_device

SLICES = "resourceslices"


def shown(server: ApiServerSimulator) -> dict[str, list[dict[str, Any]]]:
    """Our devices by class. A slice has those of one class."""
    devices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for resource_slice in server.objects("ResourceSlice"):
        of_slice = resource_slice["spec"].get("devices", [])
        classes = {class_of_device(resource_slice["spec"]["driver"], device["name"]) for device in of_slice}
        assert len(classes) < 2, classes
        for device_class in classes - {None}:
            devices[str(device_class)].extend(of_slice)
    return devices


def taints(server: ApiServerSimulator, device_class: str = "gpu") -> dict[str, list[str]]:
    """Taints by device."""
    return {
        shown_device["name"]: [f"{it['key']}:{it['effect']}" for it in shown_device.get("taints", ())]
        for shown_device in shown(server)[device_class]
    }


def writes(server: ApiServerSimulator) -> list[tuple[str, int]]:
    """Every write of a slice and how it ended."""
    return [
        (request.method, request.code) for request in server.requests if request.is_write and SLICES in request.path
    ]


async def published(rig: Rig, server: ApiServerSimulator) -> None:
    """Wait until both classes are there and the gateway reports that it is done."""
    await server.until(lambda: len(server.objects("ResourceSlice")) == 2, what="two slices")
    await rig.readiness.until(lambda report: report.get("slices", "").startswith("ready"))


def allocated(server: ApiServerSimulator, name: str, *devices: str) -> ClaimReference:
    """Put an allocated claim into the cluster, as the scheduler does.

    Its own uid is in the reference.
    """
    stand_alone = claim(name, "", *devices)
    request = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
    spec = {"devices": {"requests": [request]}}
    stored = server.put(
        {"kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec, "status": stand_alone.status}
    )
    return ClaimReference(name=name, uid=stored["metadata"]["uid"], drivers=(DRIVER,))
