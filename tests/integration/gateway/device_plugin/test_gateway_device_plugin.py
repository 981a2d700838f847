"""What the gateway offers at kubelet's device plugin door: registrations, again after every loss,
and lists that follow the inventory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from support.gateway_rig import Rig, make_rig
from support.node_plane import device, kept_back
from support.plugin_pods import GPU, GPUS, admitted, own_sockets, pod, rejected
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import PODS
from topobus.formats.messages.nouns import Ask
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import Capacity, KubeletTimings
from topobus.values.health import HealthState
from topobus.values.idset import NodeSet
from topobus.values.maintenance import DeviceVerb
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gateway_registers_a_class_with_its_list_when_kubelet_is_there(rig: Rig) -> None:
    """One resource a class, all devices with their health and NUMA nodes.

    An unknown node is no topology; an empty class is not registered.
    """
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


async def test_gateway_is_not_ready_before_it_serves_what_it_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long at its start: a roll-over that waits for `registration` never ends the
    old gateway before the new one is registered.
    """
    answer, is_free = Bus.answer, asyncio.Event()

    async def slow_answer(bus: Bus, ask: Ask[Any, Any], *args: Any, **options: Any) -> None:
        if ask is PODS:
            await is_free.wait()
        await answer(bus, ask, *args, **options)

    monkeypatch.setattr(Bus, "answer", slow_answer)
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        early = await rig.readiness.until(lambda report: "registration" in report)
        is_free.set()
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.readiness.until(lambda report: report.get("registration") == "ready")

    assert early["registration"] == f"{GPU}: not served yet"


async def test_gateway_is_ready_and_registers_later_when_kubelet_comes_late(rig: Rig) -> None:
    """Without a kubelet the gateway is ready and says nothing of registration; with one it
    registers.
    """
    await rig.plane.show("gpu", *GPUS)
    async with rig.gateway():
        alone = await rig.readiness.until(lambda report: report.get("inventories") == "ready")
        async with rig.kubelet:
            await rig.kubelet.wait_for_resource(GPU, allocatable=3)

    assert "registration" not in alone


async def test_gateway_registers_again_when_kubelet_restarts(rig: Rig) -> None:
    """A kubelet that deleted all sockets and forgot all plugins has them back, on a socket of
    another name, and pods keep what they hold.
    """
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


async def test_gateway_registers_again_at_once_when_an_older_kubelet_cuts_it_off(nats_server: NatsServer) -> None:
    """Kubelets before 1.36 cut off a plugin when its predecessor's list ends, and count its devices
    as unhealthy until it is registered again: on the socket that it has, without a pause.
    """
    async with make_rig(nats_server.url, timings=KubeletTimings(has_reregister_race=True)) as rig:
        await rig.plane.show("gpu", *GPUS)
        clock = ManualClock()
        async with rig.kubelet, rig.gateway() as predecessor:
            await rig.kubelet.wait_for_resource(GPU, allocatable=3)
            async with rig.gateway(clock=clock, checkpoint_path=str(rig.root / "other" / "checkpoint.json")):
                await rig.kubelet.wait_for_event("ListAndWatch.send", count=2)
                await rig.readiness.until(lambda report: report.get("registration") == "ready")
                clock.advance(1.0)
                predecessor.cancel()
                await rig.kubelet.wait_for_event("ListAndWatch.send", count=3)
                await rig.kubelet.wait_for_resource(GPU, allocatable=3)
                counts = rig.kubelet.healthy_counts(GPU)

    endpoints = [event.detail["req"]["endpoint"] for event in rig.kubelet.events if event.event == "Register.ok"]
    assert len(endpoints) == 3
    assert endpoints[2] == endpoints[1]
    assert counts == (3, 3, 0, 3)


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


async def test_gateway_updates_the_list_when_an_operator_keeps_a_device_back(rig: Rig) -> None:
    """Under maintenance it is listed as unhealthy, excluded it is not listed, returned it is as
    before.
    """
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        await rig.plane.show("gpu", kept_back(device("gpu-0", 0), DeviceVerb.MAINTAIN), *GPUS[1:])
        maintained = await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.plane.show(
            "gpu",
            kept_back(device("gpu-0", 0), DeviceVerb.EXCLUDE),
            kept_back(device("gpu-1", 1), DeviceVerb.EXCLUDE),
            *GPUS[2:],
        )
        excluded = await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        await rig.plane.show("gpu", *GPUS)
        returned = await rig.kubelet.wait_for_resource(GPU, allocatable=3)

    assert [resource.capacity for resource in (maintained, excluded, returned)] == [3, 1, 3]


async def test_gateway_lists_an_allocated_device_as_unhealthy_when_it_vanishes(rig: Rig) -> None:
    """An id that a pod holds never leaves the list, for kubelet would call it healthy.

    Free ids do leave.
    """
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


async def test_gateway_keeps_lists_and_sockets_when_nats_goes_away(own_rig: Rig, own_nats_server: NatsServer) -> None:
    """With the bus gone kubelet sees no change at all.

    What changed meanwhile arrives when the bus is back.
    """
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
    """A second reader gets the list at once, both get every change, and the first is not disturbed
    by the second's end.
    """
    await rig.plane.show("gpu", *GPUS)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        (socket,) = own_sockets(rig)
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"unix:{socket}") as channel:
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
            await asyncio.wait_for(deaf.twice.wait(), 60)
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
