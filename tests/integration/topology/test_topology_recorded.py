"""The demo story with every node service as a real process, on the recorded machine: found, placed,
refused with what to free.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, PLACE
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import PodRequest, Policy

pytestmark = pytest.mark.integration

NODE = "demo-node"
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology")
LIMIT_S = 60.0


@pytest_asyncio.fixture
async def node(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Bus]:
    """All services of the node plane that topology needs, on the demo machine, until the four
    inventories are out.
    """
    machine = build("dgx", tmp_path / "machine")
    environment = {
        **os.environ,
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_ALL__NATS__URL": nats_server.url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(machine.root),
        "TOPOBUS_ALL__LOG__FORMAT": "json",
    }
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", f"topobus.{name}.main", env=environment)
        for name in SERVICES
    ]
    try:
        async with asyncio.timeout(LIMIT_S):
            seen: set[str] = set()
            async for change in bus.watch(INVENTORY, node=NODE):
                seen |= {change.value.device_class} if change.value is not None else set()
                if len(seen) == 4:
                    break
        yield bus
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.wait_for(process.wait(), LIMIT_S)


async def ask(bus: Bus, op_id: str, request: PodRequest) -> PlaceReply:
    """Place, and wait for a topology service that is starting, or has not heard all inventories
    yet.
    """
    async with asyncio.timeout(LIMIT_S):
        while True:
            reply = await ask_patiently(
                bus, PLACE, PlaceRequest(op_id=op_id, pod=request, is_dry_run=op_id == "probe"), node=NODE
            )
            if op_id != "probe" or isinstance(reply.result, Placement):
                return reply
            await next_look()


async def test_node_plane_places_and_refuses_as_told_when_the_machine_is_recorded(node: Bus) -> None:
    """16 CPUs, 2 GPUs and 2 NICs land on NUMA node 0, each NIC under a GPU's switch.

    Then 4 GPUs and an FPGA on one node are refused.
    """
    trainer = pod("trainer", container(cpus=16, gpu=2, nic=2))
    await ask(node, "probe", pod("probe", container(cpus=1, gpu=1, nic=1, fpga=1)))

    first = (await ask(node, "op-1", trainer)).result
    second = (await ask(node, "op-2", pod("second", container(gpu=4, fpga=1), policy=Policy.SINGLE_NUMA_NODE))).result

    assert isinstance(first, Placement)
    (placed,) = first.containers
    assert placed.cpus == CpuSet.parse("0-7,112-119")
    assert placed.numa_nodes == NodeSet(0)
    assert next(reason.facts["count"] for reason in placed.reasons if reason.code == "same-switch") == 2
    assert isinstance(second, Refusal)
    assert "no-common-numa-node" in [reason.code for reason in second.reasons]
    assert [reason.facts["owner"] for reason in second.to_free] == [trainer.owner.key]
