"""Measures the gateway from kubelet's side: `python -m topobus.testing.bench gateway [--json] [--rounds N]`.

Real processes (nats-server, discovery, device services, topology, gateway) on a recorded machine. The times are taken at kubelet's end of the
sockets, so they include gRPC, NATS, the ledger's write and the disk. They also include the load of other processes; the load average is printed
beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from msgspec import Struct, structs

from topobus.contracts.catalogue import INVENTORY, LEDGER, OBJECT
from topobus.contracts.messages import ApiObject
from topobus.domain.device import Device, Inventory, driver_name
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.idset import NodeSet
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.simulation.kubelet.simulator import Admission, Container, Pod
from topobus.testing.bench_node import NODE, BenchNode, bench_node

__all__ = ["Figure", "main"]

_SERVICES = ("discovery", "gpu", "nic", "cpu", "topology", "gateway")
_PODS = 110
"""kubelet's default of pods a node."""
_STREAMS = 8
_DEVICES = 1000
_BULK = "bulk"
"""A class of our own for the long list: the benchmark publishes its inventory, as a device service does."""
_NATS_AWAY_S = 3.0
_LOCAL = [("grpc.use_local_subchannel_pool", 1)]


class Figure(Struct, frozen=True, kw_only=True):
    """One measured thing."""

    case: str
    unit: str = "ms"
    value: float
    """The median, or the one value that there is."""
    p99: float | None = None
    rounds: int = 1
    budget: float | None = None
    budget_p99: float | None = None

    @property
    def is_within(self) -> bool:
        """Say whether it keeps its budgets."""
        kept = self.budget is None or self.value <= self.budget
        return kept and (self.budget_p99 is None or self.p99 is None or self.p99 <= self.budget_p99)


