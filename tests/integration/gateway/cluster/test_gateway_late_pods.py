"""Devices of pods that kubelet has not heard of since its start: kubelet gives them again from its
checkpoint, without a call, so nobody else may have them meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from support.gateway_rig import Rig
from support.node_plane import NODE
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import Admission, Container, Pod

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
FORMER = Pod(
    name="former", namespace="default", uid="uid-former", containers=(Container(name="main", resources={GPU: 1}),)
)


async def booted(rig: Rig, server: ApiServerSimulator, **status: Any) -> None:
    """Admit a pod by a resource, have the ledger name it, and boot the node: kubelet waits for its pods."""
    server.put(
        {
            "kind": "Pod",
            "metadata": {"name": "former", "namespace": "default", "uid": "uid-former"},
            "spec": {"nodeName": NODE},
        }
    )
    await rig.kubelet.wait_for_resource(GPU, allocatable=2)
    assert isinstance(await rig.kubelet.admit(FORMER), Admission)
    await rig.plane.asks.wait_for("named")
    await rig.kubelet.reboot()
    await rig.kubelet.wait_for_resource(GPU, allocatable=2)


async def looked(rig: Rig, times: int = 4) -> None:
    """Wait until kubelet was asked for its pods so many times more."""
    before = [event.event for event in rig.kubelet.events].count("PodResources.List")
    await rig.kubelet.wait_for_event("PodResources.List", count=before + times)


async def test_gateway_keeps_devices_of_a_pod_that_kubelet_will_hear_of(rig: Rig, server: ApiServerSimulator) -> None:
    """The cluster has the pod here: its devices stay held until it is gone from there."""
    async with rig.kubelet, rig.gateway():
        await booted(rig, server)
        await looked(rig)
        released_before = rig.plane.asks.requests("release")
        server.remove("Pod", "former", grace_s=0)
        await rig.plane.asks.wait_for("released")

    assert released_before == []
    assert rig.plane.ledger.allocations == {}


async def test_gateway_keeps_devices_while_no_api_server_says_whether_their_pod_is_here(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """An API server that does not answer is no evidence: the devices stay held."""
    async with rig.kubelet, rig.gateway():
        server.refuse("GET", "pods", code=500, times=1000)
        await booted(rig, server)
        server.remove("Pod", "former", grace_s=0)
        await looked(rig)

    assert rig.plane.asks.requests("release") == []


async def test_gateway_releases_devices_that_kubelet_lists_their_pod_without(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The pod of a StatefulSet that was made anew has the name, and what kubelet lists for it counts."""
    anew = structs.replace(FORMER, uid="uid-anew", containers=(Container(name="main"),))
    async with rig.kubelet, rig.gateway():
        await booted(rig, server)
        assert isinstance(await rig.kubelet.admit(anew), Admission)
        released = await rig.plane.asks.wait_for("released")

    assert released.owner.name == GPU
