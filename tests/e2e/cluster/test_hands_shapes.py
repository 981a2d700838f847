"""Shapes with CPUs on a real node: a pod with a plain resource has a recorded GPU and NIC, and beside
them one of the machine's two CPUs, to which it is pinned. A second one waits for it.

As `test_hands`: TOPOBUS_CLUSTER_INSTALLATION=hands, TOPOBUS_CLUSTER_NRI.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from e2e.cluster.hands import cpus_of_pid
from support.cluster import Cluster, until
from support.installation import Processes, setting

_PROFILE = """
title = "Two CPUs, of which the first stays the pool's, two GPUs and two NICs"
cpu = { model = "EPYC", vendor = "AuthenticAMD", sockets = 1, cores = [{ count = 2 }] }
numa = { memory_gib = 8 }
roots = [{ bus = "0000:15", numa_node = 0, switches = [{ cards = ["h100", "connectx-7", "h100", "connectx-7"] }] }]
"""
_SELECTOR = 'device.driver == "topobus.dev" && device.attributes["topobus.dev"].?level.orValue("") == "worker"'
_GIVEN = ("CPUS", "GPU_DEVICES", "NIC_DEVICES")

pytestmark = pytest.mark.skipif(
    setting("INSTALLATION") != "hands", reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `hands`"
)


class _WithWorkers(Processes):
    services = ("discovery", "gpu", "nic", "cpu", "topology", "gateway")

    def _service_settings(self) -> dict[str, str]:
        worker = {"name": "worker", "parts": {"gpu": 1, "nic": 1, "cpu": 1}, "within": "numa"}
        return {
            "TOPOBUS_TOPOLOGY__OWN_SHAPES": json.dumps([worker]),
            "TOPOBUS_TOPOLOGY__ALIGNMENT__RESERVED_CPUS": "0",
            "TOPOBUS_CPU__CPUS__GROUPS": "numa",
            "TOPOBUS_CPU__JOURNAL__DIR": str(self.folder / "journal-cpu"),
            "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
            "TOPOBUS_GATEWAY__HARDWARE__ROOT": "/",
        }


def _seen(pod: str) -> dict[str, str]:
    """What a pod's container was given, and on which CPUs the kernel lets it run."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(word.split("=", 1) for word in path.read_text().split("\0") if "=" in word)
            # The sandbox has the pod's name, too, and no services.
            if variables.get("HOSTNAME") == pod and "KUBERNETES_SERVICE_HOST" in variables:
                ours = {name: variables.get(f"TOPOBUS_{name}", "") for name in _GIVEN}
                return {**ours, "allowed": cpus_of_pid(int(path.parent.name))}
        except (OSError, UnicodeDecodeError):
            continue
    raise AssertionError(f"no container of pod {pod} runs")


async def test_worker_has_its_cpu_for_itself_by_a_plain_resource(tmp_path: Path) -> None:
    """One of two workers runs, pinned also after a kill of the gateway, and the other one when it is gone."""
    (tmp_path / "two.toml").write_text(_PROFILE)
    kubeconfig, kubelet = Path(os.environ["KUBECONFIG"]), Path(os.environ["TOPOBUS_KUBELET_DIR"])
    node = await Cluster.find_node(kubeconfig, os.environ.get("TOPOBUS_CLUSTER_NODE", ""))
    topobus = _WithWorkers(node, kubelet, kubeconfig, machine=str(tmp_path / "two.toml"))
    try:
        await topobus.install()
        async with Cluster.open(kubeconfig, node) as cluster:
            worker = await cluster.offer("worker", _SELECTOR)
            neighbour, first = await cluster.make_pod(), await cluster.make_pod(resource=worker)
            for pod in (neighbour, first):
                await cluster.until_running(pod)
            second = await cluster.make_pod(resource=worker)
            why = await until("a second worker waits", lambda: cluster.why_waiting(second), bool)
            before, beside = _seen(first), _seen(neighbour)
            await topobus.kill_gateway()
            after = _seen(first)
            await cluster.remove(first)
            await cluster.until_running(second)
            next_one = _seen(second)
        topobus.check()
    finally:
        topobus.close()

    assert "cannot allocate all claims" in why
    assert (before["allowed"], before["CPUS"], beside["allowed"]) == ("1", "1", "0")
    assert before["GPU_DEVICES"].startswith("gpu-")
    assert before["NIC_DEVICES"].startswith("nic-")
    assert after == next_one == before
