"""What the cluster suite does in a cluster, with an ordinary client: claims, pods and a device
class under names of this run, removed at the end.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import httpx2
import pytest
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import create_global_resource
from lightkube.resources.core_v1 import Event, Node, PersistentVolume, PersistentVolumeClaim, Pod
from lightkube.resources.resource_v1 import DeviceClass, ResourceClaim, ResourceSlice
from lightkube.types import PatchType

from support.looks import next_look
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.kubeletpb.podresources.v1 import api_pb2 as pod_resources
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as pod_resources_rpc
from topobus.values.dra_names import DRIVER, class_of_device

T = TypeVar("T")


def seconds(name: str, default: float) -> float:
    """Read a time of the suite's settings."""
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise pytest.UsageError(f"{name} is {text!r}, wanted a number of seconds") from None


# Longer than kubelet takes to delete a driver's slices (30 s) and to look
# at its owed claims again (60 s).
LIMIT_S = seconds("TOPOBUS_CLUSTER_LIMIT_S", 100)
# How often it looks. A simulated cluster allows a shorter one.
_LOOK_S = seconds("TOPOBUS_CLUSTER_LOOK_S", 0.5)
# Any image that waits: load it into the node's runtime where there is no registry.
_IMAGE = os.environ.get("TOPOBUS_CLUSTER_IMAGE", "registry.k8s.io/pause:3.10")
_PREFIX = "resource.kubernetes.io"
# What a namespace with pod security `restricted` demands.
_POD_SECURITY = {"runAsNonRoot": True, "runAsUser": 65535, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# That of the client library does not know `extendedResourceName`.
_OfferedClass = create_global_resource("resource.k8s.io", "v1", "DeviceClass", "deviceclasses")
_OF_CLUSTER = (DeviceClass, Node, PersistentVolume, ResourceSlice, _OfferedClass)
_TRY_AGAIN = (429, 500, 502, 503, 504)


class Cluster:
    """One cluster, seen from one node."""

    def __init__(self, client: AsyncClient, node: str) -> None:
        self.client = client
        self.node = node
        self.run = f"topobus-e2e-{uuid.uuid4().hex[:8]}"
        self._made: list[tuple[Any, str]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, kubeconfig: Path, node: str = "") -> AsyncIterator[Cluster]:
        """Connect; without a name the cluster must have exactly one node.

        What was made is removed at the end.
        """
        async with AsyncClient(KubeConfig.from_file(kubeconfig), trust_env=False) as client:
            made = cls(client, await _find_node(client, node))
            try:
                yield made
            finally:
                await made.clean()

    @staticmethod
    async def find_node(kubeconfig: Path, node: str = "") -> str:
        """Name the node that is meant, and see that the cluster can be asked for all that the suite
        reads.

        Errors: fails the tests with one sentence, not with a client's traceback.
        """
        try:
            async with AsyncClient(KubeConfig.from_file(kubeconfig), trust_env=False) as client:
                node_name = await _find_node(client, node)
                for kind in (ResourceSlice, DeviceClass, ResourceClaim, Pod):
                    [
                        api_object
                        async for api_object in client.list(
                            kind, **({"namespace": "default"} if kind in (ResourceClaim, Pod) else {})
                        )
                    ]
                return node_name
        except (ConfigError, OSError, ValueError, KeyError) as err:
            pytest.fail(
                f"KUBECONFIG={kubeconfig} cannot be used: {err}; name one file that kubectl can use, too", pytrace=False
            )
        except ApiError as err:
            hint = (
                "it has no resource.k8s.io/v1: Kubernetes 1.34 or later is needed"
                if err.status.code == httpx2.codes.NOT_FOUND
                else ""
            )
            said = hint or f"the suite needs the rights of a cluster's administrator: {err.status.message}"
            pytest.fail(f"the cluster of KUBECONFIG={kubeconfig}: {said}", pytrace=False)
        except httpx2.HTTPError as err:
            pytest.fail(
                f"the API server of KUBECONFIG={kubeconfig} cannot be reached: {str(err) or type(err).__name__}",
                pytrace=False,
            )

    async def devices(self, device_class: str) -> dict[str, dict[str, Any]]:
        """Our devices of one class on the node, as the scheduler sees them."""
        slices = [
            resource_slice.to_dict()
            async for resource_slice in self.client.list(ResourceSlice, fields={"spec.nodeName": self.node})
        ]
        return {
            it["name"]: it
            for resource_slice in slices
            for it in resource_slice["spec"].get("devices") or ()
            if class_of_device(resource_slice["spec"]["driver"], it["name"]) == device_class
        }

    async def slices(self) -> list[str]:
        """Names of the node's slices of ours."""
        slices = [
            resource_slice.to_dict()
            async for resource_slice in self.client.list(ResourceSlice, fields={"spec.nodeName": self.node})
        ]
        return sorted(
            resource_slice["metadata"]["name"]
            for resource_slice in slices
            if resource_slice["spec"]["driver"] == DRIVER
        )

    async def allocatable(self, resource: str) -> int:
        """How many of a resource the node offers."""
        node = (await self.client.get(Node, self.node)).to_dict()
        return int(node.get("status", {}).get("allocatable", {}).get(resource, 0))

    async def node_condition(self, kind: str) -> dict[str, Any]:
        """A condition of the node. Empty: it has none of this type."""
        node = (await self.client.get(Node, self.node)).to_dict()
        conditions = node.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == kind), {})

    async def our_conditions(self) -> list[str]:
        """The types of the node's conditions that are ours."""
        node = (await self.client.get(Node, self.node)).to_dict()
        kinds = [condition["type"] for condition in node.get("status", {}).get("conditions") or ()]
        return sorted(kind for kind in kinds if kind.startswith(f"{DRIVER}/"))

    async def take_off_conditions(self) -> None:
        """Take them off, as the page about turning it off does."""
        removals = [{"$patch": "delete", "type": kind} for kind in await self.our_conditions()]
        await self.client.patch(
            Node.Status, self.node, {"status": {"conditions": removals}}, patch_type=PatchType.STRATEGIC
        )

    async def make_claim(self, *kinds: str, match: str = "", tolerates: str = "") -> str:
        """Make a DeviceClass for each kind of devices and a claim for one device of each, all alike
        in an attribute.

        The claim's name. `kinds` are classes of ours or drivers of others, see `make_class`;
        `tolerates` is the key of a taint that it bears.
        """
        claim = f"{self.run}-{uuid.uuid4().hex[:4]}"
        requests = []
        for kind in kinds:
            exactly: dict[str, Any] = {
                "deviceClassName": await self.make_class(kind),
                "allocationMode": "ExactCount",
                "count": 1,
            }
            if tolerates:
                exactly["tolerations"] = [{"key": tolerates, "operator": "Exists"}]
            requests.append({"name": kind.partition(".")[0], "exactly": exactly})
        devices: dict[str, Any] = {"requests": requests}
        if match:
            devices["constraints"] = [{"requests": [request["name"] for request in requests], "matchAttribute": match}]
        await self._make(
            ResourceClaim, {"metadata": {"name": claim, "namespace": "default"}, "spec": {"devices": devices}}
        )
        return claim

    async def make_class(self, kind: str) -> str:
        """Make a DeviceClass of our devices of one class (`gpu`), or of the devices of a driver of
        others (`gpu.example.com`), if it is not there; its name.
        """
        name = f"{self.run}-{kind.partition('.')[0]}"
        if (DeviceClass, name) not in self._made:
            expression = f'device.driver == "{kind}"' if "." in kind else class_selector(kind)
            selector = {"cel": {"expression": expression}}
            await self._make(DeviceClass, {"metadata": {"name": name}, "spec": {"selectors": [selector]}})
        return name

    async def offer(self, name: str, selector: str) -> str:
        """Make a DeviceClass with a resource of its own; the resource. The class has the run's name
        and a dash before this one.
        """
        resource = f"{self.run}.example/{name}"
        spec = {"selectors": [{"cel": {"expression": selector}}], "extendedResourceName": resource}
        await self._make(_OfferedClass, {"metadata": {"name": f"{self.run}-{name}"}, "spec": spec})
        return resource

    async def publish(self, driver: str, count: int, *, node: str = "") -> None:
        """Publish devices of a driver that does not exist, on our node or another one."""
        name = node or self.node
        spec = {
            "driver": driver,
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"device-{index}"} for index in range(count)],
        }
        await self._make(ResourceSlice, {"metadata": {"name": f"{self.run}-{uuid.uuid4().hex[:4]}"}, "spec": spec})

    async def make_node(self) -> str:
        """Make a node that has room, no kubelet, and a name before all others; its name."""
        name = f"0-{self.run}"
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        room = {"cpu": "64", "memory": "64Gi", "ephemeral-storage": "64Gi", "pods": "100"}
        await self._make(Node, {"metadata": metadata, "status": {"capacity": room, "allocatable": room}})
        return name

    async def make_volume(self, host: str) -> str:
        """Make a volume that can be used on one host alone, and a claim that is bound to it by the
        cluster.

        The claim's name.
        """
        name = f"{self.run}-{uuid.uuid4().hex[:4]}"
        term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [host]}]}
        shared = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
        volume = {
            **shared,
            "capacity": {"storage": "1Mi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/tmp"},
            "claimRef": {"namespace": "default", "name": name},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
        }
        await self._make(PersistentVolume, {"metadata": {"name": name}, "spec": volume})
        claim = {**shared, "volumeName": name, "resources": {"requests": {"storage": "1Mi"}}}
        await self._make(PersistentVolumeClaim, {"metadata": {"name": name, "namespace": "default"}, "spec": claim})
        return name

    async def make_pod(
        self,
        *,
        claim: str = "",
        resource: str = "",
        count: int = 1,
        volume: str = "",
        gate: str = "",
        ending_s: int = 0,
        also_on: str = "",
    ) -> str:
        """Make a pod that only waits, on our node or a second one, with a claim or so many devices of a resource, a
        claim of a volume, a scheduling gate; its name.

        `ending_s` is how long it takes to end.
        """
        name = f"{self.run}-{uuid.uuid4().hex[:4]}"
        container: dict[str, Any] = {"name": "main", "image": _IMAGE, "securityContext": _CONTAINER_SECURITY}
        # By the node's name: the label kubernetes.io/hostname may have another value.
        fields = [
            {"key": "metadata.name", "operator": "In", "values": [node]} for node in (self.node, *also_on.split())
        ]
        spec: dict[str, Any] = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": ending_s + 1,
            "securityContext": _POD_SECURITY,
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        # A field has one value at most, so each node has a term.
                        "nodeSelectorTerms": [{"matchFields": [field]} for field in fields]
                    }
                }
            },
            # The only node of a small cluster is its control plane, and a second one may not be ready.
            "tolerations": [
                {"operator": "Exists"}
                if also_on
                else {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}
            ],
        }
        if claim:
            spec["resourceClaims"] = [{"name": "devices", "resourceClaimName": claim}]
            container["resources"] = {"claims": [{"name": "devices"}]}
        if volume:
            spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": volume}}]
        if ending_s:
            container["lifecycle"] = {"preStop": {"sleep": {"seconds": ending_s}}}
        if gate:
            spec["schedulingGates"] = [{"name": gate}]
        if resource:
            container["resources"] = {"limits": {resource: str(count)}}
        await self._make(Pod, {"metadata": {"name": name, "namespace": "default"}, "spec": spec})
        return name

    async def pod(self, name: str) -> dict[str, Any]:
        """A pod as plain values."""
        pod: dict[str, Any] = (await self.client.get(Pod, name, namespace="default")).to_dict()
        return pod

    async def claim(self, name: str) -> dict[str, Any]:
        """A claim as plain values."""
        claim: dict[str, Any] = (await self.client.get(ResourceClaim, name, namespace="default")).to_dict()
        return claim

    async def until_running(self, name: str) -> dict[str, Any]:
        """Wait until a pod runs."""

        def is_running(pod: dict[str, Any]) -> bool:
            status = pod.get("status", {})
            assert status.get("phase") != "Failed", (
                f"pod {name} was turned away: {status.get('reason')}: {status.get('message')}"
            )
            return status.get("phase") == "Running"

        try:
            return await until(f"pod {name} runs", lambda: self.pod(name), is_running)
        except AssertionError as err:
            raise AssertionError(f"{err}; what the cluster said of it: {await self._said_of(name)}") from None

    async def why_waiting(self, pod: str) -> str:
        """Why a pod is not scheduled; empty when it is, or when nothing was said yet."""
        conditions = (await self.pod(pod)).get("status", {}).get("conditions") or ()
        return next((str(each.get("message")) for each in conditions if each.get("reason") == "Unschedulable"), "")

    async def remove(self, name: str) -> None:
        """Delete a pod and wait until it is gone."""
        await self._delete(Pod, name)
        self._made = [made for made in self._made if made != (Pod, name)]
        await self._until_gone({name})

    async def events(self, name: str, reason: str) -> list[str]:
        """Messages of the events of an object with this reason."""
        events = [
            event.to_dict()
            async for event in self.client.list(Event, namespace="default", fields={"involvedObject.name": name})
        ]
        return [str(event.get("message")) for event in events if event.get("reason") == reason]

    async def _said_of(self, name: str) -> list[str]:
        """Events of a pod, which have the reason why it waits."""
        try:
            events = [
                event.to_dict()
                async for event in self.client.list(Event, namespace="default", fields={"involvedObject.name": name})
            ]
        except ApiError:
            return []
        return [f"{event.get('reason')}: {event.get('message')}" for event in events]

    async def clean(self) -> None:
        """Remove what was made, pods first; what is gone is no error.

        Wait until the pods are gone: kubelet keeps a pod by claim, and with it the devices, for as
        long as the drivers are away.
        """
        for kind, name in reversed(self._made):
            await self._delete(kind, name)
        pods = {name for kind, name in self._made if kind is Pod}
        self._made.clear()
        await self._until_gone(pods)

    async def _until_gone(self, pods: set[str]) -> None:
        async def left() -> list[str]:
            present = {pod.metadata.name async for pod in self.client.list(Pod, namespace="default")}
            return sorted(present & pods)

        await until("pods are gone", left, lambda names: not names)

    async def _delete(self, kind: Any, name: str) -> None:
        try:
            await self.client.delete(kind, name, **({} if kind in _OF_CLUSTER else {"namespace": "default"}))
        except ApiError as err:
            if err.status.code != 404:
                raise

    async def _make(self, kind: Any, value: dict[str, Any]) -> None:
        await self.client.create(kind(value) if kind is _OfferedClass else kind.from_dict(value))
        self._made.append((kind, value["metadata"]["name"]))


