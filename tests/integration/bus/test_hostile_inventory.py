"""Attacks by what is written on the bus: a credential of one class cannot stop the controller."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from support.alignment_nodes import dgx_facts
from support.asking import ask_patiently
from support.controllers import SETTINGS, beside, runtime_on
from support.reading import Reader
from support.real_topology import topology_service
from support.secured_nats import Attacker, SecuredNats, secured_nats
from topobus.bus.bus import Bus, Change
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet
from topobus.values.outcome import Placement
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = pytest.mark.integration

NODE = "demo-node"
CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev, count: 1}}]}}
"""


class Place:
    """A node, its topology and a user, each under its own credential."""

    def __init__(self, nats: SecuredNats, user: Bus, objects: Reader[Change[ApiObject]], attacker: Attacker) -> None:
        self.nats = nats
        self.user = user
        self.objects = objects
        self.attacker = attacker

    async def publish(self, node: str, device_class: str, inventory: object) -> None:
        """Write an inventory as the attacker: any bytes, past all of our own code."""
        await self.attacker.send(
            f"$KV.{catalogue.INVENTORY.home(device_class=device_class).bucket}.{node}.{device_class}",
            json.dumps(inventory).encode(),
        )
        assert self.attacker.denials == []

    async def plan(self) -> PlanReply:
        """Ask for a pod's place."""
        owner = Owner(kind=OwnerKind.POD, name="p", uid="uid-p")
        request = PodRequest(
            owner=owner,
            containers=(ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=1),)),),
        )
        return await ask_patiently(self.user, catalogue.PLAN, PlanRequest(op_id="op-1", pod=request), node=CLUSTER)

    async def allocated(self) -> list[str]:
        """Store a claim and wait for its devices."""
        (claim,) = parse_manifest(CLAIM, where="test.yaml")
        stored = admit(claim, uid="uid-one", now="2026-01-01T00:00:00Z")
        await self.user.put(catalogue.OBJECT, stored, **object_parts(stored))
        await self.objects.until(
            lambda items: any(item.value is not None and item.value.status.get("allocation") for item in items)
        )
        newest = [item.value for item in self.objects.items if item.value is not None][-1]
        return [result["device"] for result in newest.status["allocation"]["devices"]["results"]]


@asynccontextmanager
async def controller(nats: SecuredNats) -> AsyncIterator[None]:
    """Run the real controller under its own credential.

    It must not have ended when the block does.
    """
    async with nats.bus("controller") as bus, beside(serve(SETTINGS, runtime_on(bus))) as task:
        yield
        assert not task.done()


@pytest_asyncio.fixture
async def place(nats_binary: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """The demo machine with its GPUs under the shipped permissions, and somebody with the gpu
    service's credential.
    """
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(secured_nats(tmp_path, binary=nats_binary))
        buses = {
            name: await stack.enter_async_context(nats.bus(name)) for name in ("discovery", "gpu", "topology", "cli")
        }
        await buses["topology"].provision()
        machine, inventories = dgx_facts()
        await buses["discovery"].put(catalogue.MACHINE, machine, node=NODE)
        await buses["gpu"].put(catalogue.INVENTORY, inventories["gpu"], node=NODE, device_class="gpu")
        await stack.enter_async_context(topology_service(buses["topology"], machine))
        objects = await stack.enter_async_context(Reader(buses["cli"].watch(catalogue.OBJECT)))
        attacker = await stack.enter_async_context(nats.attacker("gpu"))
        yield Place(nats, buses["cli"], objects, attacker)


def bomb(node: str, **fields: object) -> dict[str, object]:
    """Make an inventory of one device with hostile fields."""
    return {
        "node": node,
        "device_class": "gpu",
        "generation": 1,
        "devices": [{"name": "gpu-0", "device_class": "gpu", **fields}],
    }


@pytest.mark.parametrize(
    ("node", "fields"),
    [
        ("ghost-node", {"numa_nodes": "0-1048575"}),
        ("ghost-node", {"cpu": -1}),
        (NODE, {"numa_nodes": "0-1048575"}),
        (NODE, {"numa_nodes": "0-1023", "near_cpus": "0-8191"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{key}={text}" for key, text in value.items()),
)
async def test_controller_serves_when_one_class_publishes_a_hostile_inventory(
    place: Place, node: str, fields: dict[str, object]
) -> None:
    """142 bytes of the gpu service's credential, in the bucket before the controller starts, stop
    neither plans nor claims.
    """
    honest = await place.user.get(catalogue.INVENTORY, node=NODE, device_class="gpu")
    assert honest is not None
    if node == NODE:
        # Beside honest devices, as a faulty plugin of the same service would write it.
        devices = json.loads(encode(honest.value))["devices"]
        await place.publish(
            node,
            "gpu",
            bomb(node, **fields) | {"generation": 2, "devices": [*devices[1:], *bomb(node, **fields)["devices"]]},
        )  # type: ignore[misc]  # JSON
    else:
        await place.publish(node, "gpu", bomb(node, **fields))
    is_readable = node != NODE or "1048575" not in str(fields)

    async with controller(place.nats):
        reply = await place.plan()
        assert reply.chosen is not None
        assert isinstance(reply.chosen.result, Placement)
        if is_readable:
            assert (await place.allocated())[0].startswith("gpu-")


async def test_controller_gives_nobody_a_device_on_a_node_that_the_machine_lacks(place: Place) -> None:
    """A device that names NUMA node 7 of a machine with two is set aside, its neighbours of the
    same inventory are handed out.
    """
    _, inventories = dgx_facts()
    devices = inventories["gpu"].devices
    stray = Device(name="gpu-00", device_class="gpu", numa_nodes=NodeSet(7))
    inventory = Inventory(node=NODE, device_class="gpu", generation=2, devices=(stray, *devices))
    await place.publish(NODE, "gpu", json.loads(encode(inventory)))

    async with controller(place.nats):
        assert await place.allocated() == [devices[0].name]
