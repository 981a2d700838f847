"""Claims at kubelet's DRA door: each is prepared once and undone whole, and its devices are held as
long as it is allocated.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf.message import Message

from support.dra_claims import HOLDER, TRAINING, UID, cdi_file, prepare, service_socket
from support.gateway_rig import Rig
from support.node_plane import NODE, claim, no
from topobus.formats.containers.cdi import parse
from topobus.formats.messages.catalogue import RELEASE
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest, ReleaseRequest
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod
from topobus.values.dra_names import DRIVER
from topobus.values.edits import ContainerEdits

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

BOTH = ClaimReference(name="both", uid="u-both", drivers=(DRIVER,))


def call_beta(channel: grpc.aio.Channel, verb: str, request: Message) -> Any:
    """Call a method as kubelet 1.33 does: v1beta1 has the messages of v1."""
    return channel.unary_unary(
        f"/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/Node{verb}Resources",
        request_serializer=type(request).SerializeToString,
        response_deserializer=getattr(dra, f"Node{verb}ResourcesResponse").FromString,
    )(request, timeout=45)


async def test_gateway_prepares_a_claim_and_writes_its_cdi_file_when_kubelet_asks(rig: Rig) -> None:
    """The answer names CDI devices that stand on disk, the ledger holds the devices for the claim,
    and undoing leaves nothing.
    """
    async with rig.kubelet, rig.gateway():
        prepared = await prepare(rig)
        spec = parse(cdi_file(rig).read_bytes())
        held = {key: allocation.holdings[0].devices for key, allocation in rig.plane.ledger.allocations.items()}
        await rig.plane.drop("training")
        errors = await rig.kubelet.unprepare_claims([TRAINING])

    names = [name for claim_device in prepared.devices for name in claim_device.cdi_devices]
    assert prepared.error == ""
    assert [(claim_device.pool, claim_device.device, claim_device.requests) for claim_device in prepared.devices] == [
        (NODE, "gpu-0", ("want-gpu",)),
        (NODE, "gpu-1", ("want-gpu",)),
    ]
    assert names == [spec.qualified_name(cdi_device.name) for cdi_device in spec.devices]
    assert spec.devices[0].edits.env == {"GPU_0": "1"}
    assert spec.common.env == {"TOPOBUS_GPU_DEVICES": "gpu-0,gpu-1"}
    assert held == {f"claim/default/training/{UID}": {"gpu": ("gpu-0", "gpu-1")}}
    assert errors == {}
    assert not cdi_file(rig).exists()
    assert rig.plane.ledger.allocations == {}


async def test_gateway_answers_the_same_and_asks_nobody_when_a_claim_is_prepared_twice(rig: Rig) -> None:
    """Kubelet repeats itself after timeouts and restarts: the second time costs nothing and changes
    nothing, and a lost file is there again.
    """
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        asked = len(rig.plane.asks.asked)
        cdi_file(rig).unlink()
        second = await prepare(rig)

    assert first == second
    assert len(rig.plane.asks.asked) == asked
    assert cdi_file(rig).exists()


async def test_gateway_prepares_once_when_kubelet_asks_twice_at_the_same_time(rig: Rig) -> None:
    """Pod workers and kubelet's own retry overlap: one preparation, both get its answer.

    An undo that comes in between waits for it and leaves nothing.
    """
    patient = msgspec.structs.replace(rig.settings.deadlines, prepare_s=10.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        await rig.kubelet.wait_for_driver(DRIVER)
        gate = rig.plane.asks.hold("prepare")
        first, second = (asyncio.create_task(prepare(rig)) for _ in range(2))
        await rig.plane.asks.wait_for("prepare")
        await rig.plane.drop("training")
        undoing = asyncio.create_task(rig.kubelet.unprepare_claims([TRAINING]))
        await asyncio.wait({undoing}, timeout=0.1)
        was_early = undoing.done()
        gate.set()
        answers = await asyncio.gather(first, second)
        errors = await undoing

    assert not was_early
    assert answers[0] == answers[1]
    assert answers[0].error == ""
    assert len(rig.plane.asks.requests("prepare")) == len(rig.plane.asks.requests("adopt")) == 1
    assert errors == {}
    assert rig.plane.ledger.allocations == {}
    assert not cdi_file(rig).exists()


async def test_gateway_leaves_nothing_when_kubelet_gives_a_prepare_up_and_undoes_it(rig: Rig) -> None:
    """The pod is deleted while the device service works: the call breaks off, the undo comes at
    once, and what was begun is undone.
    """
    patient = msgspec.structs.replace(rig.settings.deadlines, prepare_s=10.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        await rig.kubelet.wait_for_driver(DRIVER)
        gate = rig.plane.asks.hold("prepare")
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            claims = [dra.Claim(namespace="default", name="training", uid=UID)]
            call = call_beta(channel, "Prepare", dra.NodePrepareResourcesRequest(claims=claims))
            await rig.plane.asks.wait_for("prepare")
            call.cancel()
        await rig.plane.drop("training")
        errors = await rig.kubelet.unprepare_claims([TRAINING])
        gate.set()

    assert errors == {}
    assert [request.devices for request in rig.plane.asks.requests("unprepare")] == [("gpu-0", "gpu-1")]
    assert rig.plane.ledger.allocations == {}
    assert list(rig.cdi_dir.iterdir()) == []


async def test_gateway_serves_v1beta1_with_the_same_answer_when_an_older_kubelet_asks(rig: Rig) -> None:
    """Both versions are one handler behind two names."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            claims = [dra.Claim(namespace="default", name="training", uid=UID)]
            prepared = await call_beta(channel, "Prepare", dra.NodePrepareResourcesRequest(claims=claims))
            undone = await call_beta(channel, "Unprepare", dra.NodeUnprepareResourcesRequest(claims=claims))

    assert [each_device.device_name for each_device in prepared.claims[UID].devices] == ["gpu-0", "gpu-1"]
    assert prepared.claims[UID].devices[0].cdi_device_ids == [f"topobus.dev/gpu=claim-{UID}-gpu-0"]
    assert dict(undone.claims) == {UID: dra.NodeUnprepareResourceResponse()}


