"""The gateway at kubelet's device plugin door: a real nats-server, real unix sockets, a simulated kubelet, a node plane on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import IMPATIENT, Rig, make_rig
from support.node_plane import device, no
from topobus.domain.health import HealthState
from topobus.domain.idset import NodeSet
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.config import Exposure
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    Capacity,
    Container,
    Pod,
    Rejection,
)

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
NIC = "topobus.dev/nic"
GPUS = (device("gpu-0", 0), device("gpu-1", 1), device("gpu-2"))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A folder with everything but a running kubelet and gateway."""
    async with make_rig(nats_server.url) as made:
        yield made


def pod(uid: str = "p-1", **resources: int) -> Pod:
    """A pod with one container; `gpu=2` asks two GPUs."""
    return Pod(
        name=f"pod-{uid}", uid=uid, containers=(Container(name="main", resources={f"topobus.dev/{k}": n for k, n in resources.items()}),)
    )


async def admitted(rig: Rig, wanted: Pod) -> Admission:
    """Admit a pod that must be admitted."""
    answer = await rig.kubelet.admit(wanted)
    assert isinstance(answer, Admission), answer
    return answer


async def rejected(rig: Rig, wanted: Pod) -> Rejection:
    """Admit a pod that must be rejected."""
    answer = await rig.kubelet.admit(wanted)
    assert isinstance(answer, Rejection), answer
    return answer


def own_sockets(rig: Rig) -> list[Path]:
    """Our sockets in kubelet's folder."""
    return sorted(rig.kubelet.device_plugin_dir.glob("topobus-*.sock"))


async def test_gateway_registers_a_class_with_its_list_when_kubelet_is_there(rig: Rig) -> None:
    """One resource a class, all devices with their health and NUMA nodes; an unknown node is no topology; an empty class is not registered."""
    await rig.plane.show("gpu", *GPUS, device("gpu-3", 0, HealthState.UNHEALTHY))
    await rig.plane.show("nic")
    async with rig.kubelet, rig.gateway():
        counted = await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.readiness.until(lambda report: report.get("registration") == "ready")

        listed = rig.kubelet.devices(GPU)
        resources = set(rig.kubelet.capacity())

    assert counted == Capacity(capacity=4, allocatable=3)
    assert {name: plugin_device.nodes for name, plugin_device in listed.items()} == {
        "gpu-0": NodeSet(0),
        "gpu-1": NodeSet(1),
        "gpu-2": None,
        "gpu-3": NodeSet(0),
    }
    assert resources == {GPU}


async def test_gateway_is_ready_and_registers_later_when_kubelet_comes_late(rig: Rig) -> None:
    """Without a kubelet the gateway is ready and says nothing of registration; with one it registers."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.gateway():
        alone = await rig.readiness.until(lambda report: report.get("inventories") == "ready")
        async with rig.kubelet:
            await rig.kubelet.wait_for_resource(GPU, allocatable=3)

    assert "registration" not in alone


async def test_gateway_registers_again_when_kubelet_restarts(rig: Rig) -> None:
    """A kubelet that deleted all sockets and forgot all plugins has them back, on a socket of another name, and pods keep what they hold."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        before = [own_socket.name for own_socket in own_sockets(rig)]
        await admitted(rig, pod(gpu=2))
        await rig.kubelet.restart()
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        after = [own_socket.name for own_socket in own_sockets(rig)]
        answer = await admitted(rig, pod("p-2", gpu=1))

    assert before != after
    assert len(after) == 1
    assert len(answer.container("main").devices[GPU]) == 1


async def test_gateway_registers_again_when_its_socket_is_removed(rig: Rig) -> None:
    """A socket that somebody deleted is served anew without a restart."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        (removed,) = own_sockets(rig)
        removed.unlink()
        await rig.kubelet.wait_for_event("Register.ok", count=2)
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)

        names = [own_socket.name for own_socket in own_sockets(rig)]

    assert removed.name not in names


async def test_gateway_keeps_its_devices_when_it_restarts_under_an_older_kubelet(nats_server: NatsServer) -> None:
    """Kubelets before 1.36 cut off a plugin when its predecessor's stream ends; the devices are allocatable again all the same."""
    async with make_rig(nats_server.url, has_reregister_race=True) as rig:
        await rig.plane.show("gpu", *GPUS)
        async with rig.kubelet, rig.gateway():
            await rig.kubelet.wait_for_resource(GPU, allocatable=3)
            async with rig.gateway(checkpoint_path=str(rig.root / "other" / "checkpoint.json")):
                await rig.kubelet.wait_for_event("Register.ok", count=2)
                await rig.kubelet.wait_for_event("ListAndWatch.closed")
                await rig.kubelet.wait_for_event("Register.ok", count=3)
                await rig.kubelet.wait_for_resource(GPU, allocatable=3)


