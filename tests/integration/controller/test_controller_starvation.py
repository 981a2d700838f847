"""Claims and pods that cost a long search do not keep plain ones waiting: counted in searches, not
in time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from support.controllers import controller
from support.reading import Reader
from support.real_topology import real_topology
from topobus.bus.bus import Bus, Change
from topobus.controller.commit import node_search
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone import allocate_claims
from topobus.engine.allocation.values import AllocationInput, Outcome
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, HintsReply, HintsRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "n1"
COSTLY = 12


TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
HEAVY = f"{TEN}.all(a, {TEN}.all(b, {TEN}.all(c, a > 0)))"


def costly(name: str) -> str:
    """Write a claim whose selector takes a thousand steps a device, for more devices than there
    are.
    """
    return f"""
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  devices:
    requests: [{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: 20, selectors: [{{cel: {{expression: "{HEAVY}"}}}}]}}}}]
"""  # noqa: E501


PLAIN = """
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: plain}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev, count: 1}}]}}
"""


@pytest_asyncio.fixture
async def objects(bus: Bus, topologies: AsyncExitStack) -> AsyncIterator[Reader[Change[ApiObject]]]:
    """A node with twelve GPUs of a rank each, and what is stored."""
    devices = tuple(Device(name=f"gpu-{rank:02d}", device_class="gpu", attributes={"rank": rank}) for rank in range(12))
    inventory = Inventory(node=NODE, device_class="gpu", generation=1, devices=devices)
    machine = Machine(node=NODE, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=0),), cpus=())
    await topologies.enter_async_context(real_topology(bus, machine, [inventory]))

    async def hints(_: HintsRequest) -> HintsReply:
        return HintsReply(hints=None)

    await bus.answer(catalogue.HINT, hints, node=NODE, device_class="gpu")
    async with Reader(bus.watch(catalogue.OBJECT)) as reader:
        yield reader


async def test_a_plain_claim_that_comes_later_waits_for_one_costly_search_alone(
    bus: Bus, objects: Reader[Change[ApiObject]], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round ends when its budget of steps is spent: a plain claim that comes during the first
    costly search is served before the others are searched.
    """
    full: set[str] = set()
    plain_after: list[int] = []
    has_begun, is_stored = asyncio.Event(), threading.Event()
    loop, real = asyncio.get_running_loop(), node_search.allocate

    def counted(given: AllocationInput, *arguments: Any, **named: Any) -> Outcome:
        name = given.claims[0].name
        if name == "default/plain":
            plain_after.append(len(full))
        elif "is_abandoned" in named and name.startswith("default/costly"):
            full.add(name)
            loop.call_soon_threadsafe(has_begun.set)
            # In a thread of its own: the first one holds on until the plain claim is stored.
            is_stored.wait()
        return real(given, *arguments, **named)

    async def store(manifest: str) -> None:
        for number, parsed in enumerate(parse_manifest(manifest, where="test.yaml")):
            stored = admit(parsed, uid=f"uid-{parsed.metadata['name']}", now=f"2026-01-01T00:00:{number:02d}Z")
            await bus.put(catalogue.OBJECT, stored, **object_parts(stored))

    monkeypatch.setattr(node_search, "allocate", counted)
    monkeypatch.setattr(allocate_claims, "_ROUND_STEPS", 0)
    await store("".join(costly(f"costly-{number}") for number in range(COSTLY)))
    async with controller(nats_server.url, ControllerSettings(ask_timeout_s=30.0, retry_s=0.2, step_budget=3_000)):
        try:
            async with asyncio.timeout(90):
                await has_begun.wait()
            await store(PLAIN)
            await objects.until(lambda items: any(item.parts.get("name") == "plain" for item in items))
        finally:
            is_stored.set()
        await objects.until(
            lambda items: any(
                item.parts.get("name") == "plain"
                and item.value is not None
                and bool(item.value.status.get("allocation"))
                for item in items
            ),
            timeout_s=90,
        )

    assert plain_after[0] < COSTLY / 2


async def test_a_plain_claim_is_allocated_before_costly_ones_are_searched(
    bus: Bus, objects: Reader[Change[ApiObject]], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costly claims are older, and a plain one is served first.

    Afterwards each costly one is told, and none is searched in full twice while nothing is freed.
    """
    full: dict[str, int] = {}
    plain_after: list[int] = []
    real = node_search.allocate

    def counted(given: AllocationInput, *arguments: Any, **named: Any) -> Outcome:
        outcome = real(given, *arguments, **named)
        name = given.claims[0].name
        if "is_abandoned" in named and name.startswith("default/costly"):
            full[name] = full.get(name, 0) + 1
        if name == "default/plain":
            plain_after.append(len(full))
        return outcome

    monkeypatch.setattr(node_search, "allocate", counted)
    # One costly search a round, whatever it takes: what comes in between goes first.
    monkeypatch.setattr(allocate_claims, "_ROUND_STEPS", 0)
    manifest = "".join(costly(f"costly-{number}") for number in range(COSTLY)) + PLAIN
    for number, api_object in enumerate(parse_manifest(manifest, where="test.yaml")):
        stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}", now=f"2026-01-01T00:00:{number:02d}Z")
        await bus.put(catalogue.OBJECT, stored, **object_parts(stored))

    def newest(items: list[Change[ApiObject]], name: str) -> dict[str, Any]:
        api_objects = [item.value for item in items if item.parts.get("name") == name and item.value is not None]
        return api_objects[-1].status if api_objects else {}

    async with controller(nats_server.url, ControllerSettings(ask_timeout_s=30.0, retry_s=0.2, step_budget=3_000)):
        await objects.until(lambda items: bool(newest(items, "plain").get("allocation")))
        await objects.until(
            lambda items: all(newest(items, f"costly-{number}").get("conditions") for number in range(COSTLY)),
            timeout_s=90,
        )

    assert plain_after[0] == 0
    assert set(full) == {f"default/costly-{number}" for number in range(COSTLY)}
    assert max(full.values()) <= 2
