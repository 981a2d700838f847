"""What pods are given at kubelet's device plugin door: devices chosen, edited and held, refusals
with their reason, and releases when the pod is gone.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import msgspec
import pytest

from support.gateway_rig import IMPATIENT, Rig
from support.node_plane import device, no
from support.plugin_pods import GPU, GPUS, NIC, admitted, own_sockets, pod, rejected
from topobus.gateway.config import Exposure
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.values.health import HealthState
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gateway_gives_the_chosen_devices_and_their_edits_when_a_pod_is_admitted(rig: Rig) -> None:
    """The topology service's choice is honoured, the ledger holds it, and the container gets each
    class's edits once.
    """
    await rig.plane.show("gpu", *GPUS)
    await rig.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
    # Two NICs need both nodes, so both GPUs with a node are aligned and kubelet asks which one: of
    # a class that claims are given, too, the last.
    async with rig.kubelet, rig.gateway(default_exposure="both"):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.kubelet.wait_for_resource(NIC, allocatable=2)
        answer = (await admitted(rig, pod(gpu=1, nic=2))).container("main")

    assert answer.devices == {GPU: ("gpu-1",), NIC: ("nic-0", "nic-1")}
    assert answer.edits.env == {
        "GPU_1": "1",
        "NIC_0": "1",
        "NIC_1": "1",
        "TOPOBUS_GPU_DEVICES": "gpu-1",
        "TOPOBUS_NIC_DEVICES": "nic-0,nic-1",
    }
    assert [device_node.path for device_node in answer.edits.device_nodes] == ["/dev/gpu-1", "/dev/nic-0", "/dev/nic-1"]
    assert answer.conflicts == ()
    held = {
        allocation.owner.name: allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()
    }
    assert held == {GPU: {"gpu": ("gpu-1",)}, NIC: {"nic": ("nic-0", "nic-1")}}


async def test_gateway_refuses_with_the_holder_when_the_ledger_says_no(rig: Rig) -> None:
    """A refusal of the ledger reaches kubelet's rejection with its
    reason, and nothing is prepared.
    """
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        # A claim is adopted while kubelet's choice is on its way.
        gate = rig.plane.asks.hold("adopt")
        admission = asyncio.create_task(rejected(rig, pod(gpu=1)))
        adoption = await rig.plane.asks.wait_for("adopt")
        await rig.plane.hold(
            Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="u-training"), **adoption.devices
        )
        gate.set()
        answer = await admission

    assert answer.reason == "UnexpectedAdmissionError"
    assert f"claim default/training holds {adoption.devices['gpu'][0]}" in answer.message
    assert rig.plane.asks.requests("prepare") == []


async def test_gateway_gives_devices_back_when_their_service_cannot_prepare(rig: Rig) -> None:
    """A failed preparation leaves nothing in the ledger, and the
    driver's reason reaches the pod.
    """
    await rig.plane.show("gpu", *GPUS)
    rig.plane.prepare_refusal = no("driver-failed", "the card does not answer")
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await rejected(rig, pod(gpu=1))

    assert "the card does not answer" in answer.message
    assert rig.plane.ledger.allocations == {}


@pytest.mark.parametrize("verb", ["adopt", "prepare"])
async def test_gateway_answers_within_its_own_deadline_when_a_peer_hangs(rig: Rig, verb: str) -> None:
    """Kubelet sets no deadline for Allocate: a hung peer costs one pod seconds, not all pods for
    ever.

    Another class goes on.
    """
    await rig.plane.show("gpu", *GPUS)
    rig.plane.asks.hung.add(verb)
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        async with asyncio.timeout(60):
            answer = await rejected(rig, pod(gpu=1))

    assert answer.reason == "UnexpectedAdmissionError"
    assert "code = Unavailable" in answer.message


async def test_gateway_prefers_by_name_when_the_topology_service_hangs(rig: Rig) -> None:
    """GetPreferredAllocation is never an error, for an error would fail the pod."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.asks.hung.add("prefer")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await admitted(rig, pod(gpu=1))

    assert answer.container("main").devices == {GPU: ("gpu-0",)}