async def test_gateway_updates_the_list_when_the_inventory_changes(rig: Rig) -> None:
    """A sick device leaves the allocatable set and comes back; a new one appears."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), *GPUS[1:])
        sick = await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.plane.show("gpu", *GPUS, device("gpu-3", 1))
        more = await rig.kubelet.wait_for_resource(GPU, allocatable=4)

    assert (sick.capacity, more.capacity) == (3, 4)


async def test_gateway_lists_an_allocated_device_as_unhealthy_when_it_vanishes(rig: Rig) -> None:
    """An id that a pod holds never leaves the list, for kubelet would call it healthy; free ids do leave."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        # The one device on node 0 is what kubelet takes by alignment.
        await admitted(rig, pod(gpu=1))
        await rig.plane.show("gpu", device("gpu-1", 1))
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)

        listed = rig.kubelet.devices(GPU)

    assert {name: plugin_device.is_healthy for name, plugin_device in listed.items()} == {"gpu-0": False, "gpu-1": True}
    assert listed["gpu-0"].nodes == NodeSet(0)


async def test_gateway_gives_the_chosen_devices_and_their_edits_when_a_pod_is_admitted(rig: Rig) -> None:
    """The topology service's choice is honoured, the ledger holds it, and the container gets each class's edits once."""
    await rig.plane.show("gpu", *GPUS)
    await rig.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
    # Two NICs need both nodes, so both GPUs with a node are aligned and kubelet asks which one.
    rig.plane.prefers = ("gpu-1",)
    async with rig.kubelet, rig.gateway():
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
    held = {allocation.owner.name: allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()}
    assert held == {GPU: {"gpu": ("gpu-1",)}, NIC: {"nic": ("nic-0", "nic-1")}}


async def test_gateway_refuses_with_the_holder_when_the_ledger_says_no(rig: Rig) -> None:
    """A refusal of the ledger reaches kubelet's rejection with its reason, and nothing is prepared."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.adopt_refusal = no("device-held", "claim default/training holds gpu-0")
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await rejected(rig, pod(gpu=1))

    assert answer.reason == "UnexpectedAdmissionError"
    assert "claim default/training holds gpu-0" in answer.message
    assert rig.plane.requests("prepare") == []


async def test_gateway_gives_devices_back_when_their_service_cannot_prepare(rig: Rig) -> None:
    """A failed preparation leaves nothing in the ledger, and the driver's reason reaches the pod."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.prepare_refusal = no("driver-failed", "the card does not answer")
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await rejected(rig, pod(gpu=1))

    assert "the card does not answer" in answer.message
    assert rig.plane.ledger.allocations == {}


