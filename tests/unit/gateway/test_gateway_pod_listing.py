"""kubelet's PodResources as the gateway reads them: CPUs and memory of containers and of pods as a
whole.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.rules.exclusive import ExclusiveUse
from topobus.gateway.device_plugins.pod_resources import Listing, PodResourcesReader
from topobus.gateway.device_plugins.sockets import serving
from topobus.gateway.node_state import NodeState
from topobus.gateway.reconcile.pod_usage import PodLook
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.names import ClaimUid
from topobus.values.outcome import MemoryBlock
from topobus.values.request import Owner, OwnerKind


class Lister(rpc.PodResourcesListerServicer):
    """A kubelet that always tells the same."""

    def __init__(self, *pods: pb.PodResources) -> None:
        self.answer = pb.ListPodResourcesResponse(pod_resources=pods)

    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802  (gRPC's name)
        """Tell it."""
        return self.answer


@pytest.fixture
def socket(short_folder: Path) -> Path:
    """Where kubelet answers."""
    return short_folder / "kubelet.sock"


async def read(socket: Path, *pods: pb.PodResources) -> Listing:
    """Ask a kubelet that tells of these pods."""
    server = grpc.aio.server()
    rpc.add_PodResourcesListerServicer_to_server(Lister(*pods), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        listing = await PodResourcesReader(socket, "n", {}).read()
    finally:
        await server.stop(None)
    assert isinstance(listing, Listing), listing
    return listing


def memory(size: int, *nodes: int) -> pb.ContainerMemory:
    """One entry of kubelet's."""
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
    return pb.ContainerMemory(memory_type="memory", size=size, topology=topology)


async def test_pod_has_what_its_containers_leave_when_resources_are_the_pods(socket: Path) -> None:
    """Pod-level CPUs include those of containers.

    Each CPU stands once, and a container without any stands nowhere.
    """
    containers = [pb.ContainerResources(name="a", cpu_ids=[0, 1]), pb.ContainerResources(name="b")]
    listing = await read(socket, pb.PodResources(name="p", namespace="d", cpu_ids=[0, 1, 2, 3], containers=containers))

    assert listing.exclusive == (
        ExclusiveUse(namespace="d", pod="p", container="", cpus=CpuSet(2, 3)),
        ExclusiveUse(namespace="d", pod="p", container="a", cpus=CpuSet(0, 1)),
    )


async def test_memory_of_a_group_is_shared_out_when_kubelet_tells_only_the_sum(socket: Path) -> None:
    """One node is exact; over a group it counts evenly, the rest on the lowest node."""
    containers = [
        pb.ContainerResources(name="a", memory=[memory(7, 1)]),
        pb.ContainerResources(name="b", memory=[memory(7, 2, 0)]),
    ]
    listing = await read(
        socket, pb.PodResources(name="p", namespace="d", memory=[memory(14, 0)], containers=containers)
    )

    assert [exclusive_use.container for exclusive_use in listing.exclusive] == ["a", "b"]
    assert [exclusive_use.memory for exclusive_use in listing.exclusive] == [
        (MemoryBlock(kind="memory", nodes=NodeSet(1), shares=((1, 7),)),),
        (MemoryBlock(kind="memory", nodes=NodeSet(0, 2), shares=((0, 4), (2, 3))),),
    ]