@pytest.mark.parametrize(("exposure", "is_from_end"), [("both", True), ("device-plugin", False)])
async def test_gateway_prefers_from_the_other_end_when_claims_are_given_the_devices_too(
    rig: Rig, exposure: Exposure, is_from_end: bool
) -> None:
    """The scheduler gives claims the first devices of a slice: where a class is offered at both
    doors, pods by resource are given the last.
    """
    await rig.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
    async with rig.kubelet, rig.gateway(default_exposure=exposure):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, pod(gpu=1))

    assert [request.is_from_end for request in rig.plane.asks.requests("prefer")] == [is_from_end]


async def test_gateway_prefers_the_last_by_name_when_topology_hangs_and_claims_are_given_devices_too(rig: Rig) -> None:
    """Also without topology the two doors begin at two ends."""
    await rig.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
    rig.plane.asks.hung.add("prefer")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await admitted(rig, pod(gpu=1))

    assert answer.container("main").devices == {GPU: ("gpu-2",)}


async def test_gateway_refuses_a_container_start_when_its_device_has_become_sick(rig: Rig) -> None:
    """Kubelet starts a container again with what was allocated long ago.

    A sick device is told before the start.
    """
    await rig.plane.show("gpu", device("gpu-0", 0))
    wanted = pod(gpu=1)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        await admitted(rig, wanted)
        good = await rig.kubelet.restart_container(wanted, "main")
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY))
        await rig.kubelet.wait_for_resource(GPU, allocatable=0)
        bad = await rig.kubelet.restart_container(wanted, "main")

    assert good == ""
    assert "device gpu-0 cannot be used: it is unhealthy: ecc" in bad


