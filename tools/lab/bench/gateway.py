"""Measures the gateway from kubelet's side: `python -m lab.bench gateway [--json] [--rounds N]`.

Real processes (nats-server, discovery, device services, topology, gateway) on a recorded machine.
The times are taken at kubelet's end of the sockets, so they include gRPC, NATS, the ledger's write
and the disk. They also include the load of other processes, so the load average is printed beside
them. Allocate and prepare are measured in turns with a floor (`gateway_floor`), so the load affects
both, and the ratio is the number to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from msgspec import structs

from lab.bench.figures import Figure, clocked, draw_figure, draw_processors, figure, machine_facts, processor_ms
from lab.bench.gateway_floor import Floor, floor
from lab.bench.node_processes import NODE, BenchNode, bench_node
from lab.bench.process_use import processor_s, read_counts
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.simulation.kubelet.simulator import Admission, Container, Pod
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import NodeSet

__all__ = ["main"]

# CPUs are the machine's one class with a device for each of a node's pods. A device plugin for them
# is for this measurement alone.
_MANY_DEVICES = {"TOPOBUS_GATEWAY__EXPOSURE": '{"cpu": "both"}'}
_SERVICES = ("discovery", "gpu", "nic", "cpu", "topology", "gateway")
_GROUPS = ("calls", "claims", "lists", "faults", "pods")
_UNCOUNTED = 10
"""Calls of a case that come first and do not count."""
_REST_S = 0.012
"""After each call that is measured beside the floor: effects of an answer (the decision's event,
the ledger's delivery to its readers) would otherwise fall into the floor's time."""
_PODS = 110
"""kubelet's default of pods per node."""
_STREAMS = 8
_DEVICES = 1000
_BULK = "bulk"
"""A class of our own for the long list: the benchmark publishes its inventory, as a device service
does."""
_NATS_AWAY_S = 3.0
_LOCAL = [("grpc.use_local_subchannel_pool", 1)]


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench gateway", description="Measure the gateway at kubelet's sockets."
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="calls a case (300)")
    parser.add_argument(
        "--only", default=",".join(_GROUPS), metavar="A,B", help=f"groups of cases ({', '.join(_GROUPS)})"
    )
    arguments = parser.parse_args(argv)
    groups = arguments.only.split(",")
    if unknown := sorted({*groups} - {*_GROUPS}):
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(_GROUPS)}")
    facts = machine_facts()
    figures = asyncio.run(_measure(max(10, arguments.rounds), groups))
    if arguments.json:
        rows = [measured.as_row() for measured in figures]
        print(json.dumps({"group": "gateway", "machine": facts, "cases": rows}, indent=2))
    else:
        print(" ".join(f"{key}={value}" for key, value in facts.items()))
        for measured in figures:
            print("\n".join([draw_figure(measured), *draw_processors(measured)]))
    return 0


async def _measure(rounds: int, groups: Collection[str]) -> list[Figure]:
    figures: list[Figure] = []
    if {*groups} - {"pods"}:
        async with bench_node(_SERVICES, environment=_MANY_DEVICES) as node:
            for resource, count in (("gpu", 8), ("nic", 8)):
                await node.kubelet.wait_for_resource(f"topobus.dev/{resource}", allocatable=count, timeout_s=30.0)
            await node.kubelet.wait_for_driver(DRIVER)
            figures.append(
                Figure(case="gateway resident when ready", unit="MiB", value=_mib(node, "gateway"), budget=60.0)
            )
            # Before the calls, whose devices stay with kubelet.
            if "claims" in groups:
                figures += await _claims(node, rounds)
            if "calls" in groups:
                figures += await _calls(node, rounds)
            if "lists" in groups:
                figures += await _list_update(node, max(10, rounds // 10))
            if "faults" in groups:
                figures += await _frozen(node, rounds)
                figures += await _nats_away(node)
    if "pods" in groups:
        # Each admission keeps its device, so the pods get a node of their own.
        async with bench_node(_SERVICES, environment=_MANY_DEVICES) as node:
            figures += await _pods(node, rounds)
    return figures


async def _calls(node: BenchNode, rounds: int) -> list[Figure]:
    names = sorted(node.kubelet.devices("topobus.dev/gpu"))
    async with _plugin(node, "gpu") as stub:

        async def prefer(turn: int) -> None:
            container = pb.ContainerPreferredAllocationRequest(available_deviceIDs=names, allocation_size=1 + turn % 4)
            await stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[container]))

        preferred = await _timed(prefer, rounds)
        allocated = await _allocations(node, "gpu", names, rounds, "Allocate of one GPU")
        started = await _timed(
            lambda turn: stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[names[turn % 8]])), rounds
        )
    return [
        figure("GetPreferredAllocation, 8 GPUs", preferred, budget_p99=50.0),
        allocated,
        figure("PreStartContainer, devices looked at again", started),
    ]


