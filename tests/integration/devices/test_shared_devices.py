"""Shared devices end to end on the device side: a real device service with the setting, what it
publishes, and what its driver is told of each owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from support.device_bench import DeviceBench
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.sharing.shared_devices import SharedPool
from topobus.formats.messages.catalogue import PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.process.config import NatsSettings
from topobus.sysfs.tree import Tree
from topobus.values.counters import CapacityPolicy
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.edits import ContainerEdits
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

POOL = SharedPool(name="gpu-shared", where=(Condition(field="name", equals="gpu-acme-0"),), replicas=4)


class Watcher(ToyDriver):
    """A driver that knows nothing of sharing, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("acme", count=2)
        self.told: list[tuple[str, str, dict[str, int], list[str]]] = []

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits]:
        """Note what is told."""
        self._note("prepare", devices, context)
        return {device.name: ContainerEdits() for device in devices}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Note what is told."""
        self._note("unprepare", devices, context)

    def _note(self, verb: str, devices: Sequence[Device], context: PrepareContext) -> None:
        for device in devices:
            others = [other.owner.uid for other in context.others.get(device.name, ()) if other.owner is not None]
            self.told.append((verb, context.owner.uid, dict(context.shares.get(device.name, {})), others))


async def test_device_service_shares_what_its_operator_names(bench: DeviceBench) -> None:
    """The inventory has the device in its pool with shares, its neighbour as before.

    The driver hears of every owner, from a claim to a replica.
    """
    driver = Watcher()
    await bench.publish_machine()
    replica = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid="r0")
    claim = Owner(kind=OwnerKind.CLAIM, name="c", uid="c0")
    async with (
        bench.service(driver, sharing=(POOL,)),
        Bus.session(NatsSettings(url=bench.url), name="gateway") as gateway,
    ):
        inventory = await bench.inventory(lambda it: len(it.devices) == 2)
        for owner in (replica, claim):
            request = PrepareRequest(
                op_id=f"p-{owner.uid}", owner=owner, devices=("gpu-acme-0",), shares={"gpu-acme-0": {"shares": 1}}
            )
            reply = await gateway.ask(PREPARE, request, node=inventory.node, device_class="gpu")
            assert isinstance(reply.result, Prepared)
        for owner in (replica, claim):
            undone = UnprepareRequest(op_id=f"u-{owner.uid}", owner=owner, devices=("gpu-acme-0",))
            assert (await gateway.ask(UNPREPARE, undone, node=inventory.node, device_class="gpu")).refusal is None

    shared, whole = inventory.devices
    assert (shared.pool, shared.sharing, shared.allows_multiple) == ("gpu-shared", DeviceSharing(replicas=4), True)
    assert shared.capacity["shares"] == 4
    assert shared.capacity_policies["shares"] == CapacityPolicy(default=1, minimum=1, step=1)
    assert (whole.pool, whole.sharing, whole.allows_multiple) == ("", None, False)
    assert driver.told == [
        ("prepare", "r0", {"shares": 1}, []),
        ("prepare", "c0", {"shares": 1}, ["r0"]),
        ("unprepare", "r0", {}, ["c0"]),
        ("unprepare", "c0", {}, []),
    ]
