"""Pods with hands on a real cluster: made, looked at from the host, and removed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Event, Pod
from lightkube.resources.resource_v1 import ResourceClaim

from support.cluster import Cluster, until
from topobus.values.dra_names import DRIVER, class_of_device

__all__ = ["IMAGE", "Hands", "HandsPod", "Started", "refusals_of"]

IMAGE = os.environ.get("TOPOBUS_CLUSTER_SHELLIMAGE", "docker.io/library/busybox:local")
# What a container sees at its very start goes to its log: a device that
# came late would be missing there.
_SCRIPT = "ls /sys/class/net | tr '\\n' ' '; grep Cpus_allowed_list /proc/self/status; exec sleep 999999"

# busybox has one where the machine has none.
_PING = ("ping",) if shutil.which("ping") else ("busybox", "ping")


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a container saw at its start, by its log."""

    interfaces: frozenset[str]
    cpus: str


@dataclass(frozen=True, kw_only=True)
class HandsPod:
    """A pod and its claim."""

    name: str
    claim: str
    has_nic: bool
    has_cpu: bool
    address: str = ""
    uid: str = ""


class Hands:
    """Makes classes, claims and pods under names of this run, and removes them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.client = cluster.client
        self.run = cluster.run
        self._made: list[tuple[Any, str]] = []

    async def make_classes(self) -> None:
        """Make a DeviceClass of each class of devices."""
        for name in ("nic", "cpu"):
            await self._cluster.make_class(name)

    async def make(
        self,
        *,
        nic: dict[str, Any] | None = None,
        has_cpu: bool = False,
        address: str = "",
        annotations: dict[str, str] | None = None,
        host_port: int = 0,
        cpu_count: int = 1,
        is_cpu_group: bool = False,
    ) -> HandsPod:
        """Make a claim and its pod.

        Shapes: nic — the claim's opaque configuration of the interface; host_port — served by the
        pod at `address` alone; is_cpu_group — `cpu_count` CPUs of one group.
        """
        name = f"{self.run}-{uuid.uuid4().hex[:8]}"
        requests: list[dict[str, Any]] = [
            {
                "name": kind,
                "exactly": {"deviceClassName": f"{self.run}-{kind}", "allocationMode": "ExactCount", "count": count},
            }
            for kind, is_wanted, count in (
                ("nic", nic is not None, 1),
                ("cpu", has_cpu, 1 if is_cpu_group else cpu_count),
            )
            if is_wanted
        ]
        if is_cpu_group:
            requests[-1]["exactly"]["capacity"] = {"requests": {"cpus": str(cpu_count)}}
        devices: dict[str, Any] = {"requests": requests}
        if nic:
            devices["config"] = [{"requests": ["nic"], "opaque": {"driver": DRIVER, "parameters": nic}}]
        await self._make(
            ResourceClaim, {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices}}
        )
        container: dict[str, Any] = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", _SCRIPT],
            "resources": {"claims": [{"name": "hands"}]},
        }
        if host_port:
            container["ports"] = [{"containerPort": 8080, "hostPort": host_port}]
            container["command"] = ["sh", "-c", _SCRIPT.replace("exec", f"httpd -p {address}:8080 -h /etc; exec")]
        spec = {
            "nodeName": "",
            "containers": [container],
            # A container that is held back while the gateway is away fails at its start; kubelet
            # tries it again, but for pods that say Never.
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 1,
            "resourceClaims": [{"name": "hands", "resourceClaimName": name}],
            "tolerations": [{"operator": "Exists"}],
        }
        del spec["nodeName"]
        metadata = {"name": name, "namespace": "default", "annotations": annotations or {}}
        await self._make(Pod, {"metadata": metadata, "spec": spec})
        uid = (await self._cluster.pod(name))["metadata"]["uid"]
        return HandsPod(name=name, claim=name, has_nic=nic is not None, has_cpu=has_cpu, address=address, uid=uid)

    async def started(self, pod: HandsPod, limit_s: float) -> Started:
        """Wait until its container runs, and give what it saw first.

        Errors: raises AssertionError with the pod's events when it does not run in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    phase = (await self._cluster.pod(pod.name)).get("status", {}).get("phase")
                    assert phase != "Failed", f"pod {pod.name} failed: {await self.said_of(pod)}"
                    if phase == "Running" and (seen := self._log(pod)) is not None:
                        return seen
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(
                f"pod {pod.name} does not run after {limit_s:g} s: {await self.said_of(pod)}"
            ) from None

    def _log(self, pod: HandsPod) -> Started | None:
        for file in Path("/var/log/pods").glob(f"default_{pod.name}_{pod.uid}/main/*.log"):
            try:
                text = file.read_text()
            except FileNotFoundError:
                # Of a container that was held back at its start: kubelet has
                # removed it, and makes another.
                continue
            words = " ".join(line.split(" ", 3)[3] for line in text.splitlines() if line.count(" ") >= 3)
            match = re.match(r"(.*?)\s*Cpus_allowed_list:\s*(\S+)", words)
            if match:
                return Started(interfaces=frozenset(match[1].split()), cpus=match[2])
        return None

    async def said_of(self, pod: HandsPod) -> list[str]:
        """Events of a pod."""
        events = [
            event.to_dict()
            async for event in self.client.list(Event, namespace="default", fields={"involvedObject.name": pod.name})
        ]
        return [f"{event.get('reason')}: {event.get('message')}" for event in events][-8:]

    async def phase(self, pod: HandsPod) -> str:
        """The pod's phase."""
        return str((await self._cluster.pod(pod.name)).get("status", {}).get("phase"))

    async def claim(self, pod: HandsPod) -> dict[str, Any]:
        """The claim as the API server has it."""
        return await self._cluster.claim(pod.claim)

    async def network_data(self, pod: HandsPod) -> dict[str, Any]:
        """Network data of the claim's NIC, empty while there is none."""
        for device in (await self.claim(pod)).get("status", {}).get("devices") or ():
            if class_of_device(str(device.get("driver")), str(device.get("device"))) == "nic" and device.get(
                "networkData"
            ):
                return dict(device["networkData"])
        return {}

    async def remove(self, pod: HandsPod, limit_s: float) -> None:
        """Delete a pod, wait until it is gone, and delete its claim.

        Errors: raises AssertionError when it does not go in time.
        """
        await self._delete(Pod, pod.name)
        try:
            async with asyncio.timeout(limit_s):
                await until(f"pod {pod.name} is gone", lambda: self._exists(pod.name), lambda exists: not exists)
        except TimeoutError:
            raise AssertionError(f"pod {pod.name} is not gone after {limit_s:g} s: {await self.said_of(pod)}") from None
        await self._delete(ResourceClaim, pod.claim)
        self._made = [made for made in self._made if made[1] != pod.name]

    async def clean(self) -> None:
        """Remove what was made, pods first; what is gone is no error."""
        for kind, name in reversed(self._made):
            await self._delete(kind, name)
        self._made.clear()

    async def _exists(self, name: str) -> bool:
        try:
            await self._cluster.pod(name)
        except ApiError as err:
            if err.status.code == 404:
                return False
            raise
        return True

    async def _delete(self, kind: Any, name: str) -> None:
        try:
            await self.client.delete(kind, name, namespace="default")
        except ApiError as err:
            if err.status.code != 404:
                raise

    async def _make(self, kind: Any, value: dict[str, Any]) -> None:
        await self.client.create(kind.from_dict(value))
        self._made.append((kind, value["metadata"]["name"]))


