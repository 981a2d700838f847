"""The topology service on the demo node, as tests start and ask it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.alignment_nodes import container, dgx_facts, pod
from support.asking import ask_patiently
from topobus.bus.bus import Bus
from topobus.bus.streams.events import Start
from topobus.formats.messages.catalogue import DECISION, INVENTORY, MACHINE, PLACE
from topobus.formats.messages.messages import (
    DecisionEvent,
    PlaceReply,
    PlaceRequest,
)
from topobus.values.request import PodRequest, Policy

NODE = "demo-node"
TRAINER = pod("trainer", container(cpus=16, gpu=2, nic=2))
SECOND = pod("second", container(gpu=4, fpga=1), policy=Policy.SINGLE_NUMA_NODE)
LIMIT_S = 30.0


@asynccontextmanager
async def topology(url: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One topology process; ends with the block."""
    environment = {
        **os.environ,
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_ALL__NATS__URL": url,
        "TOPOBUS_ALL__LOG__FORMAT": "json",
        **settings,
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "topobus.topology.main", env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), LIMIT_S)


async def publish_node(bus: Bus) -> None:
    """Publish what discovery and the device services would publish of the demo machine."""
    machine, inventories = dgx_facts()
    await bus.put(MACHINE, machine, node=NODE)
    for device_class, inventory in inventories.items():
        await bus.put(INVENTORY, inventory, node=NODE, device_class=device_class)


async def ask_place(bus: Bus, op_id: str, request: PodRequest, *, is_dry_run: bool = False) -> PlaceReply:
    """Place, and wait for a service that is starting."""
    return await ask_patiently(bus, PLACE, PlaceRequest(op_id=op_id, pod=request, is_dry_run=is_dry_run), node=NODE)


async def decisions(bus: Bus, count: int) -> list[DecisionEvent]:
    """The first `count` decision events of the node, as a follower from the beginning gets them."""
    decision_events: list[DecisionEvent] = []
    async with asyncio.timeout(LIMIT_S):
        async for received_event in bus.follow(DECISION, start=Start.ALL, node=NODE):
            decision_events.append(received_event.value)
            if len(decision_events) == count:
                break
    return decision_events


async def no_more_than(bus: Bus, count: int) -> bool:
    """Say whether the stream holds just so many decisions."""
    return len(await bus.last(DECISION, limit=count + 1, node=NODE)) == count