@pytest.mark.parametrize(
    ("containers", "code", "part"),
    [
        pytest.param([["gpu-9"]], grpc.StatusCode.NOT_FOUND, "no device gpu-9", id="unknown"),
        pytest.param([["gpu-3"]], grpc.StatusCode.FAILED_PRECONDITION, "it is unhealthy: ecc", id="sick"),
        pytest.param([[]], grpc.StatusCode.INVALID_ARGUMENT, "names no device", id="none"),
        pytest.param([["gpu-0", "gpu-0"]], grpc.StatusCode.INVALID_ARGUMENT, "names device gpu-0 2 times", id="twice"),
        pytest.param(
            [["gpu-0"], ["gpu-0"]], grpc.StatusCode.INVALID_ARGUMENT, "names device gpu-0 2 times", id="two-containers"
        ),
        pytest.param([["gpu-0"], ["gpu-9"]], grpc.StatusCode.NOT_FOUND, "no device gpu-9", id="second-unknown"),
        pytest.param([["x" * 100_000]], grpc.StatusCode.NOT_FOUND, "no device xxx", id="long"),
        pytest.param(
            [["\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 9_000]],
            grpc.StatusCode.NOT_FOUND,
            "no device",
            id="not-ascii",
        ),
    ],
)
async def test_gateway_refuses_an_allocation_by_name_when_the_device_cannot_be_given(
    rig: Rig, containers: list[list[str]], code: grpc.StatusCode, part: str
) -> None:
    """Whatever is wrong with an id is a clear error, however much of it there is, and the ledger is
    not asked.
    """
    await rig.plane.show("gpu", *GPUS, device("gpu-3", 0, HealthState.UNHEALTHY))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        (socket,) = own_sockets(rig)
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            request = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.DevicePluginStub(channel).Allocate(request, timeout=60)

    assert refused.value.code() is code
    assert part in (refused.value.details() or "")
    assert rig.plane.asks.requests("adopt") == []


async def test_gateway_releases_an_allocation_when_kubelet_lists_its_pod_no_more(rig: Rig) -> None:
    """The API has no deallocate: two looks without the pod free its devices, and never those of a
    pod that runs.
    """
    await rig.plane.show("gpu", *GPUS)
    gone, stays = pod("gone", gpu=1), pod("stays", gpu=2)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, gone)
        kept = (await admitted(rig, stays)).container("main").devices[GPU]
        await rig.kubelet.remove(gone)
        await rig.plane.asks.wait_for("released")

        released = [request.owner for request in rig.plane.asks.requests("release")]

    assert len(released) == 1
    assert [allocation.holdings[0].devices["gpu"] for allocation in rig.plane.ledger.allocations.values()] == [kept]


async def test_gateway_has_devices_cleaned_before_it_lets_them_go(rig: Rig) -> None:
    """Kubelet calls nobody when a pod has gone: its devices are undone at their service while the
    ledger still holds them, and only then free.
    """
    await rig.plane.show("gpu", *GPUS)
    gone = pod("gone", gpu=1)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        had = (await admitted(rig, gone)).container("main").devices[GPU]
        gate = rig.plane.asks.hold("unprepare")
        await rig.kubelet.remove(gone)
        undone = await rig.plane.asks.wait_for("unprepare")
        released_before = rig.plane.asks.requests("release")
        gate.set()
        released = await rig.plane.asks.wait_for("released")

    assert (undone.owner, undone.devices) == (released.owner, had)
    assert released_before == []


async def test_gateway_keeps_devices_held_when_their_service_cannot_undo_them(rig: Rig) -> None:
    """They stay with their last owner until the service can; then they are let go."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.unprepare_refusal = no("driver-failed", "the card does not answer")
    gone = pod("gone", gpu=1)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, gone)
        await rig.kubelet.remove(gone)
        await rig.plane.asks.wait_for("unprepare", count=2)
        released_before = rig.plane.asks.requests("release")
        rig.plane.unprepare_refusal = None
        await rig.plane.asks.wait_for("released")

    assert released_before == []
    assert rig.plane.ledger.allocations == {}


async def test_gateway_believes_a_fresh_kubelet_only_what_it_has_listed_since(rig: Rig) -> None:
    """A kubelet that has just started lists no pods: nothing is released by that.

    What it listed before it missed it, is.
    """
    await rig.plane.show("gpu", *GPUS)
    careful = msgspec.structs.replace(rig.settings.deadlines, kubelet_grace_s=3600.0)
    seen, unseen = pod("seen", gpu=1), pod("unseen", gpu=1)
    async with rig.kubelet, rig.gateway(deadlines=careful):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, seen)
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 2)
        await rig.kubelet.remove(seen)
        first = await rig.plane.asks.wait_for("released")
        await admitted(rig, unseen)
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 2)
        await rig.kubelet.remove(unseen)
        await rig.kubelet.restart()
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 4)

        released = [request.owner for request in rig.plane.asks.requests("release")]

    assert released == [first.owner]


async def test_gateway_releases_a_short_pods_devices_when_kubelet_is_fresh(rig: Rig) -> None:
    """A pod that came and went between two looks was listed when it was named: a kubelet that has
    just started is believed that it is gone.
    """
    await rig.plane.show("gpu", *GPUS)
    careful = msgspec.structs.replace(rig.settings.deadlines, kubelet_grace_s=3600.0, reconcile_s=1.0)
    short = pod("short", gpu=1)
    async with rig.kubelet, rig.gateway(deadlines=careful):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, short)
        await rig.plane.asks.wait_for("named")
        await rig.kubelet.remove(short)

        released = await rig.plane.asks.wait_for("released")

    assert released.owner.kind is OwnerKind.DEVICE_PLUGIN


def looks(rig: Rig) -> int:
    """How often PodResources were listed."""
    return [event.event for event in rig.kubelet.events].count("PodResources.List")