async def _allocations(node: BenchNode, device_class: str, names: Sequence[str], rounds: int, case: str) -> Figure:
    async with _plugin(node, device_class) as stub:
        for name in names:
            # What the ledger will have, so that the floor's value is as large, and each device
            # once, as it is requested after a start.
            await _allocate(stub, name)
        async with floor(node.folder / f"floor-{device_class}", await _ledger_bytes(node)) as bare:
            return await _beside_floor(
                case,
                node,
                device_class,
                bare,
                lambda turn: clocked(_allocate(stub, names[turn % len(names)])),
                bare.allocate,
                rounds,
            )


async def _beside_floor(
    case: str,
    node: BenchNode,
    device_class: str,
    bare: Floor,
    call: Callable[[int], Awaitable[float]],
    call_floor: Callable[[], Awaitable[object]],
    rounds: int,
) -> Figure:
    """Call in turns with the floor, so that other load on the machine affects both alike.

    `call` returns its own time, in seconds.
    """
    pids = {"gateway": "gateway", "topology": "topology", "device": device_class}
    pids_of = {**{place: node.services[name].pid for place, name in pids.items()}, "nats-server": node.nats.pid}
    others = [service.pid for name, service in node.services.items() if name not in pids.values()]

    def used() -> tuple[dict[str, float], dict[str, float]]:
        own = {place: processor_s(pid) for place, pid in pids_of.items()}
        return {**own, "others": sum(map(processor_s, others))}, {
            place: processor_s(pid) for place, pid in bare.pids.items()
        }

    spent: list[float] = []
    spent_by_floor: list[float] = []
    before = used()
    for turn in range(rounds + _UNCOUNTED):
        if turn == _UNCOUNTED:
            before = used()
        spent.append(await call(turn))
        await asyncio.sleep(_REST_S)
        spent_by_floor.append(await clocked(call_floor()))
        await asyncio.sleep(_REST_S)
    after = used()
    return figure(
        case,
        spent[_UNCOUNTED:],
        floor_s=spent_by_floor[_UNCOUNTED:],
        processors=processor_ms(before[0], after[0], rounds),
        floor_processors=processor_ms(before[1], after[1], rounds),
        budget_ratio=2.0,
        budget_ratio_p99=5.0,
    )