def main(argv: Sequence[str]) -> int:
    """Measure and print; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m topobus.testing.bench gateway", description="Measure the gateway at kubelet's sockets."
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="calls a case (300)")
    arguments = parser.parse_args(argv)
    before = os.getloadavg()[0]
    figures = asyncio.run(_measure(max(10, arguments.rounds)))
    facts = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(), "load_before": round(before, 2)}
    if arguments.json:
        rows = [{**structs.asdict(figure), "is_within": figure.is_within} for figure in figures]
        print(json.dumps({"group": "gateway", "machine": facts, "cases": rows}, indent=2))  # noqa: T201
    else:
        print(" ".join(f"{key}={value}" for key, value in facts.items()))  # noqa: T201
        for figure in figures:
            print(_line(figure))  # noqa: T201
    return 0


async def _measure(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    async with bench_node(_SERVICES) as node:
        for resource, count in (("gpu", 8), ("nic", 8)):
            await node.kubelet.wait_for_resource(f"topobus.dev/{resource}", allocatable=count, timeout_s=30.0)
            await node.kubelet.wait_for_driver(driver_name(resource))
        figures.append(Figure(case="gateway resident when ready", unit="MiB", value=_mib(node, "gateway"), budget=60.0))
        figures += await _calls(node, rounds)
        figures += await _claims(node, rounds)
        figures += await _list_update(node, max(10, rounds // 10))
        figures += await _frozen(node, rounds)
        figures += await _nats_away(node)
    # Each admission keeps its device, so the pods get a node of their own.
    async with bench_node(_SERVICES) as node:
        figures += await _pods(node)
    return figures


async def _calls(node: BenchNode, rounds: int) -> list[Figure]:
    names = sorted(node.kubelet.devices("topobus.dev/gpu"))
    async with _plugin(node, "gpu") as stub:

        async def prefer(turn: int) -> None:
            container = pb.ContainerPreferredAllocationRequest(available_deviceIDs=names, allocation_size=1 + turn % 4)
            await stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[container]))

        preferred = await _timed(prefer, rounds)
        allocated = await _timed(lambda turn: _allocate(stub, names[turn % len(names)]), rounds)
        started = await _timed(lambda turn: stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[names[turn % 8]])), rounds)
    return [
        _figure("GetPreferredAllocation, 8 GPUs", preferred, budget_p99=50.0),
        _figure("Allocate of one GPU", allocated, budget=2.0, budget_p99=10.0),
        _figure("PreStartContainer, devices looked at again", started),
    ]


async def _claims(node: BenchNode, rounds: int) -> list[Figure]:
    names = sorted(node.kubelet.devices("topobus.dev/nic"))
    driver = driver_name("nic")
    prepared, undone = [], []
    async with grpc.aio.insecure_channel(f"unix:{node.driver_socket(driver)}", options=_LOCAL) as channel:

        def call(verb: str, request: Any, response: Any) -> Any:
            return channel.unary_unary(
                f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{verb}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

        prepare = call("NodePrepareResources", dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse)
        unprepare = call("NodeUnprepareResources", dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse)
        for turn in range(rounds + 10):
            name, uid = f"claim-{turn}", f"uid-{turn}"
            await node.bus.put(OBJECT, _claim(name, uid, driver, names[turn % 8]), kind="resourceclaim", namespace="default", name=name)
            wanted = dra.Claim(namespace="default", name=name, uid=uid)
            began = time.perf_counter()
            answer = await prepare(dra.NodePrepareResourcesRequest(claims=[wanted]))
            prepared.append(time.perf_counter() - began)
            assert not answer.claims[uid].error, answer.claims[uid].error
            await node.bus.delete(OBJECT, kind="resourceclaim", namespace="default", name=name)
            began = time.perf_counter()
            answer = await unprepare(dra.NodeUnprepareResourcesRequest(claims=[wanted]))
            undone.append(time.perf_counter() - began)
            assert not answer.claims[uid].error, answer.claims[uid].error
    return [
        _figure("prepare of one claim", prepared[10:], budget=10.0, budget_p99=50.0),
        _figure("unprepare of one claim", undone[10:]),
    ]


async def _list_update(node: BenchNode, rounds: int) -> list[Figure]:
    """From the inventory's write to the last stream's new list."""
    devices = tuple(Device(name=f"bulk-{index:04d}", device_class=_BULK, numa_nodes=NodeSet(index % 2)) for index in range(_DEVICES))
    sick = DeviceHealth(
        state=HealthState.UNHEALTHY, conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="bench"),)
    )
    spent: list[float] = []
    generation = 1

    async def show(*shown: Device) -> None:
        value = Inventory(node=NODE, device_class=_BULK, generation=generation, devices=shown)
        await node.bus.put(INVENTORY, value, node=NODE, device_class=_BULK)

    await show(*devices)
    await node.kubelet.wait_for_resource(f"topobus.dev/{_BULK}", allocatable=_DEVICES, timeout_s=30.0)
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(_STREAMS - 1):
            # kubelet's own is the eighth.
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{node.plugin_socket(_BULK)}", options=_LOCAL))
            # Bytes, for what a client does with a list is not the gateway's time.
            watch: Any = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch", request_serializer=pb.Empty.SerializeToString)
            streams.append(aiter(watch(pb.Empty())))
            await anext(streams[-1])
        for turn in range(rounds):
            generation += 1
            place = turn % _DEVICES
            began = time.perf_counter()
            await show(*devices[:place], structs.replace(devices[place], health=sick), *devices[place + 1 :])
            gone = pb.ListAndWatchResponse(devices=[_listed(devices[place], "Unhealthy")]).SerializeToString()
            await asyncio.gather(*(_until_in(stream, gone) for stream in streams))
            spent.append(time.perf_counter() - began)
            # Not at once: a burst is one message, and that is not what is measured here.
            await asyncio.sleep(0.05)
    return [_figure(f"one update, {_DEVICES} devices, {_STREAMS} streams", spent, budget=50.0)]


def _listed(device: Device, health: str) -> pb.Device:
    nodes = [pb.NUMANode(ID=numa_node) for numa_node in device.numa_nodes or ()]
    return pb.Device(ID=device.name, health=health, topology=pb.TopologyInfo(nodes=nodes))


async def _until_in(stream: AsyncIterator[bytes], part: bytes) -> None:
    async for message in stream:
        if part in message:
            return


async def _frozen(node: BenchNode, rounds: int) -> list[Figure]:
    names = sorted(node.kubelet.devices("topobus.dev/nic"))
    async with _plugin(node, "nic") as stub, _plugin(node, "gpu") as frozen:
        before = await _timed(lambda turn: _allocate(stub, names[turn % 8]), rounds)
        node.services["gpu"].freeze()
        try:
            # kubelet waits in the frozen class all the while.
            hung = asyncio.create_task(_allocate(frozen, sorted(node.kubelet.devices("topobus.dev/gpu"))[0]))
            during = await _timed(lambda turn: _allocate(stub, names[turn % 8]), rounds)
            began = time.perf_counter()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await hung
            waited = time.perf_counter() - began
        finally:
            node.services["gpu"].thaw()
    return [
        _figure("Allocate of one NIC, all services well", before, budget=2.0, budget_p99=10.0),
        _figure("Allocate of one NIC, the gpu service frozen", during, budget_p99=50.0),
        Figure(case="Allocate of the frozen class is refused after", unit="s", value=round(waited + sum(during), 2), budget=20.0),
    ]


async def _nats_away(node: BenchNode) -> list[Figure]:
    """Stop and start NATS, and look at kubelet's lists all the while."""
    lost: set[tuple[str, str]] = set()
    usual = {resource: set(node.kubelet.devices(resource)) for resource, capacity in node.kubelet.capacity().items() if capacity.capacity}
    healthy = {(resource, name) for resource in usual for name, device in node.kubelet.devices(resource).items() if device.is_healthy}
    closed = _closed(node)

    async def sample() -> None:
        while True:
            for resource in usual:
                now = node.kubelet.devices(resource)
                lost.update(
                    device for device in healthy if device[0] == resource and (device[1] not in now or not now[device[1]].is_healthy)
                )
            await asyncio.sleep(0.005)

    looking = asyncio.create_task(sample())
    await node.nats.stop()
    await asyncio.sleep(_NATS_AWAY_S)
    await node.nats.start()
    began = time.perf_counter()
    async with _plugin(node, "nic") as stub, asyncio.timeout(60):
        name = sorted(usual["topobus.dev/nic"])[0]
        while True:
            try:
                await _allocate(stub, name)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
    back = time.perf_counter() - began
    await asyncio.sleep(1.0)
    looking.cancel()
    return [
        Figure(case=f"devices that kubelet saw vanish, NATS away for {_NATS_AWAY_S:g} s", unit="devices", value=len(lost), budget=0),
        Figure(case="streams of kubelet's that ended meanwhile", unit="streams", value=_closed(node) - closed, budget=0),
        Figure(case="first Allocate after NATS is back", unit="s", value=round(back, 2)),
    ]


