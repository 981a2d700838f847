"""A kubelet and a containerd in the guest, and the cluster as an administrator sees it.

The control plane runs on the host (plane.py).
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct

from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.values.idset import CpuSet
from vm.kernel import sh
from vm.node import JOB, NAME

PODS = object_path("v1", "pods", namespace="default")
CLASSES = object_path("resource.k8s.io/v1", "deviceclasses")
TEMPLATES = object_path("resource.k8s.io/v1", "resourceclaimtemplates", namespace="default")
DEVICES = {
    "card": "nic-0000-21-00-0",
    "function": "nic-0000-21-10-0",
    "second": "nic-0000-21-10-2",
    "plain": "nic-0000-22-00-0",
}
"""The guest's cards; `card` is whole what the two functions are parts of."""
STATE = Path("/var/lib/kubelet/cpu_manager_state")
MEMORY_STATE = Path("/var/lib/kubelet/memory_manager_state")
_CLAIMS = object_path("resource.k8s.io/v1", "resourceclaims", namespace="default")
_BY_RESOURCE = "resource.kubernetes.io/extended-resource-claim"
_IMAGE = "docker.io/library/busybox:local"
_ADDRESS = "10.0.2.15"
_GROUPS = Path("/sys/fs/cgroup/kubepods")
_CONTAINERD = """
version = 3
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "docker.io/library/busybox:local"
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".cni]
  use_internal_loopback = true
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "/var/run/nri/nri.sock"
  plugin_registration_timeout = "60s"
  # An emulated plugin needs longer than NRI's two seconds.
  plugin_request_timeout = "30s"
"""
# The network of pods that are not in the host's: no interface, and an address that nobody uses.
_NETWORK = """#!/bin/sh
[ "$CNI_COMMAND" != ADD ] ||
  echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}],
    "ips": [{"address": "10.9.9.9/24", "interface": 0}]}'
"""
GATEWAY = {
    "TOPOBUS_GATEWAY__CLUSTER__MODE": "kubeconfig",
    "TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG": str(JOB / "admin.conf"),
    "TOPOBUS_GATEWAY__CLUSTER__CALL_S": "60",
    # Emulated peers answer late.
    "TOPOBUS_GATEWAY__DEADLINES__ADOPT_S": "15",
    "TOPOBUS_GATEWAY__DEADLINES__PREPARE_S": "20",
    "TOPOBUS_GATEWAY__EXPOSURE": '{"cpu":"dra"}',
    "TOPOBUS_GATEWAY__CPUS__OWNED": "4-7",
}
"""Settings of a gateway that has the CPUs which kubelet reserves."""
EVICTION_MIB = 50
"""Memory that kubelet keeps off its pods in any case."""
# An emulated kubelet starts a pod in half a minute on two busy cores, and is itself ready after
# five where forty others want them.
PATIENCE_S = 600.0


class Cpus(Struct, frozen=True):
    """The CPUs of a container by the kernel: `own` and `mems` are what was written into its control
    group, `effective` what holds, `running` what each of its processes may use.
    """

    own: CpuSet
    effective: CpuSet
    mems: str
    running: CpuSet

    @property
    def are(self) -> CpuSet:
        """The CPUs, where control group and processes agree.

        Errors: raises AssertionError where they do not.
        """
        assert self.effective == self.running, self
        return self.running


