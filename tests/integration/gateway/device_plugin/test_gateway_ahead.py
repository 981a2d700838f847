"""Devices prepared while the ledger is asked for them: both answers are needed, and only the
ledger's makes anybody a holder.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from support.gateway_rig import Rig
from support.node_plane import device, no
from support.plugin_pods import GPU, admitted, pod, rejected
from topobus.formats.messages.messages import PrepareReply, PrepareRequest
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

CARD = msgspec.structs.replace(device("gpu-0", 0), driver="acme")
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="u-training")


async def show_card(rig: Rig) -> None:
    """One GPU whose driver can say that preparing it changes nothing."""
    await rig.plane.show("gpu", CARD, reading_drivers=("acme",))


def asked(rig: Rig) -> list[bool]:
    """Say of each preparation for Allocate whether it was asked ahead, in order."""
    return [request.is_ahead for request in rig.plane.asks.requests("prepare") if not request.is_again]


async def test_gateway_asks_for_both_at_once_when_preparing_changes_nothing(rig: Rig) -> None:
    """The device service is asked while the ledger still decides.

    The container gets what it answered.
    """
    await show_card(rig)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        gate = rig.plane.asks.hold("adopt")
        admission = asyncio.create_task(admitted(rig, pod(gpu=1)))
        await rig.plane.asks.wait_for("adopt")
        await rig.plane.asks.wait_for("prepare")
        held_meanwhile = dict(rig.plane.ledger.allocations)
        gate.set()
        answer = (await admission).container("main")

    assert held_meanwhile == {}
    assert asked(rig) == [True]
    assert [device_node.path for device_node in answer.edits.device_nodes] == ["/dev/gpu-0"]
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == [GPU]


async def test_gateway_gives_nothing_when_the_ledger_refuses_what_was_prepared_ahead(rig: Rig) -> None:
    """An answer that came first makes nobody a holder: the pod is refused with the holder's name,
    and there is nothing to undo.
    """
    await show_card(rig)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        gate = rig.plane.asks.hold("adopt")
        admission = asyncio.create_task(rejected(rig, pod(gpu=1)))
        await rig.plane.asks.wait_for("adopt")
        await rig.plane.asks.wait_for("prepare")
        await rig.plane.hold(CLAIM, gpu=("gpu-0",))
        gate.set()
        answer = await admission

    assert "claim default/training holds gpu-0" in answer.message
    assert [allocation.owner for allocation in rig.plane.ledger.allocations.values()] == [CLAIM]
    assert asked(rig) == [True]
    assert rig.plane.asks.requests("unprepare") == []


async def test_gateway_asks_again_when_ahead_was_refused(rig: Rig) -> None:
    """A refusal counts only of who holds the device: its holder of before may have let go
    meanwhile.
    """
    await show_card(rig)
    by_rule = rig.plane._prepare

    async def prepare(request: PrepareRequest) -> PrepareReply:
        if request.is_ahead:
            return PrepareReply(result=no("device-busy", "device gpu-0 is still at work for another request"))
        rig.plane.prepare_by = None
        return await by_rule(request)

    rig.plane.prepare_by = prepare
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        answer = (await admitted(rig, pod(gpu=1))).container("main")

    assert asked(rig)[:2] == [True, False]
    assert [device_node.path for device_node in answer.edits.device_nodes] == ["/dev/gpu-0"]


async def test_gateway_gives_devices_back_when_they_are_refused_ahead_and_then(rig: Rig) -> None:
    """The driver's reason reaches the pod, and nothing stays in the ledger."""
    await show_card(rig)
    rig.plane.prepare_refusal = no("driver-failed", "the card does not answer")
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        answer = await rejected(rig, pod(gpu=1))

    assert "the card does not answer" in answer.message
    assert asked(rig) == [True, False]
    assert rig.plane.ledger.allocations == {}


async def test_gateway_waits_for_the_ledger_when_no_driver_says_that_it_only_reads(rig: Rig) -> None:
    """A driver that does not say so may change something, and for nobody."""
    await rig.plane.show("gpu", CARD)
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        await admitted(rig, pod(gpu=1))

    assert asked(rig) == [False]
