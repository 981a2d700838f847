"""The API server simulator and the kubelet simulator as one small cluster, with as much scheduler
and node agent between them as the cluster suite needs.

    python small_cluster.py KUBELET_DIR KUBECONFIG

SIGUSR1 restarts kubelet. SIGUSR2 makes it wait no longer for drivers that are away, and is sent by
a test that takes Topobus off the node. The file `nobody` beside KUBECONFIG is a user's without
rights. It proves nothing about a real cluster, but the suite's own steps can run, and fail, without
one.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import sys
from pathlib import Path
from typing import Any

from support.looks import next_look
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
)
from topobus.values.idset import NodeSet
from topobus.values.request import Policy
from topobus.values.view import AlignmentOptions

NODE = "small-node"
_LOOK_S = 0.05
# kubelet 1.36 repeats by itself what failed for a pod after 60 to 90 s (measured, ADR 21); sooner
# only when the pod itself changes.
_REPEAT_S = 60.0
_DRIVER = re.compile(r'device\.driver == "([^"]+)"')
_CLASS = re.compile(r'\.class == "([^"]+)"')
Value = dict[str, Any]


class SmallCluster:
    """One node."""

    def __init__(self, server: ApiServerSimulator, kubelet: KubeletSimulator) -> None:
        self._server = server
        self._kubelet = kubelet
        self._admitted: dict[str, Admission] = {}
        # What was only begun has to be undone as well.
        self._tried: dict[str, Pod] = {}
        self._failed: dict[str, tuple[float, Value]] = {}
        """Pods that could not start, by uid: when the last try ended, and what of the pod kubelet
        had seen before it."""
        self.wants_restart = False

    async def run(self) -> None:
        """Do what is to be done, again and again."""
        self._server.put({"kind": "Node", "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}})
        while True:
            if self.wants_restart:
                self.wants_restart = False
                await self._kubelet.restart()
                # To a kubelet that starts every pod is a new one.
                self._failed.clear()
            self._report_node()
            self._server.generate_claims()
            self._server.release_claims()
            for listed in self._server.objects("Pod"):
                # Others change and delete pods while one is served.
                for pod in self._server.objects("Pod", fields=f"metadata.name={listed['metadata']['name']}"):
                    await self._serve(pod)
            await next_look()

    def _report_node(self) -> None:
        capacity = self._kubelet.capacity()
        node = self._server.objects("Node")[0]
        status = {
            "allocatable": {name: str(other_capacity.allocatable) for name, other_capacity in capacity.items()},
            "capacity": {name: str(other_capacity.capacity) for name, other_capacity in capacity.items()},
        }
        present = node.get("status") or {}
        if present != {**present, **status}:
            # Conditions of others stay.
            self._server.put({**node, "status": {**present, **status}})

    async def _serve(self, pod: Value) -> None:
        uid = pod["metadata"]["uid"]
        if pod["metadata"].get("deletionTimestamp"):
            tried = self._tried.get(uid)
            if tried is None or not await self._kubelet.remove(tried):
                self._admitted.pop(uid, None)
                self._tried.pop(uid, None)
                self._failed.pop(uid, None)
                self._server.remove("Pod", pod["metadata"]["name"], grace_s=0)
        elif not pod["spec"].get("nodeName"):
            if self._schedule(pod):
                self._server.bind(pod["metadata"]["name"], NODE)
        elif uid not in self._admitted and pod.get("status", {}).get("phase") != "Failed":
            if self._is_due(pod):
                await self._start(pod)
        elif uid in self._admitted:
            self._say(pod, {"phase": "Running", "containerStatuses": self._health(pod, self._admitted[uid])})

    def _is_due(self, pod: Value) -> bool:
        """Whether kubelet looks at a pod now that does not run: it is new to it, was changed since,
        or its turn has come.
        """
        ended_s, seen = self._failed.get(pod["metadata"]["uid"], (0.0, None))
        return seen != _what_kubelet_watches(pod) or asyncio.get_running_loop().time() - ended_s >= _REPEAT_S

    async def _start(self, pod: Value) -> None:
        uid = pod["metadata"]["uid"]
        self._tried[uid] = self._of_kubelet(pod)
        answer = await self._kubelet.admit(self._tried[uid])
        if isinstance(answer, Admission):
            self._admitted[uid] = answer
            self._say(pod, {"phase": "Running"})
        elif answer.is_final:
            self._say(pod, {"phase": "Failed", "reason": answer.reason, "message": answer.message})
        else:
            self._failed[uid] = (asyncio.get_running_loop().time(), _what_kubelet_watches(pod))

    def _say(self, pod: Value, status: Value) -> None:
        present = self._server.objects("Pod", fields=f"metadata.name={pod['metadata']['name']}")
        if present and present[0].get("status") != {**present[0].get("status", {}), **status}:
            self._server.put({**present[0], "status": {**present[0].get("status", {}), **status}})

    def _schedule(self, pod: Value) -> bool:
        """Allocate its claims and find room for its resources."""
        allocatable = {name: capacity.allocatable for name, capacity in self._kubelet.capacity().items()}
        used: dict[str, int] = {}
        for other in self._server.objects("Pod", fields=f"spec.nodeName={NODE}"):
            for name, count in _limits(other).items():
                used[name] = used.get(name, 0) + count
        if any(allocatable.get(name, 0) - used.get(name, 0) < count for name, count in _limits(pod).items()):
            return False
        return all(self._allocate(name, pod) for name in _claim_names(pod))

    def _allocate(self, name: str, pod: Value) -> bool:
        claims = {
            resource_claim["metadata"]["name"]: resource_claim
            for resource_claim in self._server.objects("ResourceClaim")
        }
        claim = claims.get(name)
        if claim is None:
            return False
        status = claim.get("status") or {}
        if "allocation" not in status:
            results = self._choose(claim, claims.values())
            if results is None:
                return False
            status = {**status, "allocation": {"devices": {"results": results}}}
        metadata = pod["metadata"]
        reserved = [
            *(status.get("reservedFor") or ()),
            {"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]},
        ]
        self._server.put({**claim, "status": {**status, "reservedFor": reserved}})
        return True

    def _choose(self, claim: Value, claims: Any) -> list[Value] | None:
        classes = {
            device_class["metadata"]["name"]: str(device_class["spec"])
            for device_class in self._server.objects("DeviceClass")
        }
        taken = {
            (result["driver"], result["device"])
            for each_claim in claims
            for result in ((each_claim.get("status") or {}).get("allocation") or {})
            .get("devices", {})
            .get("results", ())
        }
        options: list[list[tuple[Value, ...]]] = []
        for request in claim["spec"]["devices"]["requests"]:
            selector = classes.get(request["exactly"]["deviceClassName"], "")
            driver, device_class = _DRIVER.search(selector), _CLASS.search(selector)
            if driver is None:
                return None
            slices = self._server.objects("ResourceSlice", fields=f"spec.nodeName={NODE},spec.driver={driver[1]}")
            free = [
                {
                    "request": request["name"],
                    "driver": driver[1],
                    "pool": resource_slice["spec"]["pool"]["name"],
                    "device": device["name"],
                    "of": device,
                }
                for resource_slice in slices
                for device in resource_slice["spec"].get("devices") or ()
                if (device_class is None or device["attributes"]["class"] == {"string": device_class[1]})
                and (driver[1], device["name"]) not in taken
                and (not device.get("taints") or request["exactly"].get("tolerations"))
            ]
            options.append(list(itertools.combinations(free, request["exactly"].get("count", 1))))
        matched = [constraint["matchAttribute"] for constraint in claim["spec"]["devices"].get("constraints") or ()]
        for chosen in itertools.product(*options):
            devices = [value for group in chosen for value in group]
            if all(
                len({str(device["of"].get("attributes", {}).get(name)) for device in devices}) == 1 for name in matched
            ):
                return [{key: value for key, value in device.items() if key != "of"} for device in devices]
        return None

    def _of_kubelet(self, pod: Value) -> Pod:
        claims = {
            resource_claim["metadata"]["name"]: resource_claim
            for resource_claim in self._server.objects("ResourceClaim")
        }
        references = []
        for name in _claim_names(pod):
            results = claims[name]["status"]["allocation"]["devices"]["results"]
            drivers = tuple(sorted({result["driver"] for result in results}))
            references.append(ClaimReference(name=name, uid=claims[name]["metadata"]["uid"], drivers=drivers))
        containers = tuple(
            Container(
                name=container["name"],
                resources={
                    name: int(count) for name, count in (container.get("resources") or {}).get("limits", {}).items()
                },
            )
            for container in pod["spec"]["containers"]
        )
        return Pod(
            name=pod["metadata"]["name"], uid=pod["metadata"]["uid"], containers=containers, claims=tuple(references)
        )

    def _health(self, pod: Value, admitted: Admission) -> list[Value]:
        statuses = []
        for grant in admitted.containers:
            states = [
                {
                    "name": resource,
                    "resources": [
                        {"resourceID": identifier, "health": self._state(resource, identifier)} for identifier in ids
                    ],
                }
                for resource, ids in grant.devices.items()
            ]
            states += [
                {
                    "name": f"claim:{claim.uid}",
                    "resources": [
                        {
                            "resourceID": f"{device.driver}/{device.pool}/{device.device}",
                            "health": self._kubelet.device_health(device.driver, device.pool, device.device).state,
                        }
                        for device in claim.devices
                    ],
                }
                for claim in admitted.claims
            ]
            image = {"image": "any", "imageID": "any", "restartCount": 0}
            statuses.append(
                {
                    "name": grant.name,
                    "ready": True,
                    **image,
                    "state": {"running": {}},
                    "allocatedResourcesStatus": states,
                }
            )
        return statuses

    def _state(self, resource: str, device: str) -> str:
        plugin_device = self._kubelet.devices(resource).get(device)
        return "Healthy" if plugin_device is None or plugin_device.is_healthy else "Unhealthy"


def _what_kubelet_watches(pod: Value) -> Value:
    """Whatever of a pod makes kubelet look at it when it changes (config.go,
    podsDifferSemantically).

    Its status is none of it.
    """
    return {"spec": pod["spec"], **{name: pod["metadata"].get(name) for name in ("labels", "annotations")}}


def _limits(pod: Value) -> dict[str, int]:
    limits: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name, count in ((container.get("resources") or {}).get("limits") or {}).items():
            limits[name] = limits.get(name, 0) + int(count)
    return limits


def _claim_names(pod: Value) -> list[str]:
    made = {
        resource_claim_status["name"]: resource_claim_status["resourceClaimName"]
        for resource_claim_status in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    }
    return [
        resource_claim.get("resourceClaimName") or made.get(resource_claim["name"], "")
        for resource_claim in pod["spec"].get("resourceClaims") or ()
    ]


async def main(kubelet_dir: Path, kubeconfig: Path) -> None:
    """Run until the end of the process."""
    async with ApiServerSimulator(collects_garbage=True, bookmark_s=1.0) as server:
        kubelet = KubeletSimulator(
            kubelet_dir,
            numa_nodes=NodeSet(0, 1),
            # As kubelet's own default. Every other policy gives pods by resource the first NUMA
            # node's devices, which claims are given as well (ADR 21).
            options=AlignmentOptions(policy=Policy.NONE),
            timings=KubeletTimings(reconcile_s=0.5, grace_s=2.0),
            wipe_slices=lambda driver: server.wipe_slices(NODE, driver),
        )
        async with kubelet:
            cluster = SmallCluster(server, kubelet)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(cluster, "wants_restart", True))
            loop.add_signal_handler(signal.SIGUSR2, kubelet.wipe_at_once)
            running = asyncio.create_task(cluster.run())
            loop.add_signal_handler(signal.SIGTERM, running.cancel)
            await server.until(lambda: server.objects("Node"), what="the node")
            server.write_kubeconfig(kubeconfig.with_name("nobody"), user="nobody")
            # Last: a process that waits for this file finds everything there.
            server.write_kubeconfig(kubeconfig)
            await asyncio.gather(running, return_exceptions=False)


if __name__ == "__main__":
    try:
        asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except asyncio.CancelledError:
        sys.exit(0)
