"""What a container gets through the host's hands when it is made, on cards that are folders.

Time is virtual.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.hands_bench import OWNER, HandsBench
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.verbs.attach import Adjuster
from topobus.formats.messages.adjust_messages import Adjusted, AdjustReply, AdjustRequest
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.folder_driver import FolderDriver
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import ContainerName

MAIN = ContainerName(namespace="default", pod="app", pod_uid="p1", name="main")


class _Full(FolderDriver):
    """Has no slot for another container."""

    def adjust(
        self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName
    ) -> ContainerEdits | Refusal:
        return Refusal(reasons=(Reason(code="no-slot", message=f"no slot for {container}"),))


class _Broken(FolderDriver):
    """Cannot say anything."""

    def adjust(
        self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName
    ) -> ContainerEdits | Refusal:
        raise HardwareError("the card does not answer")


async def adjust(bench: HandsBench, *names: str) -> AdjustReply:
    """Ask for one container."""
    return await Adjuster("nic", bench.hands).adjust(
        AdjustRequest(op_id="", owner=OWNER, devices=names, container=MAIN)
    )


async def test_each_device_has_its_edits_and_nothing_is_written_when_a_container_is_made(tmp_path: Path) -> None:
    """Asked again it is the same answer, and no journal comes of it."""
    bench = HandsBench(tmp_path)
    async with bench.life():
        first, again = await adjust(bench, "nic-card-0", "nic-card-1"), await adjust(bench, "nic-card-0", "nic-card-1")

    edits = {f"nic-card-{number}": ContainerEdits(env={f"CARD_USER_NIC_CARD_{number}": "main"}) for number in (0, 1)}
    assert first == again == AdjustReply(result=Adjusted(edits=edits))
    assert bench.journal_of("nic-card-0") is None


@pytest.mark.parametrize(
    ("driver", "name", "code"),
    [
        (_Full(), "nic-card-0", "no-slot"),
        (_Broken(), "nic-card-0", "driver-failed"),
        (FolderDriver(), "nic-card-7", "device-unknown"),
    ],
)
async def test_container_is_refused_with_the_reason(tmp_path: Path, driver: FolderDriver, name: str, code: str) -> None:
    """A driver's own refusal, its failure and a device that nobody has are three reasons."""
    bench = HandsBench(tmp_path, driver=driver)
    async with bench.life():
        reply = await adjust(bench, name)

    assert isinstance(reply.result, Refusal)
    assert [reason.code for reason in reply.result.reasons] == [code]


@pytest.mark.parametrize(
    ("kind", "looked_at", "wanted"),
    [(OwnerKind.CLAIM, (), ("nic-card-0",)), (OwnerKind.CLAIM, ("nic-card-0",), ()), (OwnerKind.DEVICE_PLUGIN, (), ())],
)
async def test_prepare_says_which_devices_adjust_their_containers(
    tmp_path: Path, kind: OwnerKind, looked_at: Sequence[str], wanted: Sequence[str]
) -> None:
    """Only for claims, whose containers can be kept from starting without it, and not for who only
    looks.
    """
    bench = HandsBench(tmp_path)
    owner = Owner(kind=kind, name="x", uid="u9")
    async with bench.life():
        reply = await bench.preparer.prepare(
            PrepareRequest(op_id="", owner=owner, devices=("nic-card-0",), looked_at=tuple(looked_at))
        )

    assert isinstance(reply.result, Prepared)
    assert reply.result.to_adjust == wanted
