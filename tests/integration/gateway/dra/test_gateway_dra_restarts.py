"""What a gateway knows of claims when it starts: the checkpoint on disk, a CDI folder that a reboot
emptied, devices that a reboot numbered anew.
"""

# ruff: noqa: ASYNC240  (a test may read a small file)

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.dra_claims import HOLDER, TRAINING, UID, cdi_file, prepare
from support.gateway_rig import Rig
from topobus.formats.containers.cdi import parse
from topobus.gateway import boot
from topobus.sysfs.boot import BOOT_ID_FILE
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.dra_names import DRIVER
from topobus.values.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gateway_writes_files_again_and_removes_orphans_when_started_after_a_reboot(rig: Rig) -> None:
    """A reboot empties the CDI folder: it is whole again before kubelet is served, and files
    without a claim are gone.
    """
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
    assert len(rig.plane.asks.requests("adopt")) == 1


async def test_pod_ends_when_a_gateway_that_was_taken_off_is_there_again(rig: Rig) -> None:
    """Without the driver kubelet cannot undo a claim, and its pod stays; the next gateway undoes it,
    and nothing is left.
    """
    async with rig.kubelet:
        async with rig.gateway():
            await prepare(rig)
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        without = await rig.kubelet.unprepare_claims([TRAINING])
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            again = await rig.kubelet.unprepare_claims([TRAINING])

    assert without.keys() == {UID}
    assert again == {}
    assert not cdi_file(rig).exists()


async def test_gateway_makes_devices_ready_again_when_the_machine_was_rebooted(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reboot undoes what a driver did and numbers devices anew: kubelet's next prepare gets what
    is true now, the ledger still knows the claim.
    """
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
        nodes = [
            node.path
            for cdi_device in parse(cdi_file(rig).read_bytes()).devices
            for node in cdi_device.edits.device_nodes
        ]
        asked = [request.op_id for request in rig.plane.asks.requests("prepare")]
        await prepare(rig)

    assert before == again == after
    assert nodes == ["/dev/gpu-7", "/dev/gpu-1"]
    assert len(asked) == len(set(asked)) == 2
    assert len(rig.plane.asks.requests("prepare")) == 2
    assert len(rig.plane.ledger.allocations) == 1


async def test_gateway_lets_go_of_what_it_does_not_know_when_its_checkpoint_was_moved_away(
    rig: Rig, checkpoint_path: Path
) -> None:
    """An operator who moves the checkpoint away says that no container uses a claim's device: a
    claim that is gone is not held for ever.
    """
    async with rig.kubelet:
        async with rig.gateway():
            await prepare(rig)
        await rig.plane.drop("training")
        checkpoint_path.unlink()
        async with rig.gateway():
            released = await rig.plane.asks.wait_for("released")

    assert (released.owner, released.is_undone) == (HOLDER, True)
    assert rig.plane.ledger.allocations == {}


async def test_gateway_lets_go_of_what_was_undone_when_topology_begins_from_an_older_ledger(rig: Rig) -> None:
    """A copy of the ledger has a claim as prepared that was undone and is gone since: the running
    gateway says so, and its devices are free.
    """
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        older = rig.plane.ledger
        await rig.plane.drop("training")
        await rig.kubelet.unprepare_claims([TRAINING])
        await rig.plane.asks.wait_for("released")
        await rig.plane.begin_from(older)
        await rig.plane.asks.wait_for("released", count=2)

    assert older.allocations[HOLDER.key].is_prepared
    assert rig.plane.ledger.allocations == {}


async def test_gateway_refuses_to_start_when_the_checkpoint_is_corrupt(rig: Rig, checkpoint_path: Path) -> None:
    """Forgetting what containers use would be worse than not starting: the error names the file and
    what to do.
    """
    checkpoint_path.write_text("{broken")
    with pytest.raises(ConfigError) as refused:
        async with rig.gateway() as task:
            await asyncio.wait_for(task, 60)

    assert str(checkpoint_path) in refused.value.message
    assert checkpoint_path.read_text() == "{broken"


async def test_gateway_keeps_the_checkpoint_readable_when_claims_are_prepared(rig: Rig, checkpoint_path: Path) -> None:
    """The file is versioned JSON that a person can read in an emergency."""
    async with rig.kubelet, rig.gateway():
        await prepare(rig)

    raw = json.loads(checkpoint_path.read_text())
    assert raw["version"] == 1
    assert [(entry["uid"], entry["device_class"], entry["is_prepared"]) for entry in raw["entries"]] == [
        (UID, "gpu", True)
    ]