async def _find_node(client: AsyncClient, node: str) -> str:
    nodes = [each_node.metadata.name async for each_node in client.list(Node)]
    if not node:
        if len(nodes) != 1:
            pytest.fail(
                f"the cluster has {len(nodes)} nodes: set TOPOBUS_CLUSTER_NODE to one of {', '.join(nodes)}",
                pytrace=False,
            )
        node = nodes[0]
    if node not in nodes:
        pytest.fail(
            f"TOPOBUS_CLUSTER_NODE: there is no node {node!r}, there are {', '.join(nodes) or 'none'}", pytrace=False
        )
    return node


async def listed_by_kubelet(kubelet: Path, resource: str) -> int:
    """How many healthy devices of a resource kubelet itself has now, by its PodResources socket; -1
    when it does not answer.

    The node object has it up to 10 s later.
    """
    socket = kubelet / "pod-resources" / "kubelet.sock"
    try:
        async with grpc.aio.insecure_channel(
            f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = pod_resources_rpc.PodResourcesListerStub(channel)
            answer = await stub.GetAllocatableResources(pod_resources.AllocatableResourcesRequest(), timeout=5)
    except grpc.aio.AioRpcError:
        return -1
    return len({name for device in answer.devices if device.resource_name == resource for name in device.device_ids})


async def devices_by_pod(kubelet: Path, resource: str) -> dict[str, set[str]]:
    """List which devices of a resource each pod has by kubelet's own word.

    Pods without any are left out.
    """
    socket = kubelet / "pod-resources" / "kubelet.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = await pod_resources_rpc.PodResourcesListerStub(channel).List(
            pod_resources.ListPodResourcesRequest(), timeout=5
        )
    names = {
        pod.name: {
            name
            for container in pod.containers
            for device in container.devices
            if device.resource_name == resource
            for name in device.device_ids
        }
        for pod in answer.pod_resources
    }
    return {pod: devices for pod, devices in names.items() if devices}


def attribute_names(device: dict[str, Any]) -> set[str]:
    """Standard attributes of a device, without their domain."""
    return {name.partition("/")[2] for name in device.get("attributes", {}) if name.startswith(_PREFIX)}


async def until(what: str, look: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Look until it holds; the last look is in the error.

    An API server that cannot be reached for a moment is asked again.
    """
    seen: T | str | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    item = await look()
                    if holds(item):
                        return item
                    seen = item
                except httpx2.TransportError as err:
                    seen = f"the API server could not be asked: {str(err) or type(err).__name__}"
                except ApiError as err:
                    if err.status.code not in _TRY_AGAIN:
                        raise
                    seen = f"the API server said: {err.status.message}"
                await next_look()
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S:g} s: {what}; last seen: {seen}") from None