class Kubelet:
    """The node's programs, and pods on it."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.settings: Mapping[str, Any] = {}
        """What kubelet was started with, beside what all tests want."""

    async def begin(self) -> None:
        """Set the guest up as a node, and start containerd."""
        sh(
            "mkdir -p /kubernetes /etc/cni/net.d /opt/cni/bin /etc/cdi /var/run/cdi /var/run/nri /var/lib/kubelet && "
            "mount --make-rshared / && modprobe -a overlay"
        )
        sh("mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,ro,cache=loose kubernetes /kubernetes")
        card = sh("ls /sys/bus/virtio/drivers/virtio_net/virtio*/net").strip()
        sh(f"ip link set {card} up && ip addr add {_ADDRESS}/24 dev {card} && ip route add default via 10.0.2.2")
        network = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}
        plugin = Path("/opt/cni/bin/none")
        plugin.write_text(_NETWORK)
        plugin.chmod(0o755)
        Path("/etc/cni/net.d/none.conflist").write_text(json.dumps(network))
        Path("/etc/containerd.toml").write_text(_CONTAINERD)
        await self.start_containerd()
        Path("/tmp/image.tar").write_bytes(_image(Path("/usr/bin/busybox").read_bytes()))
        await asyncio.to_thread(sh, "/kubernetes/ctr -n k8s.io images import /tmp/image.tar")

    async def start_containerd(self) -> None:
        """Start containerd (again).

        It ends in order, for one that is killed may take containers that run for lost.
        """
        if process := self._processes.pop("containerd", None):
            process.terminate()
            await asyncio.to_thread(process.wait)
        self._start("containerd", "-c", "/etc/containerd.toml")
        await until("containerd", lambda: _answers(socket.AF_UNIX, "/run/containerd/containerd.sock"))

    async def start(self, *, is_new: bool = False, **settings: Any) -> None:
        """Start kubelet (again), `is_new` without what its CPU and memory managers remember, which
        they want when their settings change.
        """
        self.settings = settings
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cpuManagerPolicy": "static",
            "evictionHard": {
                "memory.available": f"{EVICTION_MIB}Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "nodeLeaseDurationSeconds": 240,
            "runtimeRequestTimeout": "15m",
            **settings,
        }
        Path("/etc/kubelet.json").write_text(json.dumps(configuration))
        self.kill("kubelet")
        if is_new:
            for file in (STATE, MEMORY_STATE):
                file.unlink(missing_ok=True)
        words = (
            f"--config /etc/kubelet.json --kubeconfig {JOB}/kubelet.conf --hostname-override {NAME} --node-ip "
            f"{_ADDRESS} --housekeeping-interval=60s"
        )
        self._start("kubelet", *words.split())

    async def ready(self) -> None:
        """Wait until kubelet is ready and has told what it has to give."""
        reserved = len(CpuSet.parse(self.settings["reservedSystemCPUs"]))
        online = len(CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text()))

        async def is_ready() -> bool:
            answer = await self.client.ask("GET", object_path("v1", "nodes", name=NAME))
            if isinstance(answer, Rejected) or not _answers(socket.AF_INET, ("127.0.0.1", 10248)) or not STATE.exists():
                return False
            ready = any(
                each["type"] == "Ready" and each["status"] == "True" for each in answer["status"].get("conditions", ())
            )
            return ready and answer["status"]["allocatable"]["cpu"] == str(online - reserved)

        await until("kubelet", is_ready)

    async def restart(self) -> None:
        """Kill kubelet, and start it as it was."""
        await self.start(**self.settings)
        await self.ready()

    def kill(self, name: str) -> None:
        """End a program as a crash does."""
        if process := self._processes.pop(name, None):
            process.kill()
            process.wait()

    def end(self) -> None:
        """End all, and with them the guest."""
        for name in [*self._processes]:
            self.kill(name)

    async def make(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make an object."""
        answer = await self.client.ask("POST", path, body=body)
        assert not isinstance(answer, Rejected), answer
        return answer

    async def pod(self, name: str) -> dict[str, Any]:
        """Give a pod as the API server has it; nothing when there is none."""
        answer = await self.client.ask("GET", f"{PODS}/{name}")
        return {} if isinstance(answer, Rejected) else answer

    async def claims(self, name: str) -> list[dict[str, Any]]:
        """Give the claims that were made for a pod, first those that it names itself."""
        answer = await self.client.ask("GET", _CLAIMS)
        assert not isinstance(answer, Rejected), answer
        made = [each for each in answer["items"] if each["metadata"]["ownerReferences"][0]["name"] == name]
        return sorted(made, key=lambda claim: _BY_RESOURCE in claim["metadata"].get("annotations", {}))

    async def names(self) -> set[str]:
        """Name all pods."""
        answer = await self.client.ask("GET", PODS)
        assert not isinstance(answer, Rejected), answer
        return {pod["metadata"]["name"] for pod in answer["items"]}

    async def run(self, *pods: Mapping[str, Any]) -> None:
        """Make pods, and wait until all their containers run."""
        for body in pods:
            await self.make(PODS, body)
        for body in pods:
            name = body["metadata"]["name"]
            wanted = len(body["spec"]["containers"])

            async def runs(name: str = name, wanted: int = wanted) -> bool:
                status = (await self.pod(name))["status"]
                assert status["phase"] != "Failed", status
                return sum("running" in each["state"] for each in status.get("containerStatuses", ())) == wanted

            await until(f"pod {name}", runs, said=lambda name=name: self.events(name))

    async def delete(self, *names: str) -> None:
        """Delete pods, and wait until they are gone."""
        for name in names:
            await self.client.ask("DELETE", f"{PODS}/{name}")
        for name in names:

            async def is_gone(name: str = name) -> bool:
                return not await self.pod(name)

            await until(f"end of pod {name}", is_gone)

    async def events(self, name: str) -> list[str]:
        """The events of a pod."""
        path = object_path("v1", "events", namespace="default")
        answer = await self.client.ask("GET", path, params={"fieldSelector": f"involvedObject.name={name}"})
        return (
            [] if isinstance(answer, Rejected) else [f"{each['reason']}: {each['message']}" for each in answer["items"]]
        )

    async def containers(self) -> dict[str, str]:
        """Ids of the containers that run, by `POD/CONTAINER`."""
        answer = await self.client.ask("GET", PODS)
        assert not isinstance(answer, Rejected), answer
        return {
            f"{pod['metadata']['name']}/{container['name']}": container["containerID"].removeprefix("containerd://")
            for pod in answer["items"]
            for container in pod["status"].get("containerStatuses", ())
            if "running" in container["state"]
        }

    async def cpus(self) -> dict[str, Cpus]:
        """The CPUs of each container that runs, by `POD/CONTAINER`, as the kernel shows them."""
        read = {name: cpus_of(container_id) for name, container_id in (await self.containers()).items()}
        return {name: cpus for name, cpus in read.items() if cpus is not None}

    @asynccontextmanager
    async def unchanged(self, *names: str) -> AsyncIterator[None]:
        """Look all the time whether CPUs and memory nodes of containers (`POD/CONTAINER`) change.

        An AssertionError at the end when they have.
        """
        containers = {name: container_id for name, container_id in (await self.containers()).items() if name in names}
        before = {name: cpus_of(container_id) for name, container_id in containers.items()}
        assert set(before) == set(names)
        changes: list[tuple[str, Cpus | None]] = []

        async def look() -> None:
            while True:
                seen = {name: cpus_of(container_id) for name, container_id in containers.items()}
                changes.extend((name, cpus) for name, cpus in seen.items() if cpus != before[name])
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
        assert changes == []

    async def become(self, what: str, wanted: Callable[[dict[str, Cpus]], bool]) -> dict[str, Cpus]:
        """Wait until the kernel shows the wanted CPUs of all containers."""
        seen: dict[str, Cpus] = {}

        async def holds() -> bool:
            seen.clear()
            seen.update(await self.cpus())
            # Between a group's write and its processes the two differ for a moment.
            return all(cpus.effective == cpus.running for cpus in seen.values()) and wanted(seen)

        async def said() -> dict[str, Cpus]:
            return seen

        await until(what, holds, said=said)
        return seen

    def _start(self, name: str, *words: str) -> None:
        self.kill(name)
        environment = {"PATH": "/kubernetes:/usr/sbin:/usr/bin:/sbin:/bin"}
        with (JOB / f"{name}.log").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [f"/kubernetes/{name}", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )


