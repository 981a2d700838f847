"""The gateway at kubelet's DRA door: claims prepared and undone over crashes, reboots and refusals, CDI files on disk, device health."""

# ruff: noqa: ASYNC240  (a test may read a small file)

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import IMPATIENT, SILENCE, Rig, make_rig
from support.node_plane import NODE, claim, device, no
from topobus.contracts.catalogue import PREPARE, RELEASE
from topobus.contracts.messages import PrepareReply, PrepareRequest, ReleaseRequest
from topobus.devicekit import cdi_files
from topobus.devicekit.cdi import parse
from topobus.domain.errors import ConfigError
from topobus.domain.health import HealthState
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway import boot
from topobus.kubeletpb.dra.v1beta1 import api_pb2 as dra_beta
from topobus.kubeletpb.dra.v1beta1 import api_pb2_grpc as dra_beta_rpc
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.drahealth.v1 import api_pb2_grpc as health_rpc
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.boot import BOOT_ID_FILE
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    PreparedClaim,
)

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

DRIVER = "gpu.topobus.dev"
UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
FILE = f"topobus.dev-gpu_{UID}.json"
TRAINING = ClaimReference(name="training", uid=UID, drivers=(DRIVER,))
HOLDER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid=UID)
BOTH = ClaimReference(name="both", uid="u-both", drivers=(DRIVER, "nic.topobus.dev"))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and two NICs, a claim for both GPUs; kubelet and gateway are started by the test."""
    async with _make_rig(nats_server) as made:
        yield made


@pytest_asyncio.fixture
async def own_rig(own_nats_server: NatsServer) -> AsyncIterator[Rig]:
    """The same on a server that can be stopped."""
    async with _make_rig(own_nats_server) as made:
        yield made


@asynccontextmanager
async def _make_rig(server: NatsServer) -> AsyncIterator[Rig]:
    async with make_rig(server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
        await made.plane.store(claim("training", UID, "gpu-0", "gpu-1"))
        yield made


async def prepare(rig: Rig, reference: ClaimReference = TRAINING) -> PreparedClaim:
    """Prepare one claim through kubelet."""
    for driver in reference.drivers:
        await rig.kubelet.wait_for_driver(driver)
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    return prepared


def service_socket(rig: Rig) -> Path:
    """The socket that kubelet calls; its name is the gateway's own."""
    (path,) = (rig.kubelet.plugins_dir / DRIVER).glob("dra-*.sock")
    return path


def cdi_file(rig: Rig, name: str = FILE) -> Path:
    """One CDI file."""
    return rig.cdi_dir / name


async def test_gateway_prepares_a_claim_and_writes_its_cdi_file_when_kubelet_asks(rig: Rig) -> None:
    """The answer names CDI devices that stand on disk, the ledger holds the devices for the claim, and undoing leaves nothing."""
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
    """Kubelet repeats itself after timeouts and restarts: the second time costs nothing and changes nothing, and a lost file is there again."""
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        asked = len(rig.plane.asked)
        cdi_file(rig).unlink()
        second = await prepare(rig)

    assert first == second
    assert len(rig.plane.asked) == asked
    assert cdi_file(rig).exists()