async def _claims(node: BenchNode, rounds: int) -> list[Figure]:
    names = {name: sorted(node.kubelet.devices(f"topobus.dev/{name}")) for name in ("gpu", "nic")}
    names["cpu"] = [f"cpu-{cpu}" for cpu in range(8, 16)]
    undone: list[float] = []
    async with (
        grpc.aio.insecure_channel(f"unix:{node.driver_socket(DRIVER)}", options=_LOCAL) as channel,
        # On the disk of the gateway's own checkpoint.
        floor(node.folder / "floor-claims", await _ledger_bytes(node)) as bare,
    ):

        def call(verb: str, request: Any, response: Any) -> Any:
            return channel.unary_unary(
                f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{verb}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

        prepare = call("NodePrepareResources", dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse)
        unprepare = call(
            "NodeUnprepareResources", dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse
        )
        present: list[dra.Claim] = []

        async def prepare_one(turn: int, classes: Sequence[str] = ("nic",)) -> float:
            """The previous claim is unprepared first, outside of this call's time."""
            if present:
                undone.append(await undo(present.pop()))
            name, uid = f"claim-{'-'.join(classes)}-{turn}", f"uid-{'-'.join(classes)}-{turn}"
            devices = {device_class: names[device_class][turn % 8] for device_class in classes}
            await node.bus.put(OBJECT, _claim(name, uid, devices), kind="resourceclaim", namespace="default", name=name)
            present.append(dra.Claim(namespace="default", name=name, uid=uid))
            began = time.perf_counter()
            answer = await prepare(dra.NodePrepareResourcesRequest(claims=present))
            spent_s = time.perf_counter() - began
            assert not answer.claims[uid].error, answer.claims[uid].error
            return spent_s

        async def undo(claim: dra.Claim) -> float:
            await node.bus.delete(OBJECT, kind="resourceclaim", namespace="default", name=claim.name)
            began = time.perf_counter()
            answer = await unprepare(dra.NodeUnprepareResourcesRequest(claims=[claim]))
            spent_s = time.perf_counter() - began
            assert not answer.claims[claim.uid].error, answer.claims[claim.uid].error
            return spent_s

        prepared = await _beside_floor("prepare of one claim", node, "nic", bare, prepare_one, bare.prepare, rounds)
        alone: list[float] = []
        three: list[float] = []
        for turn in range(rounds + _UNCOUNTED):
            alone.append(await prepare_one(turn, ("gpu",)))
            three.append(await prepare_one(turn, ("gpu", "nic", "cpu")))
        await undo(present.pop())
    # Its processor time includes that of an unprepare, so it is not compared with the floor's.
    return [
        structs.replace(prepared, processors={}, floor_processors={}),
        figure(
            "prepare of a claim of GPU, NIC and CPU (floor: of one GPU)",
            three[_UNCOUNTED:],
            floor_s=alone[_UNCOUNTED:],
            budget_ratio=1.3,
        ),
        figure("unprepare of one claim", undone[_UNCOUNTED : rounds + _UNCOUNTED]),
    ]


async def _list_update(node: BenchNode, rounds: int) -> list[Figure]:
    """Measure from the inventory's write to the last stream's new list."""
    devices = tuple(
        Device(name=f"bulk-{index:04d}", device_class=_BULK, numa_nodes=NodeSet(index % 2)) for index in range(_DEVICES)
    )
    sick = DeviceHealth(
        state=HealthState.UNHEALTHY,
        conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="bench"),),
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
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(f"unix:{node.plugin_socket(_BULK)}", options=_LOCAL)
            )
            # Bytes, as a client's parsing of a list is not the gateway's time.
            watch: Any = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch", request_serializer=pb.Empty.SerializeToString
            )
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
            # Not at once: a burst is one message, which is not measured here.
            await asyncio.sleep(0.05)
    return [figure(f"one update, {_DEVICES} devices, {_STREAMS} streams", spent, budget=50.0)]


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
            # kubelet waits in the frozen class meanwhile.
            hung = asyncio.create_task(_allocate(frozen, sorted(node.kubelet.devices("topobus.dev/gpu"))[0]))
            during = await _timed(lambda turn: _allocate(stub, names[turn % 8]), rounds)
            began = time.perf_counter()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await hung
            waited = time.perf_counter() - began
        finally:
            node.services["gpu"].thaw()
    return [
        figure("Allocate of one NIC, all services well", before),
        figure("Allocate of one NIC, the gpu service frozen", during, budget_p99=50.0),
        Figure(
            case="Allocate of the frozen class is refused after",
            unit="s",
            value=round(waited + sum(during), 2),
            budget=20.0,
        ),
    ]