@pytest.mark.parametrize("verb", ["adopt", "prepare"])
async def test_gateway_answers_within_its_own_deadline_when_a_peer_hangs(rig: Rig, verb: str) -> None:
    """Kubelet sets no deadline for Allocate: a hung peer costs one pod seconds, not all pods for ever; another class goes on."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.hung.add(verb)
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        async with asyncio.timeout(5):
            answer = await rejected(rig, pod(gpu=1))

    assert answer.reason == "UnexpectedAdmissionError"
    assert "code = Unavailable" in answer.message


async def test_gateway_prefers_by_name_when_the_topology_service_hangs(rig: Rig) -> None:
    """GetPreferredAllocation is never an error, for an error would fail the pod."""
    await rig.plane.show("gpu", *GPUS)
    rig.plane.hung.add("prefer")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await admitted(rig, pod(gpu=1))

    assert answer.container("main").devices == {GPU: ("gpu-0",)}


@pytest.mark.parametrize(("exposure", "is_from_end"), [("both", True), ("device-plugin", False)])
async def test_gateway_prefers_from_the_other_end_when_claims_are_given_the_devices_too(
    rig: Rig, exposure: Exposure, is_from_end: bool
) -> None:
    """The scheduler gives claims the first devices of a slice: where a class is offered at both doors, pods by resource are given the last."""
    await rig.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
    async with rig.kubelet, rig.gateway(default_exposure=exposure):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, pod(gpu=1))

    assert [request.is_from_end for request in rig.plane.requests("prefer")] == [is_from_end]


async def test_gateway_prefers_the_last_by_name_when_topology_hangs_and_claims_are_given_devices_too(rig: Rig) -> None:
    """Also without topology the two doors begin at two ends."""
    await rig.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
    rig.plane.hung.add("prefer")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        answer = await admitted(rig, pod(gpu=1))

    assert answer.container("main").devices == {GPU: ("gpu-2",)}


async def test_gateway_refuses_a_container_start_when_its_device_has_become_sick(rig: Rig) -> None:
    """Kubelet starts a container again with what was allocated long ago; a sick device is told before the start."""
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


@pytest_asyncio.fixture
async def own_rig(own_nats_server: NatsServer) -> AsyncIterator[Rig]:
    """The same on a server that can be stopped."""
    async with make_rig(own_nats_server.url) as made:
        yield made


async def test_gateway_keeps_lists_and_sockets_when_nats_goes_away(own_rig: Rig, own_nats_server: NatsServer) -> None:
    """With the bus gone kubelet sees no change at all; what changed meanwhile arrives when the bus is back."""
    await own_rig.plane.show("gpu", *GPUS)
    async with own_rig.kubelet, own_rig.gateway():
        await own_rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await own_nats_server.stop()
        refused = await rejected(own_rig, pod(gpu=1))
        during = own_rig.kubelet.capacity()[GPU]
        closed_by_then = [event for event in own_rig.kubelet.events if event.event == "ListAndWatch.closed"]
        await own_nats_server.start()
        await own_rig.plane.show("gpu", *GPUS, device("gpu-3"))
        after = await own_rig.kubelet.wait_for_resource(GPU, allocatable=4, timeout_s=30.0)

    assert during == Capacity(capacity=3, allocatable=3)
    assert after.capacity == 4
    assert "code = Unavailable" in refused.message
    assert closed_by_then == []


async def test_gateway_starts_each_stream_with_a_full_list_when_several_are_open(rig: Rig) -> None:
    """A second reader gets the list at once, both get every change, and the first is not disturbed by the second's end."""
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        (socket,) = own_sockets(rig)
        async with asyncio.timeout(10), grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stream = rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty())
            first = await anext(aiter(stream))
            await rig.plane.show("gpu", *GPUS[:2])
            second = await anext(aiter(stream))
            stream.cancel()
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        registered = [event.event for event in rig.kubelet.events].count("Register.ok")

    assert ([each_device.ID for each_device in first.devices], [each_device.ID for each_device in second.devices]) == (
        ["gpu-0", "gpu-1", "gpu-2"],
        ["gpu-0", "gpu-1"],
    )
    assert registered == 1