async def test_an_answer_is_no_older_than_the_ask_when_somebody_has_just_asked(socket: Path) -> None:
    """Who asks after a pod has begun is told of it, however short ago another was answered.

    Who asks while a look runs waits for the next one, shared.
    """
    asked, go_on = asyncio.Event(), asyncio.Event()
    pods: list[pb.PodResources] = []
    looks: list[int] = []

    class Slow(Lister):
        async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802  (gRPC's name)
            looks.append(len(pods))
            answer = pb.ListPodResourcesResponse(pod_resources=pods)
            asked.set()
            await go_on.wait()
            return answer

    server = grpc.aio.server()
    rpc.add_PodResourcesListerServicer_to_server(Slow(), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    reader = PodResourcesReader(socket, "n", {})
    try:
        first = asyncio.create_task(reader.read())
        await asked.wait()
        pods.append(pb.PodResources(name="p", namespace="d", cpu_ids=[1]))
        others = [asyncio.create_task(reader.read()) for _ in range(10)]
        # Each of them has asked, while the first look runs.
        await asyncio.sleep(0)
        go_on.set()
        before, *after = await asyncio.gather(first, *others)
        pods.append(pb.PodResources(name="q", namespace="d", cpu_ids=[2]))
        last = await reader.read()
    finally:
        await server.stop(None)

    pods_of_each = [
        [use.pod for use in listing.exclusive] if isinstance(listing, Listing) else listing
        for listing in (before, *after, last)
    ]
    assert pods_of_each == [[], *([["p"]] * 10), ["p", "q"]]
    assert looks == [0, 1, 2]


async def test_list_that_cannot_be_read_is_no_list(socket: Path) -> None:
    """Whoever answers at kubelet's socket: gRPC gives None for it, and the next list is read."""
    server = grpc.aio.server()

    async def babble(_: bytes, context: Any) -> bytes:
        return b"\xff"

    method = grpc.unary_unary_rpc_method_handler(babble, request_deserializer=bytes, response_serializer=bytes)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": method})])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        listing = await PodResourcesReader(socket, "n", {}).read()
    finally:
        await server.stop(None)

    assert listing == "kubelet's PodResources failed: INTERNAL: its answer cannot be read"


async def test_refused_list_is_logged_and_a_pod_that_kubelet_lacks_is_not(socket: Path) -> None:
    """Both are UNKNOWN by kubelet: of a pod that is usual, of the list it is a failure."""

    class Refusing(Lister):
        async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802  (gRPC's name)
            raise ValueError("cannot list")

        async def Get(self, request: pb.GetPodResourcesRequest, context: Any) -> pb.GetPodResourcesResponse:  # noqa: N802  (gRPC's name)
            raise ValueError("no such pod")

    reader = PodResourcesReader(socket, "n", {})
    async with serving(socket, lambda server: rpc.add_PodResourcesListerServicer_to_server(Refusing(), server)):
        with capture_logs() as of_pod:
            users = await reader.users("topobus.dev/gpu", [Owner(kind=OwnerKind.POD, name="gone", uid="")])
        with capture_logs() as of_list:
            listing = await reader.read()

    assert (users, of_pod) == ({}, [])
    assert isinstance(listing, str)
    assert [(log["event"], log["code"]) for log in of_list if log["event"] == "pod-resources.failed"] == [
        ("pod-resources.failed", "UNKNOWN")
    ]


async def test_list_is_read_of_the_next_kubelet_when_one_is_killed_meanwhile(socket: Path) -> None:
    """Neither the broken call nor the socket that was replaced ends anything."""
    asked = asyncio.Event()

    class Hanging(Lister):
        async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802  (gRPC's name)
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    reader = PodResourcesReader(socket, "n", {})
    async with serving(socket, lambda server: rpc.add_PodResourcesListerServicer_to_server(Hanging(), server)):
        broken = asyncio.create_task(reader.read())
        await asked.wait()
    async with serving(socket, lambda server: rpc.add_PodResourcesListerServicer_to_server(Lister(), server)):
        listings = [await broken, await reader.read()]

    broken_by, listing = listings
    assert isinstance(broken_by, str)
    assert broken_by.startswith("kubelet's PodResources failed: ")
    assert isinstance(listing, Listing)


async def test_shape_is_listed_as_its_parts(socket: Path, tmp_path: Path) -> None:
    """Those that were prepared for it, whatever the machine has now, else those that it has now.

    A shape that is not known stays, so that its claim is listed.
    """
    part = AllocatedDevice(request="r", pool="n", device="nic-7", shape="shape-half-0")
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", {})
    await checkpoint.put(
        ClaimEntry(namespace="d", name="a", uid=ClaimUid("u"), device_class="nic", attempt="x", devices=(part,))
    )
    devices = (Device(name="gpu-0", device_class="gpu", numa_nodes=NodeSet(0)),)
    devices += (Device(name="gpu-1", device_class="gpu", numa_nodes=NodeSet(0)),)
    state = NodeState(cast(Any, None), "n", lambda device_class: device_class)
    state.take_inventory("gpu", Inventory(node="n", device_class="gpu", generation=1, devices=devices))
    (shape,) = state.shapes().parts
    claims = {"a": "shape-half-0", "b": shape, "c": "shape-half-9"}
    resources = [
        pb.DynamicResource(
            claim_namespace="d",
            claim_name=claim,
            claim_resources=[pb.ClaimResource(driver_name="topobus.dev", pool_name="n", device_name=device)],
        )
        for claim, device in claims.items()
    ]
    pod = pb.PodResources(
        name="p", namespace="d", containers=[pb.ContainerResources(name="m", dynamic_resources=resources)]
    )
    server = grpc.aio.server()
    rpc.add_PodResourcesListerServicer_to_server(Lister(pod), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    look = PodLook(PodResourcesReader(socket, "n", {}), state, checkpoint)
    try:
        listing = await look.listing()
    finally:
        await server.stop(None)

    assert isinstance(listing, Listing)
    assert [(use.claim, use.device_class, use.devices) for use in listing.uses] == [
        ("a", "nic", ("nic-7",)),
        ("b", "gpu", ("gpu-0", "gpu-1")),
        ("c", "shape", ("shape-half-9",)),
    ]
