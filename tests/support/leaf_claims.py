"""Claims of nodes with servers of their own, in tests: what the hub has of them, what a node has, and a controller's part that says them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from prometheus_client import CollectorRegistry

from support.leaf_pair import NODE
from topobus.contracts.catalogue import NODE_CLAIM, OBJECT
from topobus.contracts.messages import ApiObject
from topobus.controller.reconcilers.say_leaf_claims import LeafClaims
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore, NatsWatch
from topobus.domain.errors import PeerUnavailable
from topobus.runtime.bus import Bus
from topobus.runtime.clock import SystemClock
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime

# Ends only a test that waits for what never comes.
LIMIT_S = 90.0
_PAUSE_S = 0.05


def allocated(name: str, *, node: str = NODE, uid: str = "", device: str = "gpu-0") -> ApiObject:
    """Make a claim that is allocated on a node."""
    results = [{"request": "r", "driver": "gpu.topobus.dev", "pool": node, "device": device}]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": uid or f"uid-{name}"},
        status={"allocation": {"devices": {"results": results}}},
    )


def parts(name: str) -> dict[str, str]:
    """Give the place of a claim in the store."""
    return {"kind": "resourceclaim", "namespace": "default", "name": name}


async def store(hub: Bus, value: ApiObject) -> None:
    """Write a claim at the hub, as a controller that has allocated it."""
    await hub.put(OBJECT, value, **parts(value.metadata["name"]))


async def claims_on(leaf: Bus) -> dict[str, ApiObject]:
    """Read what the node's own server has, by name."""
    return {entry.value.name: entry.value.claim for entry in await leaf.list(NODE_CLAIM, node=NODE)}


async def until_on_node(leaf: Bus, is_enough: Callable[[Mapping[str, ApiObject]], bool]) -> dict[str, ApiObject]:
    """Wait until the node's own server has what a test wants to see."""
    got: dict[str, ApiObject] = {}
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                with suppress(PeerUnavailable):
                    got = await claims_on(leaf)
                    if is_enough(got):
                        return got
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError as err:
        raise AssertionError(f"the node has {sorted(got)}") from err


@asynccontextmanager
async def saying_claims(hub: Bus) -> AsyncIterator[LeafClaims]:
    """Run the controller's part that says claims to nodes, and its copy of the objects, until the block ends."""
    runtime = Runtime(name="controller", node="hub", bus=hub, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry())
    state = StandaloneState()

    def ignore(_: Any = None) -> None:
        pass

    claims = LeafClaims(runtime, state, NatsStore(hub, state), timeout_s=2.0, parallel=4, is_whole=lambda: watch.is_whole)
    watch = NatsWatch(hub, state, runtime.clock, changed=claims.wake, refused=ignore, dropped=ignore, forgotten=ignore)
    tasks = [asyncio.create_task(claims.run()), asyncio.create_task(watch.run())]
    try:
        yield claims
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
