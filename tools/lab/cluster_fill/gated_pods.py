"""The pods of a fill, and the scheduling that they need: creates pods behind the gate with a claim
each, records when their gates open, and binds them.

For each pod it measures the seconds from its creation until its gate was open. It uses two watches,
one of pods and one of claims, and no lists.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial

from lab.cluster_fill.played_nodes import create
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.testing.apiserver import Object
from topobus.values.dra_names import group_of_class
from topobus.values.errors import PeerUnavailable

__all__ = ["GATE", "NAMESPACE", "Crowd", "claim_object", "pod_object"]

NAMESPACE = "fill"
GATE = "topobus.dev/allocation"
_DRA = "resource.k8s.io/v1"


def claim_object(number: int, *, devices: int = 1) -> Object:
    """Make a claim for GPUs."""
    exactly = {"deviceClassName": group_of_class("gpu"), "allocationMode": "ExactCount", "count": devices}
    spec = {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}
    metadata = {"name": f"claim-{number:06d}", "namespace": NAMESPACE}
    return {"apiVersion": _DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


def pod_object(number: int) -> Object:
    """Make a pod behind the gate that uses the claim of its number."""
    container = {
        "name": "main",
        "image": "example.com/train",
        "resources": {"requests": {"cpu": "1"}, "claims": [{"name": "gpus"}]},
    }
    spec = {
        "schedulingGates": [{"name": GATE}],
        "containers": [container],
        "resourceClaims": [{"name": "gpus", "resourceClaimName": f"claim-{number:06d}"}],
    }
    metadata = {"name": f"pod-{number:06d}", "namespace": NAMESPACE, "labels": {"app": "train"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Crowd:
    """All pods of a fill.

    Args: parallel — requests under way at the same time; devices — GPUs per claim.
    """

    def __init__(self, client: KubernetesClient, *, parallel: int, devices: int = 1) -> None:
        self._client = client
        self._slots, self._binding = asyncio.Semaphore(parallel), asyncio.Semaphore(parallel)
        self._devices = devices
        self._created_s: dict[str, float] = {}
        self._nodes: dict[str, str] = {}
        """Claim to the node of its allocation, until its pod is bound."""
        self._open: dict[str, str] = {}
        """Claim to its pod, of those that wait to be bound."""
        self._moved = asyncio.Event()
        self.waited_s: dict[str, float] = {}
        """Pod to the seconds from its creation until its gate was open, for pods with an open
        gate."""
        self.bound = 0
        self.began_s = 0.0
        self.last_open_s = 0.0

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow pods and claims, and bind pods whose gates are open, until the block ends."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._follow(object_path(_DRA, "resourceclaims"), partial(self._take_claim, group))),
                group.create_task(self._follow(object_path("v1", "pods"), partial(self._take_pod, group))),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def create(self, first: int, count: int) -> None:
        """Create so many pods with their claims, each claim before its pod."""

        async def make(number: int) -> None:
            async with self._slots:
                await create(self._client, "resourceclaims", claim_object(number, devices=self._devices))
                pod = pod_object(number)
                self._created_s[pod["metadata"]["name"]] = time.monotonic()
                await create(self._client, "pods", pod)

        self.began_s = self.began_s or time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + count):
                group.create_task(make(number))

    async def until_open(self, count: int) -> None:
        """Wait until so many gates are open."""
        while len(self.waited_s) < count:
            self._moved.clear()
            await self._moved.wait()

    async def until_bound(self, count: int) -> None:
        """Wait until so many pods are bound."""
        while self.bound < count:
            self._moved.clear()
            await self._moved.wait()

    async def _follow(self, path: str, take: Callable[[Object], None]) -> None:
        """Follow a kind until cancelled. Where the server ends a watch regularly, the next one
        continues from there.
        """
        version = "0"
        while True:
            async with aclosing(self._client.watch(path, version)) as events:
                async for _, api_object in events:
                    version = str(api_object["metadata"]["resourceVersion"])
                    take(api_object)

    def _take_pod(self, group: asyncio.TaskGroup, pod: Object) -> None:
        name, spec = str(pod["metadata"].get("name", "")), pod.get("spec") or {}
        if name not in self._created_s or name in self.waited_s or spec.get("schedulingGates"):
            return
        self.last_open_s = time.monotonic()
        self.waited_s[name] = self.last_open_s - self._created_s[name]
        self._moved.set()
        self._open[str(spec["resourceClaims"][0]["resourceClaimName"])] = name
        self._bind_open(group)

    def _take_claim(self, group: asyncio.TaskGroup, claim: Object) -> None:
        allocation = (claim.get("status") or {}).get("allocation")
        if allocation:
            self._nodes[str(claim["metadata"]["name"])] = str(
                allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
            )
            self._bind_open(group)

    def _bind_open(self, group: asyncio.TaskGroup) -> None:
        """Bind the pods with an open gate and a known node: the two watches may deliver these in
        any order.
        """
        for claim in self._open.keys() & self._nodes.keys():
            group.create_task(self._bind(self._open.pop(claim), self._nodes.pop(claim)))

    async def _bind(self, pod: str, node: str) -> None:
        """Bind a pod, as kube-scheduler would.

        Errors: raises PeerUnavailable, even for a refusal.
        """
        body = {
            "kind": "Binding",
            "apiVersion": "v1",
            "metadata": {"name": pod},
            "target": {"kind": "Node", "name": node},
        }
        async with self._binding:
            answer = await self._client.ask(
                "POST", object_path("v1", "pods", namespace=NAMESPACE, name=pod, part="binding"), body=body
            )
        if isinstance(answer, Rejected):
            raise PeerUnavailable(f"pod {pod} could not be bound: {answer.code} {answer.message}")
        self.bound += 1
        self._moved.set()
