"""Calls of kubelet's that somebody holds up: answered within deadlines of our own, given back, and
no other class waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import SILENCE, Rig, make_rig
from support.node_plane import NODE, device
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import PREPARE
from topobus.formats.messages.messages import PrepareReply, PrepareRequest
from topobus.gateway.config import DeadlineSettings
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import (
    Admission,
    Container,
    Pod,
    Rejection,
)
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
NIC = "topobus.dev/nic"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A GPU, a NIC and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.show("nic", device("nic-0", 0))
        async with made.kubelet:
            yield made


def pod(resource: str) -> Pod:
    """A pod that asks for one device."""
    name = resource.rpartition("/")[2]
    return Pod(name=name, uid=name, containers=(Container(name="main", resources={resource: 1}),))


def deadlines(rig: Rig, **changes: float) -> DeadlineSettings:
    """Patient with peers, so that the deadline of the whole call is what ends it."""
    return msgspec.structs.replace(rig.settings.deadlines, prepare_s=600.0, **changes)


async def test_allocate_ends_by_its_own_deadline_and_gives_back_when_a_driver_hangs(rig: Rig) -> None:
    """Kubelet would wait for ever.

    The pod is refused with what was waited for, and the ledger holds nothing.
    """
    rig.plane.hung_devices.add("gpu-0")
    async with rig.gateway(deadlines=deadlines(rig, allocate_s=3.0)):
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        await rig.kubelet.wait_for_resource(NIC, allocatable=1)
        refused, beside = await asyncio.gather(rig.kubelet.admit(pod(GPU)), rig.kubelet.admit(pod(NIC)))

    assert isinstance(refused, Rejection)
    assert "code = DeadlineExceeded" in refused.message
    assert "topobus.dev/gpu: Allocate was not done within 3 s" in refused.message
    assert isinstance(beside, Admission)
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == [NIC]


async def test_pre_start_ends_by_its_own_deadline_when_a_driver_hangs(rig: Rig) -> None:
    """Before kubelet's 30 s, so that the container's event has our sentence.

    The next try is as good as the first.
    """
    async with rig.gateway(deadlines=deadlines(rig, pre_start_s=3.0)):
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        assert isinstance(await rig.kubelet.admit(pod(GPU)), Admission)
        rig.plane.hung_devices.add("gpu-0")
        refused = await rig.kubelet.restart_container(pod(GPU), "main")
        rig.plane.hung_devices.clear()
        good = await rig.kubelet.restart_container(pod(GPU), "main")

    assert "topobus.dev/gpu: PreStartContainer was not done within 3 s" in refused
    assert good == ""


async def test_allocate_is_refused_at_once_when_a_service_is_known_to_be_silent(rig: Rig) -> None:
    """Kubelet admits one pod after the other, so none of them waits for what will not come.

    Nothing is written, a neighbour goes on.
    """
    await rig.plane.show("fpga", device("fpga-0", 0))
    clock = ManualClock()
    patient = msgspec.structs.replace(rig.settings.deadlines, adopt_s=600.0, prepare_s=600.0, allocate_s=600.0)
    where = {"node": NODE, "device_class": "fpga"}

    async def never(_request: PrepareRequest) -> PrepareReply:
        raise AssertionError("a sign of life prepares nothing")

    async with rig.gateway(silence=SILENCE, deadlines=patient, clock=clock), clock.ticking(SILENCE.every_s):
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            await rig.kubelet.wait_for_health(DRIVER, NODE, "fpga-0", "Healthy")
        await rig.kubelet.wait_for_health(DRIVER, NODE, "fpga-0", "Unknown")
        await rig.kubelet.wait_for_resource("topobus.dev/fpga", allocatable=1)
        await rig.kubelet.wait_for_resource(NIC, allocatable=1)
        refused = await rig.kubelet.admit(pod("topobus.dev/fpga"))
        beside = await rig.kubelet.admit(pod(NIC))

    assert isinstance(refused, Rejection)
    assert "the fpga service has not answered since" in refused.message
    assert isinstance(beside, Admission)
    # Of the neighbour perhaps twice: once for Allocate, and for what kubelet
    # lists before the ledger is read. An ask that names the pod holds nothing.
    adopted = [tuple(request.devices) for request in rig.plane.asks.requests("adopt") if not request.names_pods_of]
    assert adopted in ([("nic",)], [("nic",)] * 2)
