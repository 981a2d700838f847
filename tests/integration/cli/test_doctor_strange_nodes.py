"""`topobus doctor` names the node that speaks another release, has a wrong clock, or wrote what
nobody can read, and finds nothing of the kind at its neighbour.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime, timedelta

import pytest

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import HINT, INVENTORY, MACHINE, PREFER
from topobus.formats.messages.messages import HintsReply, HintsRequest, PreferReply, PreferRequest
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

pytestmark = pytest.mark.integration

STRANGE, GOOD = "strange-node", "good-node"


class EarlyClock(SystemClock):
    """An hour ahead."""

    def now(self) -> datetime:
        """Give the wrong moment."""
        return super().now() + timedelta(hours=1)


async def _never(_request: HintsRequest | PreferRequest) -> HintsReply | PreferReply:
    raise AssertionError("a sign of life asks nothing")


async def _publish(bus: Bus, node: str) -> None:
    machine = Machine(node=node, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=0),), cpus=())
    await bus.put(MACHINE, machine, node=node)
    await bus.put(INVENTORY, Inventory(node=node, device_class="gpu", generation=1), node=node, device_class="gpu")


async def test_doctor_names_the_strange_node_and_not_its_neighbour(nats_server: NatsServer, bus: Bus) -> None:
    """Release by what answers and by what was written, clock by the sign of life, garbage by its
    key with the release that wrote it.
    """
    settings = NatsSettings(url=nats_server.url)
    gpu = await Bus.connect(settings, name="gpu", clock=EarlyClock(), release="9.1.0")
    topology = await Bus.connect(settings, name="topology", clock=EarlyClock(), release="9.1.0")
    good_gpu, good_topology = await Bus.connect(settings, name="gpu"), await Bus.connect(settings, name="topology")
    try:
        await _publish(gpu, STRANGE)
        await _publish(good_gpu, GOOD)
        await gpu._connection.publish(
            f"$KV.topobus_ledgers.{STRANGE}", b'{"node": 7}', headers={"Topobus-Release": "9.1.0"}
        )
        await gpu._connection.barrier()
        for node, of_gpu, of_topology in ((STRANGE, gpu, topology), (GOOD, good_gpu, good_topology)):
            await of_gpu.answer(HINT, _never, node=node, device_class="gpu")
            await of_topology.answer(PREFER, _never, node=node)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "topobus.cli.main",
            "doctor",
            "--json",
            "--nats",
            nats_server.url,
            stdout=asyncio.subprocess.PIPE,
        )
        output = (await process.communicate())[0]
    finally:
        for connected in (gpu, topology, good_gpu, good_topology):
            await connected.close()

    findings: dict[str, list[str]] = {}
    for finding in json.loads(output)["findings"]:
        findings.setdefault(finding["what"], []).append(finding["found"])
    (releases,), (clock,) = findings[f"{STRANGE}: releases"], findings[f"{STRANGE}: clock"]
    assert releases.startswith("discovery, gpu, topology run release 9.1.0, newer than")
    assert " s ahead of " in clock
    assert any("cannot read" in text and "release 9.1.0 wrote it" in text for text in findings[f"{STRANGE}: ledger"])
    assert not findings.keys() & {f"{GOOD}: releases", f"{GOOD}: clock", "clock", "releases"}
    assert not any("cannot read" in text for what, texts in findings.items() if what.startswith(GOOD) for text in texts)