async def test_gateway_prepares_once_when_kubelet_asks_twice_at_the_same_time(rig: Rig) -> None:
    """Pod workers and kubelet's own retry overlap: one preparation, both get its answer; an undo that comes in between waits for it and leaves nothing."""
    patient = msgspec.structs.replace(rig.settings.deadlines, prepare_s=10.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        await rig.kubelet.wait_for_driver(DRIVER)
        rig.plane.hold_answers("prepare")
        first, second = (asyncio.create_task(prepare(rig)) for _ in range(2))
        await rig.plane.wait_for("prepare")
        await rig.plane.drop("training")
        undoing = asyncio.create_task(rig.kubelet.unprepare_claims([TRAINING]))
        await asyncio.wait({undoing}, timeout=0.1)
        was_early = undoing.done()
        rig.plane.go.set()
        answers = await asyncio.gather(first, second)
        errors = await undoing

    assert not was_early
    assert answers[0] == answers[1]
    assert answers[0].error == ""
    assert len(rig.plane.requests("prepare")) == len(rig.plane.requests("adopt")) == 1
    assert errors == {}
    assert rig.plane.ledger.allocations == {}
    assert not cdi_file(rig).exists()


async def test_gateway_leaves_nothing_when_kubelet_gives_a_prepare_up_and_undoes_it(rig: Rig) -> None:
    """The pod is deleted while the device service works: the call breaks off, the undo comes at once, and what was begun is undone."""
    patient = msgspec.structs.replace(rig.settings.deadlines, prepare_s=10.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        await rig.kubelet.wait_for_driver(DRIVER)
        rig.plane.hold_answers("prepare")
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            call = dra_beta_rpc.DRAPluginStub(channel).NodePrepareResources(
                dra_beta.NodePrepareResourcesRequest(claims=[dra_beta.Claim(namespace="default", name="training", uid=UID)])
            )
            await rig.plane.wait_for("prepare")
            call.cancel()
        await rig.plane.drop("training")
        errors = await rig.kubelet.unprepare_claims([TRAINING])
        rig.plane.go.set()

    assert errors == {}
    assert [request.devices for request in rig.plane.requests("unprepare")] == [("gpu-0", "gpu-1")]
    assert rig.plane.ledger.allocations == {}
    assert list(rig.cdi_dir.iterdir()) == []


async def test_gateway_serves_v1beta1_with_the_same_answer_when_an_older_kubelet_asks(rig: Rig) -> None:
    """Both versions are one handler behind two names."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            stub = dra_beta_rpc.DRAPluginStub(channel)
            wanted = dra_beta.Claim(namespace="default", name="training", uid=UID)
            prepared = await stub.NodePrepareResources(dra_beta.NodePrepareResourcesRequest(claims=[wanted]), timeout=45)
            undone = await stub.NodeUnprepareResources(dra_beta.NodeUnprepareResourcesRequest(claims=[wanted]), timeout=45)

    assert [each_device.device_name for each_device in prepared.claims[UID].devices] == ["gpu-0", "gpu-1"]
    assert prepared.claims[UID].devices[0].cdi_device_ids == [f"topobus.dev/gpu=claim-{UID}-gpu-0"]
    assert dict(undone.claims) == {UID: dra_beta.NodeUnprepareResourceResponse()}


async def test_gateway_fails_only_the_claim_that_is_wrong_when_several_are_asked(rig: Rig) -> None:
    """A missing claim, another claim of the name and an unallocated one each have their own text; the good one is prepared."""
    await rig.plane.store(claim("replaced", "new-uid", "gpu-0"))
    await rig.plane.store(claim("waiting", "u-3"))
    bad = [
        ClaimReference(name=name, uid=uid, drivers=(DRIVER,))
        for name, uid in (("gone", "u-1"), ("replaced", "old-uid"), ("waiting", "u-3"))
    ]
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        answers = {prepare_claim.uid: prepare_claim for prepare_claim in await rig.kubelet.prepare_claims([*bad, TRAINING])}

    assert "does not exist" in answers["u-1"].error
    assert "has uid new-uid, kubelet asked for old-uid" in answers["old-uid"].error
    assert "is not allocated" in answers["u-3"].error
    assert answers[UID].error == ""
    assert len(answers[UID].devices) == 2


async def test_gateway_refuses_a_claim_when_another_one_holds_its_device(rig: Rig) -> None:
    """The node is the last defence: two live claims never get one device, and the refused one leaves no trace."""
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


async def test_gateway_goes_on_with_the_same_operation_when_a_preparation_failed_halfway(rig: Rig) -> None:
    """A retry continues what was begun: the ledger is asked under the same id, and unprepare undoes a half-done claim as well."""
    rig.plane.prepare_refusal = no("driver-failed", "firmware is loading")
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
    async with rig.kubelet, rig.gateway():
        rig.plane.prepare_refusal = None
        second = await prepare(rig)

    adopted = [request.op_id for request in rig.plane.requests("adopt")]
    assert "firmware is loading" in first.error
    assert second.error == ""
    assert len(adopted) == 2
    assert len(set(adopted)) == 1


async def test_gateway_undoes_a_half_done_claim_when_kubelet_gives_it_up(rig: Rig) -> None:
    """What was adopted and never prepared is let go, also by a gateway that was started since."""
    rig.plane.prepare_refusal = no("driver-failed", "no")
    async with rig.kubelet:
        async with rig.gateway():
            await prepare(rig)
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        await rig.plane.drop("training")
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            errors = await rig.kubelet.unprepare_claims([TRAINING])

    assert errors == {}
    assert rig.plane.ledger.allocations == {}
    assert [request.devices for request in rig.plane.requests("unprepare")] == [("gpu-0", "gpu-1")]


async def test_gateway_writes_files_again_and_removes_orphans_when_started_after_a_reboot(rig: Rig) -> None:
    """A reboot empties the CDI folder: it is whole again before kubelet is served, and files without a claim are gone."""
    async with rig.kubelet:
        async with rig.gateway():
            prepared = await prepare(rig)
            before = cdi_file(rig).read_bytes()
        cdi_file(rig).unlink()
        orphan = cdi_file(rig, "topobus.dev-nic_u-9.json")
        foreign = cdi_file(rig, "nvidia.com-gpu_u-9.json")
        for path in (orphan, foreign):
            path.write_text("{}")
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        async with rig.gateway():
            again = await prepare(rig)

    assert cdi_file(rig).read_bytes() == before
    assert again == prepared
    assert (orphan.exists(), foreign.exists()) == (False, True)
    assert len(rig.plane.requests("adopt")) == 1


async def test_gateway_makes_devices_ready_again_when_the_machine_was_rebooted(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reboot undoes what a driver did and numbers devices anew: kubelet's next prepare gets what is true now, the ledger still knows the claim."""
    async with rig.kubelet, rig.gateway():
        before = await prepare(rig)
        again = await prepare(rig)
    other = Tree(HardwareSettings(root=str(tmp_path / "rebooted")))
    file = other.path(BOOT_ID_FILE)
    file.parent.mkdir(parents=True)
    file.write_text("another-boot\n")
    monkeypatch.setattr(boot, "LIVE", other)
    rig.plane.renumbered = {"gpu-0": "/dev/gpu-7"}
    async with rig.kubelet, rig.gateway():
        after = await prepare(rig)
        nodes = [node.path for cdi_device in parse(cdi_file(rig).read_bytes()).devices for node in cdi_device.edits.device_nodes]
        asked = [request.op_id for request in rig.plane.requests("prepare")]
        await prepare(rig)

    assert before == again == after
    assert nodes == ["/dev/gpu-7", "/dev/gpu-1"]
    assert len(asked) == len(set(asked)) == 2
    assert len(rig.plane.requests("prepare")) == 2
    assert len(rig.plane.ledger.allocations) == 1


async def test_gateway_keeps_a_claims_devices_when_it_is_unprepared_but_still_allocated(rig: Rig) -> None:
    """Unprepared is not deallocated: another pod of the claim may come, so nobody else may take its devices."""
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        await rig.kubelet.unprepare_claims([TRAINING])
        held = [allocation.owner.uid for allocation in rig.plane.ledger.allocations.values()]
        again = await prepare(rig)

    assert held == [UID]
    assert again.error == ""
    assert len({request.op_id for request in rig.plane.requests("adopt")}) == 2


async def test_gateway_keeps_a_claims_devices_when_it_is_deleted_under_its_pod(rig: Rig) -> None:
    """A claim that is gone from the store while its container runs frees nothing; undone, its devices are free at once."""
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


async def test_gateway_holds_the_new_devices_when_a_claim_is_allocated_anew_between_two_tries(rig: Rig) -> None:
    """The second try prepares what the claim has now, under an operation of its own; what was begun before is undone."""
    rig.plane.prepare_refusal = no("driver-failed", "firmware is loading")
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        rig.plane.prepare_refusal = None
        await rig.plane.store(claim("training", UID, "gpu-2"))
        second = await prepare(rig)

    assert "firmware is loading" in first.error
    assert [claim_device.device for claim_device in second.devices] == ["gpu-2"]
    assert [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()] == [{"gpu": ("gpu-2",)}]
    assert len({request.op_id for request in rig.plane.requests("adopt")}) == 2
    assert [request.devices for request in rig.plane.requests("unprepare")] == [("gpu-0", "gpu-1")]


async def test_gateway_lets_go_of_what_it_does_not_know_when_its_checkpoint_was_moved_away(rig: Rig, checkpoint_path: Path) -> None:
    """An operator who moves the checkpoint away says that no container uses a claim's device: a claim that is gone is not held for ever."""
    async with rig.kubelet:
        async with rig.gateway():
            await prepare(rig)
        await rig.plane.drop("training")
        checkpoint_path.unlink()
        async with rig.gateway():
            released = await rig.plane.wait_for("released")

    assert (released.owner, released.is_undone) == (HOLDER, True)
    assert rig.plane.ledger.allocations == {}


async def test_pod_ends_when_the_device_service_is_away_and_its_devices_stay_held_until_it_is_back(rig: Rig) -> None:
    """Unprepare must end: kubelet is told that it is done, nobody else is given the devices, and the service undoes its part as soon as it answers."""
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([TRAINING])
        await rig.plane.drop("training")
        rig.plane.hung.add("unprepare")
        errors = await rig.kubelet.unprepare_claims([TRAINING])
        during = [str(allocation.owner) for allocation in rig.plane.ledger.allocations.values() if allocation.is_prepared]
        rig.plane.hung.clear()
        await rig.plane.wait_for("released")
        await until_nothing_is_known(rig)

    assert errors == {}
    assert during == ["claim default/training"]
    assert rig.plane.ledger.allocations == {}


async def until_nothing_is_known(rig: Rig) -> None:
    """Wait until the checkpoint has no entry: that is written after the ledger's release."""
    async with asyncio.timeout(10):
        while json.loads(Path(rig.settings.checkpoint_path).read_bytes())["entries"]:  # noqa: ASYNC110  (another task writes the file)
            await asyncio.sleep(0.01)


async def test_gateway_calls_it_success_when_an_unknown_claim_is_unprepared(rig: Rig) -> None:
    """Kubelet may repeat an unprepare for ever: nothing known is nothing to do, and nobody is asked."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        errors = await rig.kubelet.unprepare_claims([ClaimReference(name="never", uid="u-0", drivers=(DRIVER,))])

    assert errors == {}
    assert rig.plane.requests("unprepare") == []


async def test_gateway_keeps_a_claim_whole_when_two_drivers_share_it(rig: Rig) -> None:
    """Each driver prepares its own class; the ledger holds all of the claim, until the last of them has undone its part."""
    await rig.plane.store(claim("both", "u-both", "gpu-0", "nic-1"))
    pod = Pod(name="p", uid="p-1", containers=(Container(name="main"),), claims=(BOTH,))
    async with rig.kubelet, rig.gateway():
        for driver in BOTH.drivers:
            await rig.kubelet.wait_for_driver(driver)
        admitted = await rig.kubelet.admit(pod)
        held = [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()]
        await rig.plane.drop("both")
        errors = await rig.kubelet.remove(pod)

    assert isinstance(admitted, Admission), admitted
    assert [(claim_device.driver, claim_device.device) for claim_device in admitted.claims[0].devices] == [
        (DRIVER, "gpu-0"),
        ("nic.topobus.dev", "nic-1"),
    ]
    assert held == [{"gpu": ("gpu-0",), "nic": ("nic-1",)}]
    assert errors == {}
    assert len(rig.plane.requests("release")) == 1
    assert rig.plane.ledger.allocations == {}


async def test_gateway_prepares_other_claims_when_one_hangs_in_its_driver(rig: Rig) -> None:
    """A hung device service costs its own claim an error within our deadline; a claim of another class is done meanwhile."""
    await rig.plane.store(claim("net", "u-net", "nic-0"))
    rig.plane.hung_devices.add("gpu-0")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        net = ClaimReference(name="net", uid="u-net", drivers=("nic.topobus.dev",))
        await rig.kubelet.wait_for_driver("nic.topobus.dev")
        async with asyncio.timeout(10):
            hung, good = await asyncio.gather(prepare(rig), prepare(rig, net))

    assert "prepare" in hung.error
    assert good.error == ""


async def test_gateway_waits_for_a_device_service_that_restarts_when_a_claim_needs_it(rig: Rig) -> None:
    """Nobody there for a moment is no failed pod: the claim is tried again within kubelet's call, under the same operation."""
    await rig.plane.show("fpga", device("fpga-0", 0))
    await rig.plane.store(claim("late", "u-late", "fpga-0"))
    late = ClaimReference(name="late", uid="u-late", drivers=("fpga.topobus.dev",))
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        preparing = asyncio.create_task(prepare(rig, late))
        await rig.plane.wait_for("adopt", 2)
        await rig.plane.start(classes=("fpga",))
        answer = await preparing

    assert answer.error == ""
    assert len({request.op_id for request in rig.plane.requests("adopt")}) == 1


async def test_claims_go_on_when_nats_is_away_for_a_moment(own_rig: Rig, own_nats_server: NatsServer) -> None:
    """What is prepared is answered without NATS; a new claim waits within kubelet's call and is prepared when NATS is back; health stays as it was."""
    await own_rig.plane.store(claim("net", "u-net", "nic-0"))
    net = ClaimReference(name="net", uid="u-net", drivers=("nic.topobus.dev",))
    patient = msgspec.structs.replace(own_rig.settings.deadlines, claim_retry_s=30.0)
    async with own_rig.kubelet, own_rig.gateway(deadlines=patient):
        await own_rig.kubelet.wait_for_driver("nic.topobus.dev")
        before = await prepare(own_rig)
        await own_nats_server.stop()
        again = await prepare(own_rig)
        waiting = asyncio.create_task(prepare(own_rig, net))
        health = own_rig.kubelet.device_health(DRIVER, NODE, "gpu-0").state
        await own_nats_server.start()
        late = await waiting

    assert again == before
    assert health == "Healthy"
    assert late.error == ""


async def test_gateway_streams_health_when_a_device_gets_sick_and_recovers(rig: Rig) -> None:
    """Kubelet sees a device Unhealthy with the reason, and Healthy again."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Healthy")
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        sick = await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Unhealthy")
        neighbour = rig.kubelet.device_health(DRIVER, NODE, "gpu-1")
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Healthy")

    assert sick.message == "ecc"
    assert neighbour.state == "Healthy"


async def test_gateway_calls_devices_unknown_when_their_service_is_silent(rig: Rig) -> None:
    """Kubelet sees Unknown with the reason at the DRA door, Healthy again with the first answer, and never a change in the device plugin's list."""
    await rig.plane.show("fpga", device("fpga-0", 0))
    clock = ManualClock()
    where = {"node": NODE, "device_class": "fpga"}

    async def never(_request: PrepareRequest) -> PrepareReply:
        raise AssertionError("a sign of life prepares nothing")

    async with rig.kubelet, rig.gateway(silence=SILENCE, clock=clock), clock.ticking(SILENCE.every_s):
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            await rig.kubelet.wait_for_health("fpga.topobus.dev", NODE, "fpga-0", "Healthy")
        silent = await rig.kubelet.wait_for_health("fpga.topobus.dev", NODE, "fpga-0", "Unknown")
        listed = await rig.kubelet.wait_for_resource("topobus.dev/fpga", allocatable=1)
        neighbour = rig.kubelet.device_health(DRIVER, NODE, "gpu-0")
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            await rig.kubelet.wait_for_health("fpga.topobus.dev", NODE, "fpga-0", "Healthy")

    assert silent.message.startswith("service-silent: ")
    assert listed.allocatable == listed.capacity == 1
    assert neighbour.state == "Healthy"


async def test_gateway_repeats_health_without_news_when_time_passes(rig: Rig) -> None:
    """Kubelet turns silence into Unknown after 30 s, so the same list comes again well before; v1 is served as v1alpha1 is."""
    clock = ManualClock()
    async with rig.kubelet, rig.gateway(clock=clock):
        await rig.kubelet.wait_for_driver(DRIVER)
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            stream = aiter(health_rpc.DRAResourceHealthStub(channel).NodeWatchResources(health.NodeWatchResourcesRequest()))
            first = await anext(stream)
            async with clock.ticking(rig.settings.deadlines.health_refresh_s):
                second = await anext(stream)

    assert [device_health.device.device_name for device_health in first.devices] == ["gpu-0", "gpu-1"]
    assert [device_health.health for device_health in second.devices] == [health.HEALTHY, health.HEALTHY]
    assert second.devices[0].last_updated_time > 0


async def test_gateway_serves_its_driver_again_when_its_socket_is_removed(rig: Rig) -> None:
    """A registration socket that somebody deleted comes back, and kubelet registers the driver anew."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        next(rig.kubelet.plugins_registry_dir.glob(f"{DRIVER}-*-reg.sock")).unlink()
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        await rig.kubelet.wait_for_driver(DRIVER)

        again = await prepare(rig)

    assert again.error == ""


async def test_gateway_registers_its_driver_with_a_kubelet_that_restarts(rig: Rig) -> None:
    """Claims go on after kubelet's restart, without a restart of ours."""
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        await rig.kubelet.restart()
        second = await prepare(rig)

    assert first == second


async def test_gateway_fails_the_claim_and_goes_on_when_the_cdi_folder_cannot_be_written(rig: Rig) -> None:
    """A full or broken disk is the claim's error, with the path; readiness tells it before the first claim; mended, the same claim is prepared."""
    rig.cdi_dir.write_text("a file where the folder should be")
    async with rig.kubelet, rig.gateway():
        await rig.readiness.until(lambda report: f"cannot write {rig.cdi_dir}" in report.get("cdi", ""))
        broken = await prepare(rig)
        rig.cdi_dir.unlink()
        mended = await prepare(rig)
        report = rig.readiness.report()

    assert "cannot write" in broken.error
    assert str(rig.cdi_dir) in broken.error
    assert mended.error == ""
    assert report["cdi"] == "ready"


@pytest.mark.parametrize("step", range(1, 4))
async def test_gateway_fails_the_claim_and_goes_on_when_the_disk_is_full_at_a_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Begun, CDI file, done: whichever does not reach the disk is named, nothing half written stays, and with room again the claim goes on or is undone."""
    fsync = os.fsync
    counted = {"calls": 0}

    def sync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            counted["calls"] += 1
            if counted["calls"] == step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        monkeypatch.setattr(cdi_files.os, "fsync", sync)
        full = await prepare(rig)
        monkeypatch.undo()
        left = [path.name for folder in (rig.cdi_dir, Path(rig.settings.checkpoint_path).parent) for path in folder.glob(".*.tmp")]
        again = await prepare(rig)
        await rig.plane.drop("training")
        errors = await rig.kubelet.unprepare_claims([TRAINING])

    assert "cannot write" in full.error
    assert "No space left on device" in full.error
    assert any(name in full.error for name in (rig.settings.checkpoint_path, str(cdi_file(rig))))
    assert left == []
    assert again.error == ""
    assert errors == {}
    assert rig.plane.ledger.allocations == {}
    assert not cdi_file(rig).exists()


@pytest.fixture
def checkpoint_path(rig: Rig) -> Path:
    """The checkpoint's place, its folder made."""
    path = Path(rig.settings.checkpoint_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


async def test_gateway_refuses_to_start_when_the_checkpoint_is_corrupt(rig: Rig, checkpoint_path: Path) -> None:
    """Forgetting what containers use would be worse than not starting: the error names the file and what to do."""
    checkpoint_path.write_text("{broken")
    with pytest.raises(ConfigError) as refused:
        async with rig.gateway() as task:
            await asyncio.wait_for(task, 10)

    assert str(checkpoint_path) in refused.value.message
    assert checkpoint_path.read_text() == "{broken"


@pytest.mark.parametrize(("exposure", "plugins", "drivers"), [("dra", [], [DRIVER]), ("device-plugin", ["topobus.dev/gpu"], [])])
async def test_gateway_opens_only_the_doors_that_are_told(rig: Rig, exposure: Any, plugins: list[str], drivers: list[str]) -> None:
    """Exposure decides a class's doors; the other class shows when all is served."""
    async with rig.kubelet, rig.gateway(exposure={"gpu": exposure}):
        await rig.kubelet.wait_for_resource("topobus.dev/nic", allocatable=2)
        await rig.kubelet.wait_for_driver("nic.topobus.dev")
        if plugins:
            await rig.kubelet.wait_for_resource(plugins[0], allocatable=2)
        for driver in drivers:
            await rig.kubelet.wait_for_driver(driver)

        found = (sorted(rig.kubelet.capacity()), sorted(rig.kubelet.drivers()))

    assert found == (sorted([*plugins, "topobus.dev/nic"]), sorted([*drivers, "nic.topobus.dev"]))


async def test_gateway_keeps_the_checkpoint_readable_when_claims_are_prepared(rig: Rig, checkpoint_path: Path) -> None:
    """The file is versioned JSON that a person can read in an emergency."""
    async with rig.kubelet, rig.gateway():
        await prepare(rig)

    raw = json.loads(checkpoint_path.read_text())
    assert raw["version"] == 1
    assert [(entry["uid"], entry["device_class"], entry["is_prepared"]) for entry in raw["entries"]] == [(UID, "gpu", True)]