async def test_gateway_fails_only_the_claim_that_is_wrong_when_several_are_asked(rig: Rig) -> None:
    """A missing claim, another claim of the name and an unallocated one each have their own text.

    The good one is prepared.
    """
    await rig.plane.store(claim("replaced", "new-uid", "gpu-0"))
    await rig.plane.store(claim("waiting", "u-3"))
    bad = [
        ClaimReference(name=name, uid=uid, drivers=(DRIVER,))
        for name, uid in (("gone", "u-1"), ("replaced", "old-uid"), ("waiting", "u-3"))
    ]
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        answers = {
            prepare_claim.uid: prepare_claim for prepare_claim in await rig.kubelet.prepare_claims([*bad, TRAINING])
        }

    assert "does not exist" in answers["u-1"].error
    assert "has uid new-uid, kubelet asked for old-uid" in answers["old-uid"].error
    assert "is not allocated" in answers["u-3"].error
    assert answers[UID].error == ""
    assert len(answers[UID].devices) == 2


async def test_gateway_refuses_a_claim_when_another_one_holds_its_device(rig: Rig) -> None:
    """The node is the last defence: two live claims never get one device, and the refused one
    leaves no trace.
    """
    await rig.plane.store(claim("second", "u-2", "gpu-0"))
    second = ClaimReference(name="second", uid="u-2", drivers=(DRIVER,))
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        refused = await prepare(rig, second)
        await rig.plane.drop("training")
        await rig.kubelet.unprepare_claims([TRAINING])
        later = await prepare(rig, second)

    assert "claim default/training holds gpu-0" in refused.error
    assert later.error == ""


async def test_gateway_keeps_a_claims_devices_when_it_is_unprepared_but_still_allocated(rig: Rig) -> None:
    """Unprepared is not deallocated: another pod of the claim may come, so nobody else may take its
    devices.
    """
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        await rig.kubelet.unprepare_claims([TRAINING])
        held = [allocation.owner.uid for allocation in rig.plane.ledger.allocations.values()]
        again = await prepare(rig)

    assert held == [UID]
    assert again.error == ""
    assert len({request.op_id for request in rig.plane.asks.requests("adopt")}) == 2


async def test_gateway_keeps_a_claims_devices_when_it_is_deleted_under_its_pod(rig: Rig) -> None:
    """A claim that is gone from the store while its container runs frees nothing.

    Undone, its devices are free at once.
    """
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        await rig.plane.drop("training")
        refused = await rig.bus.ask(RELEASE, ReleaseRequest(op_id="release-gone", owner=HOLDER), node=NODE)
        held = [allocation.owner for allocation in rig.plane.ledger.allocations.values()]
        await rig.kubelet.unprepare_claims([TRAINING])

    assert refused.refusal is not None
    assert [reason.code for reason in refused.refusal.reasons] == ["prepared"]
    assert held == [HOLDER]
    assert rig.plane.ledger.allocations == {}


async def test_gateway_lets_a_claim_be_released_when_it_is_unprepared_but_still_allocated(rig: Rig) -> None:
    """Once nothing is prepared, whoever deallocates the claim lets its devices go."""
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        await rig.kubelet.unprepare_claims([TRAINING])
        released = await rig.bus.ask(RELEASE, ReleaseRequest(op_id="release-later", owner=HOLDER), node=NODE)

    assert released.refusal is None
    assert rig.plane.ledger.allocations == {}


