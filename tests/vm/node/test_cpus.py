"""Exclusive CPUs beside a real kubelet's, on cgroup v2, by the word of the kernel: what a
container's control group has, and what its processes may use.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from topobus.values.idset import CpuSet
from vm.kubelet import CLAIM, GATEWAY, PODS, STATE, Cpus, Kubelet, guaranteed, pod, until
from vm.node import NAME, Node

pytestmark = pytest.mark.timeout(1800)
_ALL, _OWNED, _KUBELETS = CpuSet.parse("0-7"), CpuSet.parse("4-7"), CpuSet.parse("2-3")
# The CPUs of Topobus' two NUMA nodes, and how the kernel names the node.
_NODES = {CpuSet.parse("4-5"): "2", CpuSet.parse("6-7"): "3"}


def _kubelets_word() -> dict[str, CpuSet]:
    """Exclusive CPUs as kubelet's CPU manager has written them down, by container.

    Here each pod has one.
    """
    entries = json.loads(STATE.read_text()).get("entries", {})
    return {uid: CpuSet.parse(cpus) for uid, containers in entries.items() for cpus in containers.values()}


def _shared(seen: dict[str, Cpus], name: str = "other/main") -> CpuSet:
    return seen[name].are


@pytest_asyncio.fixture(scope="module")
async def running(cluster: Kubelet) -> AsyncIterator[Kubelet]:
    """Run a pod of each kind: with nothing, with CPUs of kubelet, with CPUs of Topobus."""
    await cluster.run(
        pod("other", main={}), pod("guaranteed", main=guaranteed(2)), pod("worker", template="pair", main=CLAIM)
    )
    yield cluster
    await cluster.delete("other", "guaranteed", "worker")


async def test_claim_has_cpus_and_memory_of_a_numa_node_alone_when_pods_of_all_kinds_run(running: Kubelet) -> None:
    """Its CPUs are in no other set at the same time, the Guaranteed pod has those that kubelet
    wrote down, and all others have the rest.
    """
    at_once = await running.cpus()
    worker = at_once["worker/main"]

    assert worker.own == worker.are
    assert _NODES.get(worker.are) == worker.mems
    assert [
        name
        for name, cpus in at_once.items()
        if name != "worker/main" and not worker.are.isdisjoint(cpus.effective | cpus.running)
    ] == []
    assert at_once["guaranteed/main"].are == _KUBELETS
    assert [*_kubelets_word().values()] == [_KUBELETS]
    # kubelet takes its own CPUs from the others at its next look, every ten seconds.
    await running.become("the rest for all others", lambda seen: _shared(seen) == _ALL - worker.are - _KUBELETS)


@pytest.mark.parametrize("program", ["containerd", "kubelet"])
async def test_cpus_stay_and_are_given_once_when_a_program_ends_and_is_started_anew(
    running: Kubelet, program: str
) -> None:
    """Of containerd, which ends in order, or kubelet, which is killed: no look in between sees
    other CPUs in a container with its own, and a new pod gets what is free.
    """
    taken = (await running.cpus())["worker/main"].are
    async with running.unchanged("worker/main", "guaranteed/main"):
        await {"containerd": running.start_containerd, "kubelet": running.restart}[program]()
        await running.run(pod("late", template="pair", main=CLAIM))
        seen = await running.become("the rest for others", lambda seen: _shared(seen) == _ALL - _OWNED - _KUBELETS)
        await running.delete("late")
        await running.become("what was given back for others", lambda seen: _shared(seen) == _ALL - taken - _KUBELETS)

    assert seen["late/main"].are == _OWNED - taken
    assert _NODES[seen["late/main"].are] == seen["late/main"].mems


async def test_containers_of_a_pod_are_told_apart_when_only_some_have_a_claim(running: Kubelet) -> None:
    """A container without the claim has the shared CPUs, beside another of the same pod that has
    its own.
    """
    taken = (await running.cpus())["worker/main"].are
    await running.run(pod("mixed", template="pair", main=CLAIM, beside={}))
    seen = await running.become("the pool", lambda seen: _shared(seen, "mixed/beside") == _ALL - _OWNED - _KUBELETS)
    await running.delete("mixed")

    assert seen["mixed/main"].are == _OWNED - taken
    assert seen["worker/main"].are == taken
    await running.become("the pool as before", lambda seen: _shared(seen) == _ALL - taken - _KUBELETS)


async def test_container_has_its_own_cpus_and_the_pool_when_its_claim_says_so(running: Kubelet) -> None:
    """Its own are no other container's; the pool is that of all others, also when it grows."""
    taken = (await running.cpus())["worker/main"].are
    own, pool = _OWNED - taken, _ALL - _OWNED - _KUBELETS
    await running.run(pod("wide", template="pair-with-pool", main=CLAIM))
    await running.become("the pool", lambda seen: seen["wide/main"].are == own | pool and _shared(seen) == pool)
    await running.delete("guaranteed")
    await running.become(
        "the pool with what kubelet has given back",
        lambda seen: seen["wide/main"].are == _ALL - taken and _shared(seen) == _ALL - _OWNED,
    )
    await running.delete("wide")
    await running.run(pod("guaranteed", main=guaranteed(2)))
    await running.become("the pool as before", lambda seen: _shared(seen) == _ALL - taken - _KUBELETS)


