"""Claims for a number of a group's CPUs, where one device is all CPUs of a NUMA node: which of them
is decided on the node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from topobus.kubernetes.client import object_path
from topobus.values.idset import CpuSet
from vm.kubelet import CLAIM, Kubelet, pod
from vm.node import Node

pytestmark = pytest.mark.timeout(1800)
_ALL = CpuSet.parse("0-7")
_CLAIMS = object_path("resource.k8s.io/v1", "resourceclaims", namespace="default")


@pytest_asyncio.fixture(scope="module")
async def groups(node: Node, cluster: Kubelet) -> AsyncIterator[Kubelet]:
    """Show each NUMA node as one device, and run a pod without a claim."""
    await node.start("cpu", TOPOBUS_CPU__CPUS__GROUPS="numa")
    await cluster.run(pod("other", main={}))
    yield cluster
    await cluster.delete("other")
    await node.start("cpu")


async def _devices(cluster: Kubelet) -> dict[str, str]:
    """Name the device that each pod's claim was allocated."""
    answer: Any = await cluster.client.ask("GET", _CLAIMS)
    return {
        claim["metadata"]["ownerReferences"][0]["name"]: claim["status"]["allocation"]["devices"]["results"][0][
            "device"
        ]
        for claim in answer["items"]
    }


async def test_claims_have_different_cpus_of_a_group_when_they_share_it(groups: Kubelet) -> None:
    """Two pods with one CPU each of one NUMA node, and its memory.

    A third one with two gets the other node, and no other pod is on any of them.
    """
    await groups.run(pod("left", template="share-1", main=CLAIM), pod("right", template="share-1", main=CLAIM))
    await groups.run(pod("wide", template="share-2", main=CLAIM))
    devices, seen = await _devices(groups), await groups.cpus()
    left, right, wide = (seen[f"{name}/main"] for name in ("left", "right", "wide"))

    assert devices == {"left": "cpu-numa-2", "right": "cpu-numa-2", "wide": "cpu-numa-3"}
    assert {left.are, right.are} == {CpuSet(4), CpuSet(5)}
    assert (left.mems, right.mems, wide.mems) == ("2", "2", "3")
    assert wide.are == CpuSet(6, 7)
    assert seen["other/main"].are == CpuSet.parse("0-3")
    await groups.delete("left", "right", "wide")
    await groups.become("all CPUs for the one that is left", lambda seen: seen["other/main"].are == _ALL)


async def test_containers_of_a_pod_are_told_apart_when_only_some_have_a_share(groups: Kubelet) -> None:
    """One CPU of the group for the container with the claim.

    The other of its containers has what all have.
    """
    await groups.run(pod("mixed", template="share-1", main=CLAIM, beside={}))
    seen = await groups.become(
        "the pool", lambda seen: seen["mixed/beside"].are == seen["other/main"].are == _ALL - CpuSet(4)
    )

    assert seen["mixed/main"].are == CpuSet(4)
    assert seen["mixed/main"].mems == "2"