async def refusals_of(hands: Hands, pod: HandsPod, words: tuple[str, ...]) -> list[str]:
    """Give the first of our events of a pod that say all these words."""
    lines = {line for line in await hands.said_of(pod) if line.startswith(("DevicesNot", "CpusRefused"))}
    return sorted(line for line in lines if all(word in line for word in words))[:1]


async def container_pid(pod_uid: str) -> int:
    """Find the process of a pod's container on this machine, when it has told its log all and
    sleeps.
    """

    async def sleeper() -> int:
        return await asyncio.to_thread(_sleeper, pod_uid)

    return await until(f"a process of pod {pod_uid} sleeps on this machine", sleeper, bool)


def _sleeper(pod_uid: str) -> int:
    """Find the process that sleeps in a cgroup of the pod; 0 while there is none."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            cgroup, words = (process / "cgroup").read_text(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if pod_uid in cgroup and words == b"sleep\0999999\0":
            return int(process.name)
    return 0


def cpus_of_pid(pid: int) -> str:
    """Say on which CPUs a process may run, as the kernel lists them."""
    match = re.search(r"Cpus_allowed_list:\s*(\S+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return match[1]


def ping(address: str, count: int = 2) -> bool:
    """Ping from the host, which is made to ask where the address is.

    An interface's addresses are announced once, when it is switched on, and a bridge drops that:
    its port opens a moment later. The host would go on for up to a minute to send to the interface
    that had the address before (base_reachable_time of 30 s, times 1.5 at most, and its probes).
    """
    subprocess.run(["ip", "neigh", "flush", "to", address], capture_output=True, timeout=20, check=False)
    return (
        subprocess.run(
            [*_PING, "-c", str(count), "-W", "2", address], capture_output=True, timeout=20, check=False
        ).returncode
        == 0
    )
