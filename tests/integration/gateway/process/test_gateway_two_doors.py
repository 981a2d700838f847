"""One device at both of kubelet's doors: whoever comes first has it, the other is told who, and it
comes back when it is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.looks import next_turn, until
from support.node_plane import claim, device
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    PreparedClaim,
)
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
TRAINING = ClaimReference(name="training", uid="u-1", drivers=(DRIVER,))
POD = Pod(name="p", uid="p-1", containers=(Container(name="main", resources={GPU: 1}),))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One GPU that a claim is allocated, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.store(claim("training", "u-1", "gpu-0"))
        async with made.kubelet:
            yield made


async def open_doors(rig: Rig) -> None:
    """Wait until both doors are open and offer the device."""
    await rig.kubelet.wait_for_resource(GPU, allocatable=1)
    await rig.kubelet.wait_for_driver(DRIVER)


async def prepare(rig: Rig, reference: ClaimReference = TRAINING) -> PreparedClaim:
    """Prepare a claim through kubelet."""
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    return prepared


async def allocate(rig: Rig) -> str:
    """Call Allocate at the socket, as a kubelet does whose list is a moment old.

    The error, empty for none.
    """
    (socket,) = rig.kubelet.device_plugin_dir.glob("topobus-gpu-*.sock")
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["gpu-0"])])
        try:
            await rpc.DevicePluginStub(channel).Allocate(request, timeout=60)
        except grpc.aio.AioRpcError as err:
            return err.details() or err.code().name
    return ""


def holders(rig: Rig) -> list[str]:
    """Who holds something in the ledger."""
    return [str(allocation.owner) for allocation in rig.plane.ledger.allocations.values()]


async def test_a_claim_is_refused_with_the_holder_while_an_allocation_is_under_way(rig: Rig) -> None:
    """Allocate has the ledger's word and waits for the driver.

    The claim is told whose the device is, and gets it when the pod is gone.
    """
    gate = rig.plane.asks.hold("prepare")
    async with rig.gateway():
        await open_doors(rig)
        admission = asyncio.create_task(rig.kubelet.admit(POD))
        await rig.plane.asks.wait_for("prepare")
        refused = await prepare(rig)
        gate.set()
        admitted = await admission
        still_refused = await prepare(rig)
        during = holders(rig)
        await rig.kubelet.remove(POD)
        await rig.plane.asks.wait_for("released")
        after = await prepare(rig)

    assert isinstance(admitted, Admission)
    assert "device-plugin kubelet/topobus.dev/gpu holds gpu-0" in refused.error
    assert still_refused.error == refused.error
    assert during == ["device-plugin kubelet/topobus.dev/gpu"]
    assert after.error == ""


async def test_ledger_names_the_pod_when_kubelet_has_told_whose_the_device_is(rig: Rig) -> None:
    """Allocate names no pod, PodResources does: soon after it the ledger says the pod, and the next
    pod on the same device gets its own name.
    """
    async with rig.gateway(deadlines=structs.replace(rig.settings.deadlines, reconcile_s=60.0)):
        await open_doors(rig)
        await rig.kubelet.admit(POD)
        await rig.plane.asks.wait_for("named")
        (first,) = rig.plane.ledger.allocations.values()
        await rig.kubelet.remove(POD)
        await rig.kubelet.admit(structs.replace(POD, name="q", uid="q-1"))
        await rig.plane.asks.wait_for("named", 2)
        (second,) = rig.plane.ledger.allocations.values()

    assert (str(first.shown), str(second.shown)) == ("pod default/p", "pod default/q")
    assert first.owner == second.owner
    assert first.decision_id == rig.plane.asks.requests("named")[0].names_pods_of


async def test_an_allocation_is_refused_with_the_holder_while_a_claim_is_being_prepared(rig: Rig) -> None:
    """Kubelet's list may be older than the claim: the call is told whose the device is, and the
    claim keeps it.
    """
    gate = rig.plane.asks.hold("prepare")
    async with rig.gateway():
        await open_doors(rig)
        preparing = asyncio.create_task(prepare(rig))
        await rig.plane.asks.wait_for("prepare")
        refused = await allocate(rig)
        withheld = await rig.kubelet.wait_for_resource(GPU, allocatable=0)
        gate.set()
        prepared = await preparing
        during = holders(rig)
        await rig.plane.drop("training")
        errors = await rig.kubelet.unprepare_claims([TRAINING])
        offered = await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        admitted = await rig.kubelet.admit(POD)

    assert "claim default/training holds" in refused
    assert (withheld.capacity, offered.capacity) == (1, 1)
    assert (prepared.error, errors, during) == ("", {}, ["claim default/training"])
    assert isinstance(admitted, Admission)


async def test_exactly_one_door_wins_when_both_are_asked_at_once(rig: Rig) -> None:
    """Again and again, in whatever order the asks meet: one has the device, the other is told whose
    it is, and nothing is left behind.
    """
    won: list[str] = []
    async with rig.gateway():
        await open_doors(rig)
        for turn in range(12):
            reference = ClaimReference(name=f"claim-{turn}", uid=f"u-claim-{turn}", drivers=(DRIVER,))
            await rig.plane.store(claim(reference.name, reference.uid, "gpu-0"))
            calls = [allocate(rig), prepare(rig, reference)]
            if turn % 2:
                # Either gets ahead by a different number of steps.
                tasks = [asyncio.create_task(calls[1])]
                await next_turn()
                error, prepared = await calls[0], await tasks[0]
            else:
                error, prepared = await asyncio.gather(*calls)
            won.append("claim" if not prepared.error else "pod")
            assert bool(error) is not bool(prepared.error), (turn, error, prepared.error)
            assert " holds" in (error or prepared.error)
            # Kubelet lists no pod with the device, so the reconciliation lets an allocation of
            # kubelet's go: on a busy machine before we look.
            assert len(rig.plane.ledger.allocations) <= 1, turn
            await rig.plane.drop(reference.name)
            assert await rig.kubelet.unprepare_claims([reference]) == {}
            await until_free(rig)

    assert set(won) <= {"claim", "pod"}
    assert len(won) == 12


async def until_free(rig: Rig) -> None:
    """Wait until nobody holds anything and kubelet is offered the device."""
    await until(lambda: not rig.plane.ledger.allocations)
    await rig.kubelet.wait_for_resource(GPU, allocatable=1)