def _closed(node: BenchNode) -> int:
    return sum(event.event == "ListAndWatch.closed" for event in node.kubelet.events)


async def _pods(node: BenchNode) -> list[Figure]:
    """Admit a node's pods one after another, as kubelet does: choice, Allocate, PreStartContainer; each keeps its device."""
    resource = "topobus.dev/cpu"
    await node.kubelet.wait_for_resource(resource, allocatable=224, timeout_s=30.0)
    spent: list[float] = []
    resident: list[float] = []
    for turn in range(_PODS):
        pod = Pod(name=f"pod-{turn}", uid=f"uid-{turn}", containers=(Container(name="main", resources={resource: 1}),))
        began = time.perf_counter()
        answer = await node.kubelet.admit(pod)
        spent.append(time.perf_counter() - began)
        assert isinstance(answer, Admission), answer
        if turn in (_PODS // 10 - 1, _PODS - 1):
            resident.append(_mib(node, "gateway"))
    entry = await node.bus.get(LEDGER, node=NODE)
    tenth = _PODS // 10
    return [
        _figure(f"admission of a pod, first {tenth} of {_PODS}", spent[:tenth]),
        _figure(f"admission of a pod, last {tenth} of {_PODS}", spent[-tenth:]),
        Figure(case=f"gateway resident after {tenth} pods", unit="MiB", value=resident[0], budget=60.0),
        Figure(case=f"gateway resident after {_PODS} pods", unit="MiB", value=resident[1], budget=60.0),
        Figure(case="pods in the ledger", unit="pods", value=len(entry.value.allocations) if entry is not None else 0),
    ]


@asynccontextmanager
async def _plugin(node: BenchNode, device_class: str) -> AsyncIterator[rpc.DevicePluginStub]:
    async with grpc.aio.insecure_channel(f"unix:{node.plugin_socket(device_class)}", options=_LOCAL) as channel:
        yield rpc.DevicePluginStub(channel)


async def _allocate(stub: rpc.DevicePluginStub, name: str) -> None:
    await stub.Allocate(pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[name])]))


async def _timed(call: Callable[[int], Awaitable[object]], rounds: int) -> list[float]:
    """Call one after another, after some calls that do not count; seconds each."""
    spent: list[float] = []
    for turn in range(rounds + 10):
        began = time.perf_counter()
        await call(turn)
        spent.append(time.perf_counter() - began)
    return spent[10:]


def _figure(case: str, spent_s: Sequence[float], *, budget: float | None = None, budget_p99: float | None = None) -> Figure:
    ordered = sorted(spent_s)
    worst = ordered[min(len(ordered) - 1, math.ceil(len(ordered) * 0.99) - 1)]
    return Figure(
        case=case,
        value=round(statistics.median(ordered) * 1000, 3),
        p99=round(worst * 1000, 3),
        rounds=len(ordered),
        budget=budget,
        budget_p99=budget_p99,
    )


def _mib(node: BenchNode, service: str) -> float:
    return round(node.services[service].resident_mib(), 1)


def _claim(name: str, uid: str, driver: str, device: str) -> ApiObject:
    """A claim as the controller leaves it: allocated."""
    results = [{"request": "one", "driver": driver, "pool": NODE, "device": device}]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": uid},
        status={"allocation": {"devices": {"results": results}}},
    )


def _line(figure: Figure) -> str:
    budgets = [
        f"{figure.budget:g}" if figure.budget is not None else "-",
        f"{figure.budget_p99:g}" if figure.budget_p99 is not None else "-",
    ]
    budget = f"budget {'/'.join(budgets)}{'' if figure.is_within else '  OVER'}" if budgets != ["-", "-"] else ""
    worst = f"p99 {figure.p99:9.3f}" if figure.p99 is not None else " " * 13
    return f"{figure.case:<62} {figure.value:9.3f} {figure.unit:<8} {worst}  {budget}"