@pytest.mark.parametrize(
    ("containers", "code", "part"),
    [
        pytest.param([["gpu-9"]], grpc.StatusCode.NOT_FOUND, "no device gpu-9", id="unknown"),
        pytest.param([["gpu-3"]], grpc.StatusCode.FAILED_PRECONDITION, "it is unhealthy: ecc", id="sick"),
        pytest.param([[]], grpc.StatusCode.INVALID_ARGUMENT, "names no device", id="none"),
        pytest.param([["gpu-0", "gpu-0"]], grpc.StatusCode.INVALID_ARGUMENT, "names device gpu-0 2 times", id="twice"),
        pytest.param([["gpu-0"], ["gpu-0"]], grpc.StatusCode.INVALID_ARGUMENT, "names device gpu-0 2 times", id="two-containers"),
        pytest.param([["gpu-0"], ["gpu-9"]], grpc.StatusCode.NOT_FOUND, "no device gpu-9", id="second-unknown"),
        pytest.param([["x" * 100_000]], grpc.StatusCode.NOT_FOUND, "no device xxx", id="long"),
        pytest.param([["\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 9_000]], grpc.StatusCode.NOT_FOUND, "no device", id="not-ascii"),
    ],
)
async def test_gateway_refuses_an_allocation_by_name_when_the_device_cannot_be_given(
    rig: Rig, containers: list[list[str]], code: grpc.StatusCode, part: str
) -> None:
    """Whatever is wrong with an id is a clear error, however much of it there is, and the ledger is not asked."""
    await rig.plane.show("gpu", *GPUS, device("gpu-3", 0, HealthState.UNHEALTHY))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        (socket,) = own_sockets(rig)
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.DevicePluginStub(channel).Allocate(request, timeout=5)

    assert refused.value.code() is code
    assert part in (refused.value.details() or "")
    assert rig.plane.requests("adopt") == []


async def test_gateway_hides_a_device_from_kubelet_when_a_claim_holds_it(rig: Rig) -> None:
    """What went out through the other door is not offered here, until it is let go."""
    owner = Owner(kind=OwnerKind.CLAIM, name="training", uid="u-1")
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.plane.hold(owner, gpu=("gpu-0",))
        held = await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.plane.let_go(owner)
        free = await rig.kubelet.wait_for_resource(GPU, allocatable=3)

    assert (held.capacity, free.capacity) == (3, 3)


async def test_gateway_releases_an_allocation_when_kubelet_lists_its_pod_no_more(rig: Rig) -> None:
    """The API has no deallocate: two looks without the pod free its devices, and never those of a pod that runs."""
    await rig.plane.show("gpu", *GPUS)
    gone, stays = pod("gone", gpu=1), pod("stays", gpu=2)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, gone)
        kept = (await admitted(rig, stays)).container("main").devices[GPU]
        await rig.kubelet.remove(gone)
        await rig.plane.wait_for("released")

        released = [request.owner for request in rig.plane.requests("release")]

    assert len(released) == 1
    assert [allocation.holdings[0].devices["gpu"] for allocation in rig.plane.ledger.allocations.values()] == [kept]


async def test_gateway_believes_a_fresh_kubelet_only_what_it_has_listed_since(rig: Rig) -> None:
    """A kubelet that has just started lists no pods: nothing is released by that; what it listed before it missed it, is."""
    await rig.plane.show("gpu", *GPUS)
    careful = msgspec.structs.replace(rig.settings.deadlines, kubelet_grace_s=3600.0)
    seen, unseen = pod("seen", gpu=1), pod("unseen", gpu=1)
    async with rig.kubelet, rig.gateway(deadlines=careful):
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await admitted(rig, seen)
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 2)
        await rig.kubelet.remove(seen)
        first = await rig.plane.wait_for("released")
        await admitted(rig, unseen)
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 2)
        await rig.kubelet.remove(unseen)
        await rig.kubelet.restart()
        await rig.kubelet.wait_for_event("PodResources.List", count=looks(rig) + 4)

        released = [request.owner for request in rig.plane.requests("release")]

    assert released == [first.owner]


def looks(rig: Rig) -> int:
    """How often PodResources were listed."""
    return [event.event for event in rig.kubelet.events].count("PodResources.List")


class DeafKubelet(rpc.RegistrationServicer):
    """A kubelet that takes a registration and never asks for the list."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self.twice = asyncio.Event()

    async def Register(self, request: pb.RegisterRequest, context: object) -> pb.Empty:  # noqa: N802  (gRPC's name)
        """Count."""
        self.endpoints.append(request.endpoint)
        if len(self.endpoints) == 2:
            self.twice.set()
        return pb.Empty()


async def test_gateway_registers_again_when_kubelet_never_asks_for_the_list(rig: Rig) -> None:
    """A registration that leads to nothing is repeated on a new socket."""
    await rig.plane.show("gpu", *GPUS)
    deaf, server = DeafKubelet(), grpc.aio.server()
    rpc.add_RegistrationServicer_to_server(deaf, server)
    server.add_insecure_port(f"unix:{rig.kubelet.device_plugin_dir / 'kubelet.sock'}")
    await server.start()
    try:
        async with rig.gateway(deadlines=msgspec.structs.replace(rig.settings.deadlines, first_list_s=0.2)):
            await asyncio.wait_for(deaf.twice.wait(), 10)
    finally:
        await server.stop(None)

    assert len(set(deaf.endpoints)) == len(deaf.endpoints)


async def test_gateway_leaves_no_socket_when_it_stops(rig: Rig) -> None:
    """A clean stop takes its own sockets along, and a start removes what a killed gateway left."""
    left = rig.kubelet.device_plugin_dir / "topobus-gpu-deadbeef-01.sock"
    server = await asyncio.start_unix_server(lambda *_: None, path=left)
    server.close()
    await server.wait_closed()
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        during = [own_socket.name for own_socket in own_sockets(rig)]

    assert left.name not in during
    assert own_sockets(rig) == []
