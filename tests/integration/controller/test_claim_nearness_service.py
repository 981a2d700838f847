"""Claims with wishes on a real server, with the recorded machine and the real topology service:
placed near, or told why not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.reading import Reader
from support.real_topology import real_topology
from support.runtimes import runtime_of
from topobus.bus.bus import Bus, Change
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.topology.config import AlignmentSettings
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "demo-node"
NEAR = Path(__file__).parents[3] / "examples" / "claims" / "gpu-nic-near.yaml"


def example(name: str = "gpu-nic-near", **fields: str) -> ApiObject:
    """The example claim, with other wishes when there are any."""
    (api_object,) = parse_manifest(NEAR.read_text(encoding="utf-8"), where=NEAR.name)
    spec: dict[str, Any] = msgspec.to_builtins(api_object.spec)
    if fields:
        kept = {"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters"}
        spec["devices"]["config"][0]["opaque"]["parameters"] = {**kept, **fields}
    return admit(
        msgspec.structs.replace(api_object, spec=spec, metadata={"name": name}),
        uid=f"uid-{name}",
        now="2026-01-01T00:00:00Z",
    )


class Node:
    """The recorded machine on the bus, with what the claims and the ledger come to."""

    def __init__(
        self,
        bus: Bus,
        objects: Reader[Change[ApiObject]],
        ledgers: Reader[Change[Ledger]],
        inventories: list[Inventory],
    ) -> None:
        self.bus = bus
        self.objects = objects
        self.ledgers = ledgers
        self.switches = {device.name: device.pcie_switch for inventory in inventories for device in inventory.devices}

    async def apply(self, api_object: ApiObject) -> None:
        """Store a claim as the CLI does."""
        await self.bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))

    async def devices(self, name: str) -> list[str]:
        """Wait until a claim is allocated; gives its devices."""
        api_object = await self._until(name, "Allocated", "")
        return [result["device"] for result in api_object.status["allocation"]["devices"]["results"]]

    async def until_reason(self, name: str, reason: str, part: str) -> str:
        """Wait until the condition of a claim has this reason and says this; gives the message."""
        return str((await self._until(name, reason, part)).status["conditions"][0]["message"])

    async def _until(self, name: str, reason: str, part: str) -> ApiObject:
        def newest(items: list[Change[ApiObject]]) -> ApiObject | None:
            api_objects = [
                change.value for change in items if change.parts.get("name") == name and change.value is not None
            ]
            conditions: list[dict[str, Any]] = api_objects[-1].status.get("conditions", []) if api_objects else []
            return (
                api_objects[-1]
                if any(condition["reason"] == reason and part in condition["message"] for condition in conditions)
                else None
            )

        api_object = newest(await self.objects.until(lambda items: newest(items) is not None))
        assert api_object is not None
        return api_object


@asynccontextmanager
async def node(
    bus: Bus, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]], alignment: AlignmentSettings
) -> AsyncIterator[Node]:
    """Serve the recorded machine with a controller and the topology service."""
    machine, inventories = recorded
    async with (
        real_topology(bus, machine, inventories, alignment=alignment),
        Bus.session(NatsSettings(url=nats_server.url), name="controller") as central_bus,
        Reader(bus.watch(catalogue.OBJECT)) as objects,
        Reader(bus.watch(catalogue.LEDGER)) as ledgers,
    ):
        controller = asyncio.create_task(
            serve(ControllerSettings(ask_timeout_s=30.0, retry_s=0.2), runtime_of("controller", "central", central_bus))
        )
        try:
            yield Node(bus, objects, ledgers, inventories)
        finally:
            controller.cancel()
            await asyncio.wait({controller})


async def test_claim_is_placed_under_one_switch_or_told_why_when_it_wishes_so(
    bus: Bus, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """The example gets a GPU and a NIC of one switch, held at the node.

    What cannot be kept is told with its places, what is malformed with its path.
    """
    async with node(bus, nats_server, recorded, AlignmentSettings()) as there:
        await there.apply(example())
        devices = await there.devices("gpu-nic-near")
        await there.apply(example("malformed", locality="hard:swich"))
        malformed = await there.until_reason("malformed", "Malformed", "swich")
        await there.apply(example("impossible", locality="hard:link"))
        impossible = await there.until_reason("impossible", "DoesNotFit", "hard:link")
        await there.apply(example("strict", policy="single-numa-node", scope="pod", locality="hard:numa, soft:switch"))
        strict = await there.devices("strict")

        held = [set(change.value.allocations) for change in there.ledgers.items if change.value is not None]

    for pair in (devices, strict):
        assert len({there.switches[device] for device in pair}) == 1
        assert there.switches[pair[0]] is not None
    assert set(devices).isdisjoint(strict)
    assert "spec.devices.config[0].opaque: parameters.locality is 'hard:swich'" in malformed
    assert impossible
    assert {"claim/default/gpu-nic-near/uid-gpu-nic-near", "claim/default/strict/uid-strict"} <= held[-1]


async def test_claim_is_told_that_the_node_forbids_wishes_when_it_does(
    bus: Bus, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """A node that allows no policy but its own turns the wish away by name, and still serves a
    claim without one.
    """
    async with node(bus, nats_server, recorded, AlignmentSettings(allow_request_policy=False)) as there:
        await there.apply(example())
        message = await there.until_reason("gpu-nic-near", "DoesNotFit", "this node allows no locality but its own")
        await there.apply(example("plain", policy="none"))
        plain = await there.devices("plain")

    assert "asks for locality hard:switch, and this node allows no locality but its own" in message
    assert len(plain) == 2