async def test_gateway_calls_it_success_when_an_unknown_claim_is_unprepared(rig: Rig) -> None:
    """Kubelet may repeat an unprepare for ever: nothing known is nothing to do, and nobody is
    asked.
    """
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        errors = await rig.kubelet.unprepare_claims([ClaimReference(name="never", uid="u-0", drivers=(DRIVER,))])

    assert errors == {}
    assert rig.plane.asks.requests("unprepare") == []


async def test_gateway_prepares_all_classes_of_a_claim_at_once(rig: Rig) -> None:
    """One call of kubelet's brings the devices of both classes, each with its own CDI file, and one
    undoes them all.
    """
    await rig.plane.store(claim("both", "u-both", "gpu-0", "nic-1"))
    pod = Pod(name="p", uid="p-1", containers=(Container(name="main"),), claims=(BOTH,))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        admitted = await rig.kubelet.admit(pod)
        held = [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()]
        files = sorted(path.name for path in rig.cdi_dir.iterdir())
        await rig.plane.drop("both")
        errors = await rig.kubelet.remove(pod)
        calls = [
            event.event
            for event in rig.kubelet.events
            if event.event in ("NodePrepareResources", "NodeUnprepareResources")
        ]

    assert isinstance(admitted, Admission), admitted
    assert [
        (claim_device.driver, claim_device.pool, claim_device.device, claim_device.cdi_devices)
        for claim_device in admitted.claims[0].devices
    ] == [
        (DRIVER, NODE, "gpu-0", ("topobus.dev/gpu=claim-u-both-gpu-0",)),
        (DRIVER, NODE, "nic-1", ("topobus.dev/nic=claim-u-both-nic-1",)),
    ]
    assert held == [{"gpu": ("gpu-0",), "nic": ("nic-1",)}]
    assert files == ["topobus.dev-gpu_u-both.json", "topobus.dev-nic_u-both.json"]
    assert errors == {}
    assert calls == ["NodePrepareResources", "NodeUnprepareResources"]
    assert sorted(request.devices for request in rig.plane.asks.requests("unprepare")) == [("gpu-0",), ("nic-1",)]
    # By `adopt` a holding's pod is named as well, when kubelet lists it meanwhile.
    assert len(rig.plane.asks.requests("adopted")) == len(rig.plane.asks.requests("released")) == 1
    assert rig.plane.ledger.allocations == {}
    assert list(rig.cdi_dir.iterdir()) == []


@pytest.mark.parametrize("sick", ["gpu", "nic"])
async def test_gateway_prepares_no_class_of_a_claim_when_one_is_refused(rig: Rig, sick: str) -> None:
    """All or nothing: kubelet gets no device, nothing counts as prepared, no file tells of a device.

    The next try continues the same operations, and what kubelet gives up is undone whole.
    """
    await rig.plane.store(claim("both", "u-both", "gpu-0", "nic-1"))
    is_sick = True

    async def work(request: PrepareRequest) -> PrepareReply:
        if is_sick and request.devices[0].startswith(sick):
            return PrepareReply(result=no("driver-failed", "firmware is loading"))
        return PrepareReply(
            result=Prepared(edits={name: ContainerEdits(env={"CARD": name}) for name in request.devices})
        )

    rig.plane.prepare_by = work
    async with rig.kubelet, rig.gateway():
        refused = await prepare(rig, BOTH)
        files = list(rig.cdi_dir.iterdir())
        begun = {
            entry.device_class: entry.is_prepared
            for entry in Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()
        }
        is_sick = False
        prepared = await prepare(rig, BOTH)
        asked = {
            device_class: [
                request.op_id
                for request in rig.plane.asks.requests("prepare")
                if request.devices[0].startswith(device_class)
            ]
            for device_class in ("gpu", "nic")
        }
        await rig.kubelet.unprepare_claims([BOTH])
        is_sick = True
        given_up = await prepare(rig, BOTH)
        await rig.plane.drop("both")
        errors = await rig.kubelet.unprepare_claims([BOTH])

    assert "firmware is loading" in refused.error
    assert refused.devices == ()
    assert files == []
    assert begun == {"gpu": False, "nic": False}
    assert prepared.error == ""
    assert [claim_device.device for claim_device in prepared.devices] == ["gpu-0", "nic-1"]
    assert {device_class: (len(op_ids), len(set(op_ids))) for device_class, op_ids in asked.items()} == {
        "gpu": (2, 1),
        "nic": (2, 1),
    }
    assert "firmware is loading" in given_up.error
    assert errors == {}
    assert sorted(request.devices for request in rig.plane.asks.requests("unprepare"))[-4:] == [
        ("gpu-0",),
        ("gpu-0",),
        ("nic-1",),
        ("nic-1",),
    ]
    assert rig.plane.ledger.allocations == {}
    assert list(rig.cdi_dir.iterdir()) == []
