"""Claims at kubelet's DRA door in trouble: a failed, hung or absent device service, NATS away, a
disk that is full.

Each goes on or is undone.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from support.dra_claims import TRAINING, UID, cdi_file, prepare
from support.gateway_rig import IMPATIENT, Rig
from support.looks import until
from support.node_plane import NODE, claim, device, no
from topobus.devicekit.containers import cdi_files
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gateway_goes_on_with_the_same_operation_when_a_preparation_failed_halfway(rig: Rig) -> None:
    """A retry continues what was begun: the ledger is asked under the same id, and unprepare undoes
    a half-done claim as well.
    """
    rig.plane.prepare_refusal = no("driver-failed", "firmware is loading")
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
    async with rig.kubelet, rig.gateway():
        rig.plane.prepare_refusal = None
        second = await prepare(rig)

    adopted = [request.op_id for request in rig.plane.asks.requests("adopt")]
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
    assert [request.devices for request in rig.plane.asks.requests("unprepare")] == [("gpu-0", "gpu-1")]


async def test_gateway_holds_the_new_devices_when_a_claim_is_allocated_anew_between_two_tries(rig: Rig) -> None:
    """The second try prepares what the claim has now, under an operation of its own.

    What was begun before is undone.
    """
    await rig.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
    rig.plane.prepare_refusal = no("driver-failed", "firmware is loading")
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        rig.plane.prepare_refusal = None
        await rig.plane.store(claim("training", UID, "gpu-2"))
        second = await prepare(rig)

    assert "firmware is loading" in first.error
    assert [claim_device.device for claim_device in second.devices] == ["gpu-2"]
    assert [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()] == [
        {"gpu": ("gpu-2",)}
    ]
    assert len({request.op_id for request in rig.plane.asks.requests("adopt")}) == 2
    assert [request.devices for request in rig.plane.asks.requests("unprepare")] == [("gpu-0", "gpu-1")]


async def test_pod_ends_when_the_device_service_is_away_and_its_devices_stay_held_until_it_is_back(rig: Rig) -> None:
    """Unprepare must end: kubelet is told that it is done, nobody else is given the devices, and
    the service undoes its part as soon as it answers.
    """
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([TRAINING])
        await rig.plane.drop("training")
        rig.plane.asks.hung.add("unprepare")
        errors = await rig.kubelet.unprepare_claims([TRAINING])
        during = [
            str(allocation.owner) for allocation in rig.plane.ledger.allocations.values() if allocation.is_prepared
        ]
        rig.plane.asks.hung.clear()
        await rig.plane.asks.wait_for("released")
        await until_nothing_is_known(rig)

    assert errors == {}
    assert during == ["claim default/training"]
    assert rig.plane.ledger.allocations == {}


async def until_nothing_is_known(rig: Rig) -> None:
    """Wait until the checkpoint has no entry: that is written after the ledger's release."""
    await until(lambda: not (json.loads(Path(rig.settings.checkpoint_path).read_bytes())["entries"]))


async def test_gateway_prepares_other_claims_when_one_hangs_in_its_driver(rig: Rig) -> None:
    """A hung device service costs its own claim an error within our deadline.

    A claim of another class is done meanwhile.
    """
    await rig.plane.store(claim("net", "u-net", "nic-0"))
    rig.plane.hung_devices.add("gpu-0")
    async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
        net = ClaimReference(name="net", uid="u-net", drivers=(DRIVER,))
        await rig.kubelet.wait_for_driver(DRIVER)
        async with asyncio.timeout(60):
            hung, good = await asyncio.gather(prepare(rig), prepare(rig, net))

    assert "prepare" in hung.error
    assert good.error == ""


async def test_gateway_waits_for_a_device_service_that_restarts_when_a_claim_needs_it(rig: Rig) -> None:
    """Nobody there for a moment is no failed pod: the claim is tried again within kubelet's call,
    under the same operation.
    """
    await rig.plane.show("fpga", device("fpga-0", 0))
    await rig.plane.store(claim("late", "u-late", "fpga-0"))
    late = ClaimReference(name="late", uid="u-late", drivers=(DRIVER,))
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        preparing = asyncio.create_task(prepare(rig, late))
        await rig.plane.asks.wait_for("adopt", 2)
        await rig.plane.answer_for("fpga")
        answer = await preparing

    assert answer.error == ""
    assert len({request.op_id for request in rig.plane.asks.requests("adopt")}) == 1


async def test_claims_go_on_when_nats_is_away_for_a_moment(own_rig: Rig, own_nats_server: NatsServer) -> None:
    """What is prepared is answered without NATS.

    A new claim waits within kubelet's call and is prepared when NATS
    is back; health stays as it was.
    """
    await own_rig.plane.store(claim("net", "u-net", "nic-0"))
    net = ClaimReference(name="net", uid="u-net", drivers=(DRIVER,))
    patient = msgspec.structs.replace(own_rig.settings.deadlines, claim_retry_s=30.0)
    async with own_rig.kubelet, own_rig.gateway(deadlines=patient):
        await own_rig.kubelet.wait_for_driver(DRIVER)
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


async def test_gateway_fails_the_claim_and_goes_on_when_the_cdi_folder_cannot_be_written(rig: Rig) -> None:
    """A full or broken disk is the claim's error, with the path, and counted.

    Readiness tells it before the first claim; mended, the same claim is prepared.
    """
    rig.cdi_dir.write_text("a file where the folder should be")
    async with rig.kubelet, rig.gateway():
        await rig.readiness.until(lambda report: f"cannot write {rig.cdi_dir}" in report.get("cdi", ""))
        broken = await prepare(rig)
        counted = rig.registry.get_sample_value("topobus_gateway_cdi_write_seconds_count", {"outcome": "failed"})
        rig.cdi_dir.unlink()
        mended = await prepare(rig)
        report = rig.readiness.report()

    assert "cannot write" in broken.error
    assert counted == 1
    assert str(rig.cdi_dir) in broken.error
    assert mended.error == ""
    assert report["cdi"] == "ready"


@pytest.mark.parametrize("step", range(1, 4))
async def test_gateway_fails_the_claim_and_goes_on_when_the_disk_is_full_at_a_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Begun, CDI file, done: whichever does not reach the disk is named, nothing half written
    stays, and with room again the claim goes on or is undone.
    """
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
        left = [
            path.name
            for folder in (rig.cdi_dir, Path(rig.settings.checkpoint_path).parent)
            for path in folder.glob(".*.tmp")
        ]
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