def connect() -> KubernetesClient:
    """Begin to talk with the API server."""
    return KubernetesClient.open(
        AccessSettings(kubeconfig=str(JOB / "admin.conf"), call_s=60.0, setting="vm", next_step="")
    )


async def until(what: str, holds: Callable[[], Any], said: Callable[[], Any] | None = None) -> None:
    """Wait for something; an AssertionError, with what is `said` of it, when it does not come."""
    end = time.monotonic() + PATIENCE_S
    while True:
        seen = holds()
        if await seen if asyncio.iscoroutine(seen) else seen:
            return
        assert time.monotonic() < end, f"{what}: not after {PATIENCE_S} s: {await said() if said else ''}"
        await asyncio.sleep(0.3)


def pod(
    name: str,
    *,
    template: str = "",
    node: str = "",
    starts: bool = True,
    on_host: bool = True,
    **containers: Mapping[str, Any],
) -> dict[str, Any]:
    """Make a pod of containers with these resources; `template` is of the claim `cpus`, `node` what
    nobody schedules it to, `on_host` that it has the host's network.

    One that is not to start waits for a volume that is not there: kubelet admits it, and gives it
    CPUs and memory, but runs nothing.
    """
    volume = {"name": "absent", "configMap": {"name": "absent"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            **({"resourceClaims": [{"name": "cpus", "resourceClaimTemplateName": template}]} if template else {}),
            **({"nodeName": node} if node else {}),
            **({} if starts else {"volumes": [volume]}),
            "hostNetwork": on_host,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": container,
                    "image": _IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "1000000"],
                    "resources": resources,
                    **({} if starts else {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}),
                }
                for container, resources in containers.items()
            ],
        },
    }


