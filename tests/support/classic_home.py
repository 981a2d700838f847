"""Two nodes of four GPUs and two NICs on a real bus, a user of the classic API, and controllers,
mortal ones too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec

from lab.memory_nats.fates import Died, Dies, FatedBus, Fates
from support.alignment_nodes import dgx_facts
from support.controllers import ApiUser, beside, runtime_on
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Change, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, HintsReply, HintsRequest
from topobus.process.config import NatsSettings
from topobus.process.service import Runtime
from topobus.values.device import Device, Inventory
from topobus.values.machine import Machine

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2, classic_call_s=2.0)
NODES = ("n1", "n2")
T = TypeVar("T")


class ClassicPlace(ApiUser):
    """The nodes, and a user."""

    def __init__(
        self, bus: Bus, url: str, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]
    ) -> None:
        super().__init__(bus, objects)
        self.url = url
        self.nodes = nodes

    async def change(self, name: str, edit: Callable[[ApiObject], ApiObject]) -> None:
        """Change a claim as somebody else's controller would."""
        parts = {"kind": "resourceclaim", "namespace": "default", "name": name}
        while (entry := await self.bus.get(catalogue.OBJECT, **parts)) is not None:
            if not isinstance(
                await self.bus.compare_and_set(catalogue.OBJECT, edit(entry.value), entry.revision, **parts), Conflict
            ):
                return

    def held(self, node: str) -> dict[str, list[str]]:
        """List what a node's ledger holds: owner (without uid) to devices."""
        allocations = self.nodes[node].ledger.allocations
        return {
            key.rpartition("/")[0]: sorted(
                name for holding in allocation.holdings for names in holding.devices.values() for name in names
            )
            for key, allocation in sorted(allocations.items())
        }

    async def check(self) -> None:
        """Assert that every allocation is in the ledger of its node and nowhere else, and no device
        in two allocations.
        """
        entries = await self.bus.list(catalogue.OBJECT, kind="resourceclaim")
        given: dict[tuple[str, str], str] = {}
        for entry in entries:
            api_object = as_structured(entry.value)
            results = ((api_object.status.get("allocation") or {}).get("devices") or {}).get("results") or []
            for result in results:
                key = (result["pool"], result["device"])
                assert key not in given, f"{key} is {given[key]}'s and {api_object.metadata['name']}'s"
                given[key] = api_object.metadata["name"]
        held = {
            (node, device): owner.rpartition("/")[2]
            for node in self.nodes
            for owner, names in self.held(node).items()
            for device in names
        }
        assert {key: name for key, name in held.items() if name in given.values()} == given


def devices_of(api_object: ApiObject) -> list[str]:
    """Name an allocated claim's devices."""
    return [result["device"] for result in as_structured(api_object).status["allocation"]["devices"]["results"]]


def node_of(api_object: ApiObject) -> str:
    """Name the node of an allocated claim."""
    return str(
        api_object.status["allocation"]["availableOnNodes"]["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    )


async def _no_opinion(_: HintsRequest) -> HintsReply:
    return HintsReply(hints=None)


@asynccontextmanager
async def classic_place(bus: Bus, url: str) -> AsyncIterator[ClassicPlace]:
    """Two nodes, no controller yet."""
    recorded = dgx_facts()
    made: dict[str, tuple[Machine, list[Inventory]]] = {}
    for name in NODES:
        machine: Machine = msgspec.structs.replace(recorded[0], node=name)
        inventories = [
            Inventory(
                node=name,
                device_class="gpu",
                generation=1,
                devices=tuple(
                    Device(
                        name=f"gpu-{index}",
                        device_class="gpu",
                        model="NVIDIA A100-SXM4-40GB" if index < 2 else "NVIDIA H100 80GB HBM3",
                        capacity={"memory": (40 if index < 2 else 80) << 30},
                    )
                    for index in range(4)
                ),
            ),
            Inventory(
                node=name,
                device_class="nic",
                generation=1,
                devices=tuple(Device(name=f"nic-{index}", device_class="nic") for index in range(2)),
            ),
        ]
        for inventory in inventories:
            # A device service without anyone who answers for it counts as silent after a while, and
            # its devices as Unknown.
            await bus.answer(catalogue.HINT, _no_opinion, node=name, device_class=inventory.device_class)
        made[name] = (machine, inventories)
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(real_topology(bus, *what)) for name, what in made.items()}
        objects = await stack.enter_async_context(Reader(bus.watch(catalogue.OBJECT)))
        yield ClassicPlace(bus, url, objects, nodes)


@asynccontextmanager
async def controller(url: str, *, dies_at: int = 0, is_after: bool = False) -> AsyncIterator[FatedBus]:
    """Run one replica. With `dies_at` it dies at that step, and the block continues."""
    async with Bus.session(NatsSettings(url=url), name="controller") as bus:
        mortal = FatedBus(bus, Fates({dies_at: Dies(is_after)}))
        async with beside(_until_dead(runtime_on(mortal))):
            yield mortal


async def _until_dead(runtime: Runtime) -> None:
    try:
        await serve(SETTINGS, runtime)
    except* Died:
        pass