async def test_claims_cpus_are_its_own_again_when_another_gateway_comes_after_one_was_killed(
    node: Node, running: Kubelet
) -> None:
    """Without a gateway kubelet writes its pool also into the containers of claims, and a pod that
    starts has it.

    The next gateway takes these CPUs away from all others, and each claim has what it had. So has
    the container that kubelet gave a CPU meanwhile.
    """

    async def is_told() -> bool:
        return any(said.startswith("CpusShared") for said in await running.events("young"))

    await running.run(pod("young", template="pair", main=CLAIM))
    own = {name: cpus for name, cpus in (await running.cpus()).items() if name in ("worker/main", "young/main")}
    node.kill("gateway")
    # It takes a CPU out of kubelet's pool, so that kubelet writes the pool into all others.
    await running.run(pod("exclusive", node=NAME, main=guaranteed(1)), pod("meanwhile", main={}))
    without = await running.become(
        "kubelet's pool in claims", lambda seen: seen["young/main"].are == seen["meanwhile/main"].are
    )
    own["exclusive/main"] = without["exclusive/main"]
    await node.start("gateway", **GATEWAY)
    rest = _ALL - _OWNED - _KUBELETS - own["exclusive/main"].are
    await running.become(
        "their own for all that have some, the rest for others",
        lambda seen: own.items() <= seen.items() and _shared(seen) == _shared(seen, "meanwhile/main") == rest,
    )

    assert without["young/main"].are != own["young/main"].are
    await until("an event", is_told, said=lambda: running.events("young"))
    await running.delete("young", "exclusive", "meanwhile")


async def test_cpus_are_given_back_when_their_pods_are_gone(running: Kubelet) -> None:
    """Those of kubelet and those of Topobus, to the container that was never restarted."""
    (other,) = (container_id for name, container_id in (await running.containers()).items() if name == "other/main")
    await running.delete("guaranteed", "worker")
    await running.become("all CPUs for the one that is left", lambda seen: _shared(seen) == _ALL)

    assert (await running.containers())["other/main"] == other


async def test_pod_is_refused_with_the_reason_when_its_cpus_are_kubelets(node: Node, cluster: Kubelet) -> None:
    """Both sides would give CPUs 2-3: the pod waits, and its event names the side that may have
    them and what to do.
    """
    said: list[str] = []

    async def is_refused() -> bool:
        said[:] = [line for line in await cluster.events("refused") if "both sides' to give" in line]
        return bool(said)

    await node.start("gateway", **{**GATEWAY, "TOPOBUS_GATEWAY__CPUS__OWNED": "all"})
    try:
        await cluster.make(PODS, pod("refused", template="of-kubelet", main=CLAIM))
        await until("a refusal", is_refused, said=lambda: cluster.events("refused"))
        state = (await cluster.pod("refused"))["status"]["phase"]
        await cluster.delete("refused")
    finally:
        await node.start("gateway", **GATEWAY)

    assert state == "Pending"
    assert "CPUs 2-3" in said[0]
    assert "--reserved-cpus" in said[0]


async def test_pod_is_refused_by_kubelet_when_its_cpus_are_of_several_numa_nodes(cluster: Kubelet) -> None:
    """By the Topology Manager's policy restricted: CPUs 1 and 3 are free, of two nodes, and a
    running pod keeps what it has.
    """
    await cluster.run(pod("first", node=NAME, main=guaranteed(1)))
    await cluster.run(pod("second", node=NAME, main=guaranteed(1)))
    await cluster.delete("first")
    await cluster.make(PODS, pod("wide", node=NAME, main=guaranteed(2)))

    async def has_failed() -> bool:
        return (await cluster.pod("wide"))["status"]["phase"] == "Failed"

    await until("a refusal", has_failed)
    refused, seen = (await cluster.pod("wide"))["status"], await cluster.cpus()

    assert refused["reason"] == "TopologyAffinityError"
    assert seen["second/main"].are == CpuSet(2)
