"""Pods that wait for claims, followed over time: what is read again, what one broken pod may not do
to the others, and what is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from topobus.bus.bus import Bus
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.attempts import Attempts
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.cluster.event_recorder import EventRecorder
from topobus.gateway.cluster.objects import ClusterChange, ClusterChangeKind, Kind, Rejected
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.pod_retries import PodRetries
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.testing.clock import LoopClock
from topobus.values.device import Device, Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.health import DeviceHealth, HealthState

pytestmark = pytest.mark.virtual_time

NODE = "n1"


def pod(name: str, kind: ClusterChangeKind = ClusterChangeKind.PUT) -> ClusterChange:
    """Tell of a pod whose one claim bears its name."""
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    spec = {"resourceClaims": [{"name": "own", "resourceClaimName": name}]}
    return ClusterChange(kind=kind, objects=(ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec=spec),))


def claim(name: str, device: str = "") -> ApiObject:
    """Make a claim; without a device it is not allocated."""
    results = [{"request": "gpu", "driver": "topobus.dev", "pool": NODE, "device": device}]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": f"u-claim-{name}"},
        status={"allocation": {"devices": {"results": results}}} if device else {},
    )


class SmallCluster:
    """An API server with pods of one node and their claims, which counts what it is asked."""

    def __init__(self) -> None:
        self.claims: dict[str, ApiObject] = {}
        self.changes: asyncio.Queue[ClusterChange] = asyncio.Queue()
        self.reads: list[str] = []
        self.annotated: list[str] = []
        self.state: NodeState | None = None
        """The node of its pods."""
        self.broken: dict[str, Exception] = {}
        """What is raised when a pod is annotated."""

    async def get(self, kind: Kind, name: str, namespace: str = "") -> ApiObject | None:
        """Read a claim."""
        self.reads.append(name)
        return self.claims.get(name)

    async def annotate(
        self, kind: Kind, name: str, namespace: str, *, uid: str, annotations: Mapping[str, str]
    ) -> Rejected | None:
        """Note which pod was annotated, or break."""
        if name in self.broken:
            raise self.broken[name]
        self.annotated.append(name)
        return None

    async def watch(self, kind: Kind, *, fields: str) -> AsyncGenerator[ClusterChange, None]:
        """Tell of what the test puts into `changes`."""
        while True:
            yield await self.changes.get()


@asynccontextmanager
async def following(cluster: SmallCluster, tmp_path: Path) -> AsyncIterator[PodRetries]:
    """Follow the node's pods until the test has seen enough."""
    bus = cast(Bus, SimpleNamespace(is_connected=True))
    state = NodeState(bus, NODE, lambda device_class: f"topobus.dev/{device_class}")
    devices = tuple(
        Device(name=f"gpu-{name}", device_class="gpu", health=DeviceHealth(state=HealthState.HEALTHY))
        for name in ("0", "a", "b")
    )
    state.take_inventory("gpu", Inventory(node=NODE, device_class="gpu", generation=1, devices=devices))
    cluster.state = state
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.json")
    events = PodEvents(EventRecorder(cast(Any, cluster), LoopClock(), NODE), NODE)
    health = cast(Any, SimpleNamespace(tell=lambda _: {}))
    settings, clock = ClusterSettings(), LoopClock()
    retries = PodRetries(cast(Any, cluster), state, Attempts(), checkpoint, settings, clock, events, health)
    task = asyncio.create_task(retries.run())
    try:
        yield retries
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_claim_is_read_again_when_it_had_no_allocation_at_first(tmp_path: Path) -> None:
    """A pod that was bound by hand: its claim is read every ten seconds until it is allocated, and
    then no more.
    """
    cluster = SmallCluster()
    cluster.claims["a"] = claim("a")
    async with following(cluster, tmp_path):
        cluster.changes.put_nowait(pod("a"))
        await asyncio.sleep(25)
        before = len(cluster.reads)
        cluster.claims["a"] = claim("a", "gpu-0")
        await asyncio.sleep(100)

    assert before == 3
    assert len(cluster.reads) == before + 1
    assert "a" in cluster.annotated


async def test_pods_are_looked_at_when_another_one_breaks_the_look(tmp_path: Path) -> None:
    """What nobody foresaw of one pod ends neither the look nor the gateway."""
    cluster = SmallCluster()
    cluster.claims = {name: claim(name, f"gpu-{name}") for name in ("a", "b")}
    cluster.broken["a"] = ValueError("nobody foresaw this")
    async with following(cluster, tmp_path):
        cluster.changes.put_nowait(pod("a"))
        cluster.changes.put_nowait(pod("b"))
        await asyncio.sleep(60)

    assert set(cluster.annotated) == {"b"}


async def test_failures_are_forgotten_when_their_pods_are_gone(tmp_path: Path) -> None:
    """A node lives for months: what was said of a pod goes with it."""
    cluster = SmallCluster()
    cluster.claims["a"] = claim("a", "gpu-0")
    cluster.broken["a"] = PeerUnavailable("the API server does not answer", next_step="look at it")
    async with following(cluster, tmp_path) as retries:
        cluster.changes.put_nowait(pod("a"))
        await asyncio.sleep(60)
        while_there = set(retries._failed_calls)
        cluster.changes.put_nowait(pod("a", ClusterChangeKind.DELETE))
        await asyncio.sleep(1)
        afterwards = set(retries._failed_calls)

    assert (while_there, afterwards) == ({"u-a"}, set())


async def test_claim_of_a_shape_is_read_again_when_the_machine_gets_the_shape(tmp_path: Path) -> None:
    """Its parts are withheld as soon as they are known: an inventory may come after the pod."""
    cluster = SmallCluster()
    gpus = tuple(Device(name=f"gpu-{number}", device_class="gpu") for number in range(2))
    inventory = Inventory(node=NODE, device_class="gpu", generation=1, devices=gpus)
    cluster.claims["a"] = claim("a", shapes_of([inventory]).devices[-1].name)
    async with following(cluster, tmp_path):
        cluster.changes.put_nowait(pod("a"))
        await asyncio.sleep(1)
        assert cluster.state is not None
        before = cluster.state.withheld("gpu")
        cluster.state.take_inventory("gpu", inventory)
        await asyncio.sleep(1)
        after = cluster.state.withheld("gpu")

    assert (sorted(before), sorted(after)) == ([], ["gpu-0", "gpu-1"])
