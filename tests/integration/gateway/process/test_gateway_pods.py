"""What kubelet's pods hold beside what the ledger says: shown, adopted when the ledger lacks it,
reported with both sides when they differ.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio
from msgspec import structs
from structlog.testing import capture_logs

from support.gateway_rig import Rig, make_rig
from support.looks import next_look
from support.node_plane import NODE, claim, device
from topobus.bus.streams.events import Start
from topobus.formats.messages.catalogue import DISAGREEMENT, MACHINE
from topobus.formats.messages.messages import ContainerDevices, DisagreementEvent, HeldDevice
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
)
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
TRAINING = ClaimReference(name="training", uid="u-1", drivers=(DRIVER,))
BY_RESOURCE = Pod(
    name="by-resource", namespace="default", uid="p-1", containers=(Container(name="main", resources={GPU: 2}),)
)
BY_CLAIM = Pod(
    name="by-claim", namespace="default", uid="p-2", containers=(Container(name="main"),), claims=(TRAINING,)
)
CLAIM_OWNER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="u-1")
THIEF = Owner(kind=OwnerKind.CLAIM, namespace="default", name="thief", uid="u-2")


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs, a sick NIC held by a claim, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0))
        await made.plane.store(claim("training", "u-1", "nic-0"))
        async with made.kubelet:
            yield made


async def admit(rig: Rig, *pods: Pod) -> None:
    """Admit pods when their doors are open."""
    await rig.kubelet.wait_for_resource(GPU, allocatable=2)
    await rig.kubelet.wait_for_driver(DRIVER)
    for pod in pods:
        answer = await rig.kubelet.admit(pod)
        assert isinstance(answer, Admission), answer


def holders(rig: Rig) -> dict[str, dict[str, tuple[str, ...]]]:
    """Devices by owner, in the node plane's ledger."""
    return {
        str(allocation.owner): dict(allocation.holdings[0].devices)
        for allocation in rig.plane.ledger.allocations.values()
    }


async def test_pods_shows_container_door_devices_and_health_when_pods_run(rig: Rig) -> None:
    """One entry for each resource and claim of a container, with NUMA node and present health.

    A namespace narrows it.
    """
    async with rig.gateway():
        await admit(rig, BY_RESOURCE, BY_CLAIM)
        await rig.plane.show("nic", device("nic-0", 0, HealthState.UNHEALTHY))
        async with asyncio.timeout(60):
            while (reply := await rig.pods()).containers[0].devices[0].health is HealthState.HEALTHY:
                await next_look()
        other = await rig.pods(namespace="elsewhere")

    assert reply.containers == (
        ContainerDevices(
            namespace="default",
            pod="by-claim",
            container="main",
            device_class="nic",
            claim="default/training",
            devices=(HeldDevice(name="nic-0", numa_nodes=NodeSet(0), health=HealthState.UNHEALTHY, reason="ecc"),),
        ),
        ContainerDevices(
            namespace="default",
            pod="by-resource",
            container="main",
            device_class="gpu",
            resource=GPU,
            devices=(
                HeldDevice(name="gpu-0", numa_nodes=NodeSet(0), health=HealthState.HEALTHY),
                HeldDevice(name="gpu-1", numa_nodes=NodeSet(1), health=HealthState.HEALTHY),
            ),
        ),
    )
    assert reply.disagreements == ()
    assert (other.containers, other.disagreements, other.why) == ((), (), "")


async def test_gateway_adopts_what_kubelet_holds_when_the_ledger_lacks_it(rig: Rig) -> None:
    """A ledger that was lost gets both back, the allocation and the prepared claim, and a claim
    that is prepared stays held by it.
    """
    async with rig.gateway():
        await admit(rig, BY_RESOURCE, BY_CLAIM)
        before = holders(rig)
        await rig.plane.lose()
        await rig.plane.asks.wait_for("adopted", 4)
        after = holders(rig)
        (kept,) = (
            allocation for allocation in rig.plane.ledger.allocations.values() if allocation.owner == CLAIM_OWNER
        )

    assert len(before) == 2
    assert after == before
    assert kept.is_prepared


