"""Two nodes of four GPUs and two NICs on a real bus, a user of the classic API, and controllers,
mortal ones too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from support.alignment_nodes import dgx_facts
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Change, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import (
    admit,
    ask_deletion,
    object_parts,
    parse_manifest,
)
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, HintsReply, HintsRequest
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.fates import Died, Dies, FatedBus, Fates
from topobus.testing.reading import Reader
from topobus.values.device import Device, Inventory
from topobus.values.machine import Machine

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2, classic_call_s=2.0)
NOW = "2026-01-01T00:00:00Z"
NODES = ("n1", "n2")
T = TypeVar("T")


class ClassicPlace:
    """The nodes, and a user."""

    def __init__(
        self, bus: Bus, url: str, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]
    ) -> None:
        self.bus = bus
        self.url = url
        self.objects = objects
        self.nodes = nodes
        self._made = 0

    async def apply(self, manifest: str) -> None:
        """Store the objects of a manifest as the CLI does."""
        for api_object in parse_manifest(manifest, where="test.yaml"):
            self._made += 1
            stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}-{self._made}", now=NOW)
            await self.bus.compare_and_set(catalogue.OBJECT, stored, 0, **object_parts(api_object))

    def versions(self, kind: str, name: str) -> list[ApiObject | None]:
        """List all versions of an object that the watch brought. A deletion is None."""
        return [
            change.value
            for change in self.objects.items
            if (change.parts.get("kind"), change.parts.get("name")) == (kind, name)
        ]

    async def until(self, kind: str, name: str, is_enough: Callable[[ApiObject | None], bool]) -> ApiObject | None:
        """Wait until the newest version of an object satisfies the test."""

        def is_there(_: object) -> bool:
            versions = self.versions(kind, name)
            return bool(versions) and is_enough(versions[-1])

        await self.objects.until(is_there)
        return self.versions(kind, name)[-1]

    async def allocated(self, name: str) -> ApiObject:
        """Wait until a claim is allocated."""
        claim = await self.until(
            "resourceclaim", name, lambda value: value is not None and bool(value.status.get("allocation"))
        )
        assert claim is not None
        return claim

    async def until_reason(self, name: str, reason: str, kind: str = "resourceclaim") -> str:
        """Wait until an object has a condition with this reason; gives the message."""
        api_object = await self.until(kind, name, lambda value: reason in reasons(value))
        return reasons(api_object)[reason]

    async def scheduled(self, name: str) -> str:
        """Wait until a pod has its node."""
        pod = await self.until("pod", name, lambda value: value is not None and bool(value.spec.get("nodeName")))
        assert pod is not None
        return str(pod.spec["nodeName"])

    async def gone(self, kind: str, name: str) -> None:
        """Wait until an object is deleted."""
        await self.until(kind, name, lambda value: value is None)

    async def claim(self, name: str) -> ApiObject:
        """Read a claim as it is now."""
        entry = await self.bus.get(catalogue.OBJECT, kind="resourceclaim", namespace="default", name=name)
        assert entry is not None
        return entry.value

    async def change(self, name: str, edit: Callable[[ApiObject], ApiObject]) -> None:
        """Change a claim as somebody else's controller would."""
        parts = {"kind": "resourceclaim", "namespace": "default", "name": name}
        while (entry := await self.bus.get(catalogue.OBJECT, **parts)) is not None:
            if not isinstance(
                await self.bus.compare_and_set(catalogue.OBJECT, edit(entry.value), entry.revision, **parts), Conflict
            ):
                return

    async def delete(self, kind: str, name: str) -> None:
        """Delete an object as the CLI does: mark it, or remove it when nothing holds it."""
        parts = {"kind": kind, "namespace": "default", "name": name}
        while (entry := await self.bus.get(catalogue.OBJECT, **parts)) is not None:
            marked = ask_deletion(entry.value, now=NOW)
            if marked is None:
                if isinstance(await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts), Conflict):
                    continue
            elif isinstance(
                await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts), Conflict
            ):
                continue
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


def reasons(api_object: ApiObject | None) -> dict[str, str]:
    """Give the reasons of an object's conditions with their messages."""
    conditions = (api_object.status.get("conditions") if api_object is not None else None) or []
    return {str(condition.get("reason")): str(condition.get("message")) for condition in conditions}


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
        runtime = Runtime(
            name="controller",
            node="central",
            bus=mortal,
            clock=SystemClock(),
            readiness=Readiness(),
            registry=CollectorRegistry(),
        )
        task = asyncio.create_task(_until_dead(runtime))
        try:
            yield mortal
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # checked just before


async def _until_dead(runtime: Runtime) -> None:
    try:
        await serve(SETTINGS, runtime)
    except* Died:
        pass
