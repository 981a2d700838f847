"""What the publisher writes while only some of a pool's classes are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.objects import Cluster, ClusterChange, ClusterChangeKind, Rejected
from topobus.gateway.cluster.slice_publisher import SlicePublisher
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.process.readiness import Readiness
from topobus.values.device import Device, Inventory

pytestmark = pytest.mark.virtual_time

NODE = "n1"


class Server:
    """An API server with a node and the slices of it."""

    def __init__(self, *slices: ApiObject) -> None:
        self.slices = {str(api_object.metadata["name"]): api_object for api_object in slices}
        self._version = 100

    async def get(self, *_: object) -> ApiObject:
        """The node."""
        return ApiObject(api_version="v1", kind="Node", metadata={"name": NODE, "uid": "u"})

    async def create(self, _: object, api_object: ApiObject) -> ApiObject | Rejected:
        """Store a slice under a name of its own."""
        name = f"{api_object.metadata['generateName']}{self._version}"
        return self._store(api_object, {**api_object.metadata, "name": name, "uid": name})

    async def update(self, _: object, api_object: ApiObject) -> ApiObject | Rejected:
        """Replace a slice."""
        return self._store(api_object, api_object.metadata)

    async def delete(self, _: object, name: str, **__: object) -> None:
        """Delete a slice."""
        self.slices.pop(name, None)

    async def watch(self, *_: object, **__: object) -> AsyncGenerator[ClusterChange, None]:
        """Show what is there, and nothing more: the publisher alone writes."""
        yield ClusterChange(kind=ClusterChangeKind.SNAPSHOT, objects=tuple(self.slices.values()))
        await asyncio.Event().wait()

    def shown(self) -> dict[str, list[str]]:
        """What each pool shows."""
        pools: dict[str, list[str]] = {}
        for api_object in self.slices.values():
            names = [device["name"] for device in api_object.spec.get("devices", ())]
            pools.setdefault(api_object.spec["pool"]["name"], []).extend(names)
        return {pool: sorted(names) for pool, names in sorted(pools.items())}

    def _store(self, api_object: ApiObject, metadata: dict[str, Any]) -> ApiObject:
        self._version += 1
        stored = msgspec.structs.replace(api_object, metadata={**metadata, "resourceVersion": str(self._version)})
        self.slices[str(metadata["name"])] = stored
        return stored


def inventory(device_class: str, *names: str) -> Inventory:
    """An inventory."""
    devices = tuple(Device(name=name, device_class=device_class) for name in names)
    return Inventory(node=NODE, device_class=device_class, generation=1, devices=devices)


async def publish(server: Server, *steps: Inventory, but: tuple[str, ...] = ()) -> SlicePublisher:
    """Run a gateway that learns one inventory after the other and offers all classes but some."""
    state = NodeState(cast(Any, SimpleNamespace(is_connected=True)), NODE, lambda name: f"topobus.dev/{name}")
    publisher = SlicePublisher(
        cast(Cluster, server),
        state,
        offers=lambda device_class: device_class not in but,
        shows=lambda device: device,
        is_judged=lambda _: True,
        settings=ClusterSettings(),
        readiness=Readiness(),
        registry=CollectorRegistry(),
    )
    task = asyncio.create_task(publisher.run())
    await asyncio.sleep(5)
    for step in steps:
        state.take_inventory(step.device_class, step)
        await asyncio.sleep(5)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return publisher


async def test_class_keeps_its_devices_when_only_another_one_is_known() -> None:
    """The next gateway hears of the NICs first: their change is written, and the GPUs that the
    server shows stay.
    """
    server = Server()
    await publish(server, inventory("gpu", "gpu-0", "gpu-1"), inventory("nic", "nic-0"), inventory("cpu", "cpu-0"))
    before = server.shown()

    await publish(server, inventory("nic", "nic-0", "nic-1"))

    assert before == {"n1": ["gpu-0", "gpu-1", "nic-0"], "n1/cpu": ["cpu-0"]}
    assert server.shown() == {"n1": ["gpu-0", "gpu-1", "nic-0", "nic-1"], "n1/cpu": ["cpu-0"]}


async def test_class_loses_its_devices_when_its_inventory_says_so() -> None:
    """What is known counts: a class without devices has none, whatever slices showed."""
    server = Server()
    await publish(server, inventory("gpu", "gpu-0"), inventory("nic", "nic-0"))

    await publish(server, inventory("gpu"))

    assert server.shown() == {"n1": ["nic-0"]}


async def test_empty_pool_stays_shown_when_nothing_is_known_yet() -> None:
    """A gateway that starts before any device service takes nothing back: without a slice nobody
    knows that there are no devices.
    """
    server = Server()
    await publish(server, inventory("gpu"))
    before = dict(server.slices)

    await publish(server)

    assert server.shown() == {"n1": []}
    assert server.slices == before


async def test_class_goes_when_it_is_not_offered_any_more() -> None:
    """The others of its pool stay, and a pool without an offered class has no slice."""
    server = Server()
    await publish(server, inventory("gpu", "gpu-0"), inventory("nic", "nic-0"), inventory("cpu", "cpu-0"))

    await publish(server, but=("gpu", "cpu"))

    assert server.shown() == {"n1": ["nic-0"]}


async def test_slice_of_no_pool_of_ours_is_deleted_with_its_devices() -> None:
    """It is nothing that this node's gateway published: its devices are not taken over."""
    server = Server()
    await publish(server, inventory("nic", "nic-0"))
    (ours,) = server.slices.values()
    device = {**ours.spec["devices"][0], "name": "gpu-9"}
    spec = {**ours.spec, "pool": {**ours.spec["pool"], "name": "old"}, "devices": [device]}
    server.slices["001-stray"] = msgspec.structs.replace(ours, spec=spec, metadata={"name": "001-stray", "uid": "x"})

    await publish(server)

    assert server.shown() == {"n1": ["nic-0"]}


@pytest.mark.parametrize("name", ["gpu-9", "nic-0", "gpu-acme--0"])
async def test_devices_that_a_pool_cannot_have_go_when_nothing_else_is_known_of_it(name: str) -> None:
    """A node without a CPU service has no pool of CPUs. Who shows other devices in it offers what no
    claim could be prepared with.
    """
    server = Server()
    await publish(server, inventory("nic", "nic-0"))
    (ours,) = server.slices.values()
    device = {**ours.spec["devices"][0], "name": name}
    spec = {**ours.spec, "pool": {**ours.spec["pool"], "name": "n1/cpu"}, "devices": [device]}
    server.slices["000-stray"] = msgspec.structs.replace(ours, spec=spec, metadata={"name": "000-stray", "uid": "x"})

    await publish(server)

    assert server.shown() == {"n1": ["nic-0"]}