async def test_gateway_reports_both_sides_once_when_kubelet_and_ledger_disagree(rig: Rig) -> None:
    """A device that kubelet gave to a pod and the ledger to a claim: a warning and the answer name
    both, and the metric counts it.

    Nothing is taken from anybody.
    """
    async with rig.gateway():
        await admit(rig, BY_RESOURCE)
    await rig.plane.lose()
    await rig.plane.hold(THIEF, gpu=("gpu-0",))
    with capture_logs() as logs:
        async with rig.gateway():
            await rig.plane.asks.wait_for("adopted", 2)
            reply = await rig.pods()
            async with asyncio.timeout(90):
                # The gateway calls it a disagreement after it looked twice; each look is a
                # call of kubelet's that we see.
                while not reply.disagreements or not [log for log in logs if log["event"] == "holding.disagreed"]:
                    looks = len([event for event in rig.kubelet.events if event.event == "PodResources.List"])
                    await rig.kubelet.wait_for_event("PodResources.List", count=looks + 1)
                    reply = await rig.pods()
            counted = rig.registry.get_sample_value("topobus_gateway_disagreements")

    said = [log for log in logs if log["event"] == "holding.disagreed"]
    assert [
        (disagreement.device, disagreement.kubelet, disagreement.ledger) for disagreement in reply.disagreements
    ] == [("gpu-0", f"container main of pod default/by-resource ({GPU})", f"{THIEF} holds it")]
    assert [(event["device"], event["kubelet"], event["ledger"]) for event in said] == [
        (disagreement.device, disagreement.kubelet, disagreement.ledger) for disagreement in reply.disagreements
    ]
    assert counted == 1
    assert holders(rig)[str(THIEF)] == {"gpu": ("gpu-0",)}


async def events(rig: Rig, count: int) -> list[DisagreementEvent]:
    """The first so many events, as any subscriber gets them.

    Fails when there are fewer in the end.
    """
    disagreement_events: list[DisagreementEvent] = []
    async with asyncio.timeout(60):
        async for received in rig.bus.follow(DISAGREEMENT, start=Start.ALL):
            disagreement_events.append(received.value)
            if len(disagreement_events) == count:
                return disagreement_events
    raise AssertionError("the stream ended")


async def test_everybody_is_told_once_when_kubelet_and_ledger_disagree(rig: Rig) -> None:
    """One event with both sides, none again by the next look or the next gateway, and one when it
    is over, also when it ended in between.
    """
    async with rig.gateway():
        await admit(rig, BY_RESOURCE)
    await rig.plane.lose()
    await rig.plane.hold(THIEF, gpu=("gpu-0",))
    async with rig.gateway():
        (begun,) = await events(rig, 1)
        await looks(rig, 3)
    async with rig.gateway():
        await looks(rig, 3)
    await rig.plane.let_go(THIEF)
    async with rig.gateway():
        again = await events(rig, 2)
        await looks(rig, 3)
    kept = await rig.bus.last(DISAGREEMENT, limit=10, node=NODE)

    assert (begun.node, begun.device_class, begun.device, begun.is_over) == (NODE, "gpu", "gpu-0", False)
    assert (begun.kubelet, begun.ledger) == (f"container main of pod default/by-resource ({GPU})", f"{THIEF} holds it")
    assert [
        (disagreement_event.is_over, disagreement_event.kubelet, disagreement_event.ledger)
        for disagreement_event in again
    ] == [
        (False, begun.kubelet, begun.ledger),
        (True, begun.kubelet, begun.ledger),
    ]
    assert len(kept) == 2


async def looks(rig: Rig, count: int) -> None:
    """Wait until kubelet was asked so often again."""
    before = len([event for event in rig.kubelet.events if event.event == "PodResources.List"])
    await rig.kubelet.wait_for_event("PodResources.List", count=before + count)