async def _nats_away(node: BenchNode) -> list[Figure]:
    """Stop and start NATS, and check kubelet's lists meanwhile."""
    lost: set[tuple[str, str]] = set()
    usual = {
        resource: set(node.kubelet.devices(resource))
        for resource, capacity in node.kubelet.capacity().items()
        if capacity.capacity
    }
    healthy = {
        (resource, name)
        for resource in usual
        for name, device in node.kubelet.devices(resource).items()
        if device.is_healthy
    }
    closed = _closed(node)

    async def sample() -> None:
        while True:
            for resource in usual:
                now = node.kubelet.devices(resource)
                lost.update(
                    device
                    for device in healthy
                    if device[0] == resource and (device[1] not in now or not now[device[1]].is_healthy)
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
        Figure(
            case=f"devices that kubelet saw vanish, NATS away for {_NATS_AWAY_S:g} s",
            unit="devices",
            value=len(lost),
            budget=0,
        ),
        Figure(
            case="streams of kubelet's that ended meanwhile", unit="streams", value=_closed(node) - closed, budget=0
        ),
        Figure(case="first Allocate after NATS is back", unit="s", value=round(back, 2)),
    ]


def _closed(node: BenchNode) -> int:
    return sum(event.event == "ListAndWatch.closed" for event in node.kubelet.events)


async def _pods(node: BenchNode, rounds: int) -> list[Figure]:
    """Admit a node's pods one after another, as kubelet does: choice, Allocate, PreStartContainer.

    Each keeps its device.
    """
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
    await node.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=8, timeout_s=30.0)
    gpus = sorted(node.kubelet.devices("topobus.dev/gpu"))
    return [
        figure(f"admission of a pod, first {tenth} of {_PODS}", spent[:tenth]),
        figure(f"admission of a pod, last {tenth} of {_PODS}", spent[-tenth:]),
        Figure(case=f"gateway resident after {tenth} pods", unit="MiB", value=resident[0], budget=60.0),
        Figure(case=f"gateway resident after {_PODS} pods", unit="MiB", value=resident[1], budget=60.0),
        await _allocations(node, "gpu", gpus, rounds, f"Allocate of one GPU beside {_PODS} pods"),
        Figure(case="pods in the ledger", unit="pods", value=len(entry.value.allocations) if entry is not None else 0),
    ]


@asynccontextmanager
async def _plugin(node: BenchNode, device_class: str) -> AsyncIterator[rpc.DevicePluginStub]:
    async with grpc.aio.insecure_channel(f"unix:{node.plugin_socket(device_class)}", options=_LOCAL) as channel:
        yield rpc.DevicePluginStub(channel)


async def _allocate(stub: rpc.DevicePluginStub, name: str) -> None:
    await stub.Allocate(pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[name])]))


async def _ledger_bytes(node: BenchNode) -> int:
    entry = await node.bus.get(LEDGER, node=NODE)
    return len(encode(entry.value)) if entry is not None else 0


async def _timed(call: Callable[[int], Awaitable[object]], rounds: int) -> list[float]:
    """Call several times, after some calls that do not count. Returns the seconds of each."""
    return [await clocked(call(turn)) for turn in range(rounds + _UNCOUNTED)][_UNCOUNTED:]


def _mib(node: BenchNode, service: str) -> float:
    return round(read_counts(node.services[service].pid).resident_mib, 1)


def _claim(name: str, uid: str, devices: Mapping[str, str]) -> ApiObject:
    """Make a claim as the controller leaves it: allocated. A device of each class."""
    results = [
        {"request": device_class, "driver": DRIVER, "pool": pool_of_class(NODE, device_class), "device": device}
        for device_class, device in devices.items()
    ]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": uid},
        status={"allocation": {"devices": {"results": results}}},
    )
