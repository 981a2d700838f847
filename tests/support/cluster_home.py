"""A cluster for the controller's tests: an API server on loopback with nodes, devices, classes and
pods, and controllers that serve it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from support.controllers import beside, runtime_on
from topobus.bus.bus import Bus
from topobus.controller.cluster.service import ClusterController
from topobus.controller.config import ClusterSettings, ControllerSettings
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.process.clock import Clock
from topobus.process.config import NatsSettings
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.dra_names import group_of_class

GATE = "topobus.dev/allocation"
CLASS = "gpu.example.com"
Object = dict[str, Any]


def node(name: str, *, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """Make a node."""
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": spec,
    }


def device_class(name: str = CLASS, driver: str = CLASS) -> Object:
    """Make a class of all devices of a driver."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return {"kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": [selector]}}


def own_class(name: str) -> Object:
    """Make the class of all of Topobus' devices of a device class."""
    selector = {"cel": {"expression": class_selector(name)}}
    return {"kind": "DeviceClass", "metadata": {"name": group_of_class(name)}, "spec": {"selectors": [selector]}}


def slice_of(node_name: str, count: int, *, driver: str = CLASS, **fields: Any) -> Object:
    """Publish devices of a vendor on a node."""
    devices = [{"name": f"{node_name}-gpu-{index}", **fields} for index in range(count)]
    pool = {"name": node_name, "generation": 1, "resourceSliceCount": 1}
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node_name}-{driver}"},
        "spec": {"driver": driver, "nodeName": node_name, "pool": pool, "devices": devices},
    }


def claim(name: str, *, count: int = 1, device_class_name: str = CLASS, **metadata: Any) -> Object:
    """Ask for devices of one class."""
    request = {
        "name": "r",
        "exactly": {"deviceClassName": device_class_name, "allocationMode": "ExactCount", "count": count},
    }
    return {
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {"devices": {"requests": [request]}},
    }


def template(name: str, *, count: int = 1) -> Object:
    """Make a template of such a claim."""
    return {
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": claim("unnamed", count=count)["spec"]},
    }


def pod(
    name: str, *claims: str, templates: tuple[str, ...] = (), gates: tuple[str, ...] = (GATE,), **spec: Any
) -> Object:
    """Make a pod behind gates that uses claims."""
    uses = [{"name": f"c{index}", "resourceClaimName": each_claim} for index, each_claim in enumerate(claims)]
    uses += [
        {"name": f"t{index}", "resourceClaimTemplateName": each_template}
        for index, each_template in enumerate(templates)
    ]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [{"name": "main", "image": "x"}],
            "schedulingGates": [{"name": gate} for gate in gates],
            "resourceClaims": uses,
            **spec,
        },
    }


class ClusterHome:
    """An API server and what a test does with it."""

    def __init__(self, server: ApiServerSimulator, nats_url: str, folder: Path) -> None:
        self.server = server
        self.nats_url = nats_url
        self.kubeconfig = server.write_kubeconfig(folder / "kubeconfig")
        self.settings = ControllerSettings(
            home="cluster",
            ask_timeout_s=30.0,
            retry_s=0.2,
            cluster=ClusterSettings(
                kubeconfig=str(self.kubeconfig), retry_s=0.05, unschedulable_s=0.2, settle_s=0.1, call_s=5.0
            ),
        )

    def put(self, *objects: Object) -> None:
        """Store objects."""
        for api_object in objects:
            self.server.put(api_object)

    def machine_room(self, nodes: int = 2, devices: int = 2) -> None:
        """Make nodes n1, n2, ... with devices each, and the class of them."""
        self.put(device_class())
        for index in range(1, nodes + 1):
            self.put(node(f"n{index}"), slice_of(f"n{index}", devices))

    def get(self, kind: str, name: str) -> Object:
        """Read an object; empty when there is none."""
        return next(
            (api_object for api_object in self.server.objects(kind) if api_object["metadata"]["name"] == name), {}
        )

    def gates(self, name: str) -> list[str]:
        """List a pod's gates."""
        return [
            scheduling_gate["name"]
            for scheduling_gate in self.get("Pod", name).get("spec", {}).get("schedulingGates") or ()
        ]

    def devices(self, name: str) -> list[str]:
        """List the devices that a claim has."""
        allocation = (self.get("ResourceClaim", name).get("status") or {}).get("allocation") or {}
        return [result["device"] for result in allocation.get("devices", {}).get("results", ())]

    def node_of(self, name: str) -> str:
        """Name the node that a claim's allocation is bound to."""
        selector = ((self.get("ResourceClaim", name).get("status") or {}).get("allocation") or {}).get(
            "nodeSelector"
        ) or {}
        return str(selector["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]) if selector else ""

    def users(self, name: str) -> list[str]:
        """List the pods that have reserved a claim."""
        return [user["name"] for user in (self.get("ResourceClaim", name).get("status") or {}).get("reservedFor") or ()]

    def events(self, name: str) -> list[tuple[str, str]]:
        """List the events of an object: reason and message."""
        return [
            (event["reason"], event["message"])
            for event in self.server.objects("Event")
            if event["involvedObject"]["name"] == name
        ]

    def holders(self) -> dict[str, list[str]]:
        """Say which claims have each device."""
        holders: dict[str, list[str]] = {}
        for resource_claim in self.server.objects("ResourceClaim"):
            for device in self.devices(resource_claim["metadata"]["name"]):
                holders.setdefault(device, []).append(resource_claim["metadata"]["name"])
        return holders

    def set_status(self, kind: str, name: str, **status: Any) -> None:
        """Write an object's status, as somebody else in the cluster would."""
        present = self.get(kind, name)
        self.server.put({**present, "status": {**(present.get("status") or {}), **status}})

    async def bind(self, name: str, node_name: str) -> int:
        """Bind a pod, as kube-scheduler does; gives the answer's code."""
        path = f"/api/v1/namespaces/default/pods/{name}/binding"
        async with httpx2.AsyncClient(
            base_url=self.server.url, headers={"authorization": "Bearer secret"}, trust_env=False
        ) as client:
            body = {
                "kind": "Binding",
                "apiVersion": "v1",
                "metadata": {"name": name},
                "target": {"kind": "Node", "name": node_name},
            }
            return (await client.post(path, json=body)).status_code

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until something is true at the server."""
        await self.server.until(holds, timeout_s=60.0, what=what)

    @asynccontextmanager
    async def controller(
        self,
        *,
        wrap: Callable[[KubernetesApi], KubernetesApi] = lambda api: api,
        clock: Clock | None = None,
        settings: ControllerSettings | None = None,
    ) -> AsyncIterator[ClusterController]:
        """Run one replica; `wrap` puts something between it and the API server."""
        async with running_controller(settings or self.settings, self.nats_url, wrap=wrap, clock=clock) as replica:
            yield replica


@asynccontextmanager
async def running_controller(
    settings: ControllerSettings,
    nats_url: str,
    *,
    wrap: Callable[[KubernetesApi], KubernetesApi] = lambda api: api,
    clock: Clock | None = None,
) -> AsyncIterator[ClusterController]:
    """Run one replica at the API server that the settings name."""
    api = KubernetesApi.open(settings.cluster)
    async with Bus.session(NatsSettings(url=nats_url), name="controller") as bus:
        await bus.provision()
        replica = ClusterController(settings, runtime_on(bus, clock=clock), wrap(api))
        try:
            async with beside(replica.run()):
                yield replica
        finally:
            await api.close()
