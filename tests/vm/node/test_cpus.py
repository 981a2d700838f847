"""Exclusive CPUs beside a real kubelet's, on cgroup v2, by the word of the kernel: what a container's control group has, and what its processes may use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from topobus.values.idset import CpuSet
from vm.kubelet import CLAIM, STATE, Cpus, Kubelet, guaranteed, pod

pytestmark = pytest.mark.timeout(1800)
_ALL, _KUBELETS = CpuSet.parse("0-7"), CpuSet.parse("2-3")
# The CPUs of Topobus' two NUMA nodes, and how the kernel names the node.
_NODES = {CpuSet.parse("4-5"): "2", CpuSet.parse("6-7"): "3"}


def _kubelets_word() -> dict[str, CpuSet]:
    """Exclusive CPUs as kubelet's CPU manager has written them down, by container; here each pod has one."""
    entries = json.loads(STATE.read_text()).get("entries", {})
    return {uid: CpuSet.parse(cpus) for uid, containers in entries.items() for cpus in containers.values()}


def _shared(seen: dict[str, Cpus], name: str = "other/main") -> CpuSet:
    return seen[name].are


@pytest_asyncio.fixture(scope="module")
async def running(cluster: Kubelet) -> AsyncIterator[Kubelet]:
    """Run a pod of each kind: with nothing, with CPUs of kubelet, with CPUs of Topobus."""
    await cluster.run(pod("other", main={}), pod("guaranteed", main=guaranteed(2)), pod("worker", template="pair", main=CLAIM))
    yield cluster
    await cluster.delete("other", "guaranteed", "worker")


async def test_claim_has_cpus_and_memory_of_a_numa_node_alone_when_pods_of_all_kinds_run(running: Kubelet) -> None:
    """Its CPUs are in nobody else's set at once, the Guaranteed pod has those that kubelet wrote down, and all others have the rest."""
    at_once = await running.cpus()
    worker = at_once["worker/main"]

    assert worker.own == worker.are
    assert _NODES.get(worker.are) == worker.mems
    assert [
        name for name, cpus in at_once.items() if name != "worker/main" and not worker.are.isdisjoint(cpus.effective | cpus.running)
    ] == []
    assert at_once["guaranteed/main"].are == _KUBELETS
    assert [*_kubelets_word().values()] == [_KUBELETS]
    # kubelet takes its own CPUs from the others at its next look, every ten seconds.
    await running.become("the rest for all others", lambda seen: _shared(seen) == _ALL - worker.are - _KUBELETS)