def guaranteed(cpus: int, memory: str = "20Mi") -> dict[str, Any]:
    """Resources for which kubelet's static policies give CPUs and memory of NUMA nodes."""
    return {"limits": {"cpu": str(cpus), "memory": memory}}


CLAIM = {"claims": [{"name": "cpus"}]}
"""Resources of a container that has the claim's CPUs."""


def cpus_of(container_id: str) -> Cpus | None:
    """The CPUs of a container, as the kernel shows them, or None when it has ended."""
    try:
        (group,) = (each for each in _GROUPS.rglob(container_id) if each.is_dir())
        own, effective, mems, processes = (
            (group / name).read_text().strip()
            for name in ("cpuset.cpus", "cpuset.cpus.effective", "cpuset.mems", "cgroup.procs")
        )
        states = [Path(f"/proc/{pid}/status").read_text() for pid in processes.split()]
        (running,) = {state.split("Cpus_allowed_list:")[1].split()[0] for state in states}
    except (OSError, ValueError):
        return None
    return Cpus(own=CpuSet.parse(own), effective=CpuSet.parse(effective), mems=mems, running=CpuSet.parse(running))


def network_of(container_id: str) -> str:
    """Name a container's network namespace, as `ip netns` does."""
    (group,) = (each for each in _GROUPS.rglob(container_id) if each.is_dir())
    inode = Path(f"/proc/{(group / 'cgroup.procs').read_text().split()[0]}/ns/net").stat().st_ino
    (name,) = (each.name for each in Path("/run/netns").iterdir() if each.stat().st_ino == inode)
    return name


def _answers(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family) as client:
        return client.connect_ex(address) == 0


def _image(busybox: bytes) -> bytes:
    """Make an image of one static program, as an archive that containerd imports."""

    def archive(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o755
                tar.addfile(entry, io.BytesIO(content))
            for name, target in links.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
        return out.getvalue()

    layer = archive({"bin/busybox": busybox}, {"bin/sleep": "busybox"})
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]}
    # The sandbox of a pod is of the same image.
    config = {"Env": ["PATH=/bin"], "Cmd": ["sleep", "1000000"]}
    described = json.dumps({"architecture": "amd64", "os": "linux", "config": config, "rootfs": rootfs}).encode()
    listed = json.dumps([{"Config": "config.json", "RepoTags": [_IMAGE], "Layers": ["layer.tar"]}]).encode()
    return archive({"config.json": described, "layer.tar": layer, "manifest.json": listed}, {})
