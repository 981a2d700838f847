"""What a driver is told of the owners of a shared device: how much each has, who else has it, and
who is the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.toy_driver import ToyDriver
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.edits import ContainerEdits
from topobus.values.request import Owner, OwnerKind

GPU = Device(
    name="gpu-acme-0",
    device_class="gpu",
    driver="acme",
    allows_multiple=True,
    capacity={"shares": 4},
    sharing=DeviceSharing(replicas=4),
)
SHARE = {"gpu-acme-0": {"shares": 1}}


def plugin(uid: str) -> Owner:
    """An owner behind kubelet's device plugin."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid=uid)


CLAIM = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")


class Watcher(ToyDriver):
    """A driver that changes nothing and remembers what it was told.

    It notes each owner's share in the journal.
    """

    def __init__(self) -> None:
        super().__init__("acme", count=1)
        self.told: list[tuple[str, str, dict[str, int], list[str]]] = []

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits]:
        """Note the owner's share as a step."""
        for device in devices:
            self._note("prepare", context, device)
            context.records[device.name].intend("share", dict(context.shares.get(device.name, {})))
        return {device.name: ContainerEdits() for device in devices}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Take the step out."""
        for device in devices:
            self._note("unprepare", context, device)
            context.records[device.name].undone("share")

    def _note(self, verb: str, context: PrepareContext, device: Device) -> None:
        others = [
            f"{other.owner.uid}:{other.steps[0].before['shares']}"
            for other in context.others.get(device.name, ())
            if other.owner
        ]
        self.told.append((verb, context.owner.uid, dict(context.shares.get(device.name, {})), others))


class Bench:
    """A preparer over one shared device; a new one over the same folder is the next life."""

    def __init__(self, root: Path) -> None:
        self.driver = Watcher()
        clock = ManualClock()
        self.journal = Journal(root / "journal")
        isolated = {"acme": IsolatedDriver(self.driver, timeout_s=5.0, clock=clock)}
        tree = Tree(HardwareSettings(root=str(root)))
        devices = {GPU.name: GPU}
        self.hands = DeviceHands(isolated, tree, devices.get, self.journal, clock=clock, wait_s=5.0)
        self.preparer = Preparer("gpu", self.hands, devices.get)

    async def prepare(self, owner: Owner) -> None:
        """Make the device ready for one share."""
        reply = await self.preparer.prepare(
            PrepareRequest(op_id=f"p-{owner.uid}", owner=owner, devices=("gpu-acme-0",), shares=SHARE)
        )
        assert isinstance(reply.result, Prepared)

    async def unprepare(self, owner: Owner) -> None:
        """Undo it for one owner."""
        reply = await self.preparer.unprepare(
            UnprepareRequest(op_id=f"u-{owner.uid}", owner=owner, devices=("gpu-acme-0",))
        )
        assert reply.refusal is None

    @property
    def owners(self) -> list[str]:
        """Who has the device, as the journal says."""
        entry = self.journal.entries.get("gpu-acme-0")
        return [owner.owner.uid for owner in (entry.owners if entry is not None else ())]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One shared device, and nobody has it."""
    return Bench(tmp_path)


async def test_prepare_tells_a_driver_the_share_and_who_else_has_one(bench: Bench) -> None:
    """Each owner's amounts come with its prepare, kubelet's replicas and claims alike.

    The others stand beside with what the journal has of them.
    """
    for owner in (plugin("r0"), CLAIM):
        await bench.prepare(owner)
    for owner in (plugin("r0"), CLAIM):
        await bench.unprepare(owner)

    assert bench.driver.told == [
        ("prepare", "r0", {"shares": 1}, []),
        ("prepare", "u1", {"shares": 1}, ["r0:1"]),
        ("unprepare", "r0", {}, ["u1:1"]),
        ("unprepare", "u1", {}, []),
    ]


async def test_prepare_keeps_every_owner_of_a_shared_device_in_the_journal(tmp_path: Path) -> None:
    """A new process knows them all, kubelet's allocations among them, so that the last one who
    leaves is the last one.
    """
    bench = Bench(tmp_path)
    for owner in (plugin("r0"), plugin("r1"), CLAIM):
        await bench.prepare(owner)
    bench.journal.close()

    later = Bench(tmp_path)
    later.journal.load()
    await later.unprepare(plugin("r0"))

    assert later.owners == ["u1", "r1"]
    assert later.driver.told == [("unprepare", "r0", {}, ["u1:1", "r1:1"])]
    later.journal.close()
