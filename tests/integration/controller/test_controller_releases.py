"""A node that is frozen delays what it holds itself, and nothing else: neither allocations nor what
other nodes let go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
import pytest_asyncio

from support.alignment_nodes import dgx_facts
from support.controllers import controller
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Change
from topobus.controller.commit import ledger_releases
from topobus.controller.config import ControllerSettings
from topobus.formats.kubernetes import (
    admit,
    ask_deletion,
    object_parts,
    parse_manifest,
)
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, HintsReply, HintsRequest
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NOW = "2026-01-01T00:00:00Z"


class Nodes:
    """Two nodes of eight GPUs, and a user."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]) -> None:
        self.bus = bus
        self.objects = objects
        self.nodes = nodes

    async def apply(self, name: str, node: str, kind: str = "claim") -> None:
        """Store a claim for one GPU of a node, or a pod with one."""
        claim = f"""
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}, annotations: {{topobus.dev/node: {node}}}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: 1}}}}]}}}}
"""
        pod = f"""
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  containers: [{{name: main, resources: {{limits: {{topobus.dev/gpu: 1}}}}}}]
"""
        (api_object,) = parse_manifest(claim if kind == "claim" else pod, where="test.yaml")
        stored = admit(api_object, uid=f"uid-{name}", now=NOW)
        await self.bus.put(catalogue.OBJECT, stored, **object_parts(stored))

    async def until(self, name: str, wanted: str) -> None:
        """Wait until the newest version of an object says this in its status or spec.

        Empty: until it is gone.
        """

        def newest(items: list[Change[ApiObject]]) -> bool:
            api_objects = [item.value for item in items if item.parts.get("name") == name]
            if not api_objects:
                return False
            return (
                api_objects[-1] is None
                if not wanted
                else api_objects[-1] is not None
                and wanted in (api_objects[-1].status.keys() | api_objects[-1].spec.keys())
            )

        await self.objects.until(newest, timeout_s=60)

    async def delete(self, name: str, kind: str = "resourceclaim") -> None:
        """Mark an object for deletion, as the CLI does."""
        parts = {"kind": kind, "namespace": "default", "name": name}
        entry = await self.bus.get(catalogue.OBJECT, **parts)
        assert entry is not None
        marked = ask_deletion(entry.value, now=NOW)
        assert marked is not None
        await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts)

    async def delete_by_force(self, name: str) -> None:
        """Remove a claim past its finalizer: an orphan."""
        await self.bus.delete(catalogue.OBJECT, kind="resourceclaim", namespace="default", name=name)


@pytest_asyncio.fixture
async def nodes(bus: Bus, nats_server: NatsServer, topologies: AsyncExitStack) -> AsyncIterator[Nodes]:
    """The nodes with a controller that would wait half a minute for an answer."""
    made: dict[str, WatchedTopology] = {}

    async def hints(_: HintsRequest) -> HintsReply:
        return HintsReply(hints=None)

    for node in ("n1", "n2"):
        machine, inventories = dgx_facts()
        machine = msgspec.structs.replace(machine, node=node)
        gpus = msgspec.structs.replace(inventories["gpu"], node=node)
        made[node] = await topologies.enter_async_context(real_topology(bus, machine, [gpus]))
        await bus.answer(catalogue.HINT, hints, node=node, device_class="gpu")
    async with (
        Reader(bus.watch(catalogue.OBJECT)) as objects,
        controller(nats_server.url, ControllerSettings(ask_timeout_s=60.0, retry_s=0.2)),
    ):
        yield Nodes(bus, objects, made)


async def test_claims_and_releases_go_on_when_a_node_is_frozen(nodes: Nodes) -> None:
    """Claims, a pod and an orphan of a frozen node wait for it.

    A new claim is allocated and another node's claim let go meanwhile, and at the end all are gone.
    """
    frozen = nodes.nodes["n2"]
    for name in ("a", "b", "c", "orphan"):
        await nodes.apply(name, "n2")
    await nodes.apply("pod", "n2", "pod")
    await nodes.apply("mine", "n1")
    for name in ("a", "b", "c", "orphan", "mine"):
        await nodes.until(name, "allocation")
    await nodes.until("pod", "nodeName")
    thaw = frozen.asks.hold("release")

    await nodes.delete_by_force("orphan")
    for name in ("a", "b", "c"):
        await nodes.delete(name)
    await nodes.delete("pod", "pod")
    await nodes.delete("mine")
    await nodes.until("mine", "")
    await nodes.apply("late", "n1")
    await nodes.until("late", "allocation")

    assert (frozen.asks.requests("released"), bool(frozen.asks.requests("release"))) == ([], True)
    thaw.set()
    for name in ("a", "b", "c", "pod"):
        await nodes.until(name, "")


async def test_a_frozen_node_is_asked_a_bounded_number_of_times_at_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much a frozen node holds, so many asks are under way to it.

    The rest follows when it answers.
    """
    frozen = nodes.nodes["n2"]
    monkeypatch.setattr(ledger_releases, "_PARALLEL_PER_NODE", 3)
    names = [f"c{number}" for number in range(8)]
    for name in names:
        await nodes.apply(name, "n2")
    for name in names:
        await nodes.until(name, "allocation")
    thaw = frozen.asks.hold("release")

    for name in names:
        await nodes.delete(name)
    await nodes.apply("late", "n1")
    await nodes.until("late", "allocation")
    assert 1 <= len(frozen.asks.requests("release")) <= 3
    thaw.set()
    for name in names:
        await nodes.until(name, "")

    assert frozen.ledger.allocations == {}
