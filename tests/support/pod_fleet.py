"""Topobus on several nodes of one cluster as pods of the manifests, and what befalls them there: the
containers are killed by this machine's kernel, which runs those of all nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from support.installation import Manifests
from support.node_fleet import Befall, NodeFleet

__all__ = ["PodFleet"]

_PROC = Path("/proc")
_NODE_SERVICES = ("discovery", "gpu", "nic", "fpga", "topology", "relay")


class _Fleet(Manifests):
    """All of it, and the controller."""

    _workloads = (*Manifests._workloads, "deployment/topobus-controller")

    async def restart(self, workload: str) -> None:
        """Replace a workload's pods as an upgrade does."""
        await self._on_pods("rollout", "restart", workload)
        await self.settled()

    async def settled(self) -> None:
        """Wait until every pod is ready."""
        await self._settled()

    def containers(self, workload: str, container: str) -> dict[str, str]:
        """Ids of one workload's containers of a name that run now, by pod and node."""
        words = ["get", "pods", "-n", "topobus", "-l", f"app.kubernetes.io/name={workload}", "-o", "json"]
        answer = subprocess.run([self._kubectl, *words], capture_output=True, text=True, timeout=60, check=True)
        pods: list[dict[str, Any]] = json.loads(answer.stdout)["items"]
        return {
            f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')}": status["containerID"].rpartition("/")[2]
            for pod in pods
            for status in pod["status"].get("containerStatuses", ())
            if status["name"] == container and "running" in status["state"]
        }


class PodFleet(NodeFleet):
    """The nodes of a cluster with Topobus on them, of one kustomization (TOPOBUS_CLUSTER_MANIFESTS)."""

    def __init__(self, machines: Mapping[str, str]) -> None:
        """Take the nodes, each with the recorded machine that its pods find in place of its hardware."""
        super().__init__(machines, {}, Path(os.environ["TOPOBUS_KUBELET_DIR"]), Path(os.environ["KUBECONFIG"]))
        self._pods = _Fleet()

    async def install(self) -> None:
        """Bring it up."""
        await self._pods.install()

    def away(self, node: str) -> list[tuple[float, float]]:
        """No CPU is exclusive with these manifests."""
        return []

    def _every_fault(self) -> dict[str, tuple[str, Befall]]:
        kill = self._kill
        workloads = ("statefulset/nats", "daemonset/topobus-node", "deployment/topobus-controller")
        return {
            "hub killed": ("", partial(kill, "nats", ("nats",))),
            "all of the hub killed": ("", partial(kill, "nats", ("nats",), every=True)),
            "leaf killed": ("", partial(kill, "topobus-node", ("nats",))),
            "service killed": ("", partial(kill, "topobus-node", _NODE_SERVICES)),
            "gateway killed": ("", partial(kill, "topobus-gateway", ("gateway",))),
            "controller killed": ("", partial(kill, "topobus-controller", ("controller",))),
            "gateways replaced": ("", self._replace_gateway),
            **{f"{workload} replaced": ("", partial(self._restart, workload)) for workload in workloads},
            "kubelet restarted": ("RESTART_KUBELET", self._restart_kubelet),
            "runtime restarted": ("RESTART_RUNTIME", self._restart_runtime),
            "node cut off": ("CUT_OFF", self._cut_off),
        }

    async def _kill(
        self, workload: str, containers: tuple[str, ...], chance: random.Random, *, every: bool = False
    ) -> None:
        running = await asyncio.to_thread(self._pods.containers, workload, chance.choice(containers))
        chosen = sorted(running) if every else [chance.choice(sorted(running))]
        assert await asyncio.to_thread(_kill_containers, [running[name] for name in chosen]), f"{chosen} did not run"
        await self._until_ready()

    async def _replace_gateway(self, chance: random.Random) -> None:
        await self._pods.update(surge=chance.choice((True, False)))

    def _restart(self, workload: str, _chance: random.Random) -> Coroutine[None, None, None]:
        return self._pods.restart(workload)

    async def _until_ready(self) -> None:
        await self._pods.settled()


def _kill_containers(ids: list[str]) -> int:
    """Kill all processes of containers, and say how many there were."""
    killed = 0
    for path in _PROC.iterdir():
        if not path.name.isdecimal():
            continue
        with suppress(OSError):
            groups = (path / "cgroup").read_text()
            if any(container in groups for container in ids):
                os.kill(int(path.name), signal.SIGKILL)
                killed += 1
    return killed
