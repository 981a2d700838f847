"""Devices that kubelet gives to a second pod while the first one has them, because somebody listed
pods while it allocated (kubelet 1.36.2, UpdateAllocatedDevices).

Seen on three real nodes, without the container runtime's word: two running pods with the same GPUs.
The simulated kubelet has the defect, too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from support.gateway_rig import make_rig
from support.node_plane import device
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, Container, Pod, Rejection

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"


def asking(name: str, count: int) -> Pod:
    """A pod that asks for GPUs by their resource."""
    return Pod(name=name, uid=f"uid-{name}", containers=(Container(name="main", resources={GPU: count}),))


async def list_pods(socket: Path) -> None:
    """Look as any exporter does."""
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        await rpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest())


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named yet"])
async def test_second_pod_is_refused_when_kubelet_gives_it_devices_that_a_pod_has(
    nats_server: NatsServer, *, is_named: bool
) -> None:
    """The pod that has them keeps them alone.

    The refusal has kubelet count anew, so that the next pod gets what is free.
    """
    async with make_rig(nats_server.url, classes=("gpu",)) as rig:
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
        async with rig.kubelet, rig.gateway():
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
            over = asking("over", 1)
            await rig.kubelet.admit(over)
            await rig.plane.asks.wait_for("named")
            go_on, adopts = rig.plane.asks.hold("adopt"), len(rig.plane.asks.requests("adopt"))
            admitting = asyncio.create_task(rig.kubelet.admit(asking("first", 1)))
            await rig.plane.asks.wait_for("adopt", adopts + 1)
            await rig.kubelet.remove(over)
            await list_pods(Path(rig.settings.pod_resources_socket))
            go_on.set()
            first = await admitting
            if is_named:
                await rig.plane.asks.wait_for("named", 2)
            second = await rig.kubelet.admit(asking("second", 2))
            third = await rig.kubelet.admit(asking("third", 1))

    assert isinstance(first, Admission)
    assert isinstance(second, Rejection)
    assert "pod default/first has gpu-" in second.message
    assert isinstance(third, Admission)
    assert third.containers[0].devices[GPU] != first.containers[0].devices[GPU]


async def test_gateway_lists_no_pods_while_kubelet_allocates(nats_server: NatsServer) -> None:
    """Its own look at the pods waits for the end of the allocation, however long that takes."""
    async with make_rig(nats_server.url, classes=("gpu",)) as rig:
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
        async with rig.kubelet, rig.gateway():
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
            go_on = rig.plane.asks.hold("adopt")
            admitting = asyncio.create_task(rig.kubelet.admit(asking("first", 1)))
            await rig.plane.asks.wait_for("adopt")
            asking_for_pods = asyncio.create_task(rig.pods())
            lists_before = len([event for event in rig.kubelet.events if event.event == "PodResources.List"])
            done, _ = await asyncio.wait({asking_for_pods}, timeout=0.5)
            lists_within = len([event for event in rig.kubelet.events if event.event == "PodResources.List"])
            go_on.set()
            await admitting
            reply = await asking_for_pods

    assert not done
    assert lists_within == lists_before
    assert [container.pod for container in reply.containers] == ["first"]