@pytest.mark.real_server
async def test_exclusive_cpus_are_held_and_shown_while_their_container_runs(nats_server: NatsServer) -> None:
    """What kubelet's CPU and memory managers gave stands in the ledger under the container, is
    shown by `topobus pods`, and goes with the pod.
    """
    cpus = {0: CpuSet.parse("0-3"), 1: CpuSet.parse("4-7")}
    wanted = Pod(
        name="pinned",
        uid="p-9",
        containers=(Container(name="main", cpus=2, memory={0: 1 << 30}), Container(name="side")),
    )
    owner = Owner(kind=OwnerKind.CONTAINER, namespace="default", name="pinned", uid="main")
    async with make_rig(nats_server.url, cpus=cpus) as rig, rig.kubelet:
        await rig.plane.show("gpu", device("gpu-0", 0))
        async with rig.gateway():
            await rig.kubelet.wait_for_resource(GPU, allocatable=1)
            await rig.kubelet.admit(wanted)
            await rig.plane.asks.wait_for("adopted", 1)
            (allocation,) = rig.plane.ledger.allocations.values()
            reply = await rig.pods()
            _, table = await topobus(rig, "pods", "--node", NODE)
            await rig.kubelet.remove(wanted)
            await rig.plane.asks.wait_for("released", 1)
            after = rig.plane.ledger.allocations

    assert allocation.owner == owner
    assert not allocation.is_prepared
    assert [(holding.container, holding.cpus, holding.memory_bytes) for holding in allocation.holdings] == [
        ("main", CpuSet(0, 1), 1 << 30)
    ]
    assert [
        (container.container, container.resource, [it.name for it in container.devices])
        for container in reply.containers
    ] == [("main", "cpu", ["cpu-0", "cpu-1"])]
    assert "cpus 0-1" in table
    assert "1 GiB" in table
    assert after == {}


async def test_kubelet_is_spared_when_many_ask_at_once(rig: Rig) -> None:
    """Fifty people's questions at once are few looks: kubelet gives ten calls at once and a hundred
    a second to all its clients together.
    """
    async with rig.gateway(deadlines=structs.replace(rig.settings.deadlines, reconcile_s=600.0)):
        await admit(rig, BY_RESOURCE)
        replies = await asyncio.gather(*(rig.pods() for _ in range(50)))

    assert {len(reply.containers) for reply in replies} == {1}
    # One look serves for a tenth of a second; on a slow machine the questions
    # come spread over some of them.
    assert [event.event for event in rig.kubelet.events].count("PodResources.List") < 25


async def test_nothing_is_released_when_kubelet_refuses_to_tell(rig: Rig) -> None:
    """A kubelet that is asked too often by somebody else answers RESOURCE_EXHAUSTED: that is no
    list, and nobody loses anything.
    """
    async with rig.gateway():
        await admit(rig, BY_RESOURCE)
        before = holders(rig)
        with capture_logs() as logs:
            async with (
                asyncio.timeout(90),
                grpc.aio.insecure_channel(f"unix:{rig.kubelet.pod_resources_socket}") as channel,
            ):
                stub = rpc.PodResourcesListerStub(channel)
                while not [log for log in logs if log["event"] == "pod-resources.failed"]:
                    calls = (stub.List(pb.ListPodResourcesRequest()) for _ in range(40))
                    await asyncio.gather(*calls, return_exceptions=True)
        after = holders(rig)

    assert after == before


async def topobus(rig: Rig, *arguments: str) -> tuple[int | None, str]:
    """Run the operator's program; exit code and standard output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.cli.main",
        *arguments,
        "--nats",
        rig.url,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "160"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode()


@pytest.mark.real_server
async def test_pods_command_lists_every_node_and_says_why_when_one_is_silent(rig: Rig) -> None:
    """A person gets a table, a script one document.

    A node without a gateway is named with the reason and hides no other.
    """
    for node in (NODE, "other-node"):
        await rig.bus.put(MACHINE, Machine(node=node, cpus=(), numa_nodes=()), node=node)
    async with rig.gateway():
        await admit(rig, BY_RESOURCE)
        code, text = await topobus(rig, "pods", "--json")
        shown, table = await topobus(rig, "pods", "--node", NODE)
    gone, _ = await topobus(rig, "pods", "--node", NODE)

    document = json.loads(text)
    assert (code, shown, gone) == (0, 0, 69)
    assert [each_device["name"] for each_device in document["nodes"][NODE]["containers"][0]["devices"]] == [
        "gpu-0",
        "gpu-1",
    ]
    assert document["nodes"]["other-node"]["why"]
    assert "default/by-resource" in table
    assert "gpu-1" in table
