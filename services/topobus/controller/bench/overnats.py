"""Measures the whole controller over a NATS server: stored claims become allocated ones, and nodes keep their ledgers.

A figure includes everything from the controller's start on stored objects to the status of the last claim: reading all copies, three confirmed writes
for each claim (attempt, the node's ledger, status), one request and one event. `processor_ms` is the processor time of the controller and of the
benchmark's own watch. One other process (`python -m topobus.controller.bench.overnats URL NODES`) stands for all nodes: it plans and keeps ledgers by
the rules of `topobus.domain`, so it answers as their topology services would. It shares the machine with the controller and the server.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry

from topobus.contracts import catalogue
from topobus.contracts.codec import decode, encode
from topobus.contracts.messages import ApiObject, HintsReply, HintsRequest, PlaceReply, PlaceRequest
from topobus.controller.bench import cases
from topobus.controller.config import ControllerSettings
from topobus.controller.service import serve
from topobus.domain import transitions
from topobus.domain.alignment.planning.node_view import node_view, with_ledger
from topobus.domain.alignment.planning.placement import place
from topobus.domain.device import Device, Inventory
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Cpu, Machine, NumaNode
from topobus.domain.outcome import Placement
from topobus.domain.silence import SilenceSettings
from topobus.domain.view import AlignmentOptions
from topobus.kubernetes.api.objects import object_parts
from topobus.runtime.bus import Bus
from topobus.runtime.clock import SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.simulation.nats_server import NatsServer

__all__ = ["StandInNode", "fill_over_nats"]

_READY = "ready"
_LIMIT_S = 600.0
# The controller asks every device service of every node whether it is there, each second by default: with thousands of nodes that is a load of its own.
_ROLL_CALL_S = 60.0


def fill_over_nats(nodes: int, claims: int) -> dict[str, Any]:
    """Measure one run; claims are for two devices with one constraint."""
    return asyncio.run(_measure(nodes, claims))


async def _measure(nodes: int, claims: int) -> dict[str, Any]:
    async with NatsServer() as server, Bus.session(NatsSettings(url=server.url), name="bench") as bus:
        await bus.provision()
        crowd = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, server.url, str(nodes), stdout=asyncio.subprocess.PIPE)
        try:
            assert crowd.stdout is not None
            async with asyncio.timeout(_LIMIT_S):
                while (await crowd.stdout.readline()).decode().strip() != _READY:
                    pass
            for number in range(claims):
                raw = cases.claim(number)
                raw["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.topobus.dev"
                api_object = decode(encode(raw), ApiObject, where="bench")
                await bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))
            return await _time_controller(bus, server.url, nodes, claims)
        finally:
            crowd.terminate()
            await crowd.wait()


async def _time_controller(bus: Bus, url: str, nodes: int, claims: int) -> dict[str, Any]:
    async with Bus.session(NatsSettings(url=url), name="controller") as own:
        runtime = Runtime(
            name="controller", node="central", bus=own, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry()
        )
        started = time.perf_counter()
        task = asyncio.create_task(
            serve(ControllerSettings(nats=NatsSettings(url=url), silence=SilenceSettings(every_s=_ROLL_CALL_S)), runtime)
        )
        first: float | None = None
        spent = time.process_time()
        done: set[str] = set()
        try:
            async with asyncio.timeout(_LIMIT_S), aclosing(bus.watch(catalogue.OBJECT)) as changes:
                async for change in changes:
                    if change.value is None or change.value.kind != "ResourceClaim" or not change.value.status.get("allocation"):
                        continue
                    if first is None:
                        first, spent = time.perf_counter(), time.process_time()
                    done.add(change.parts["name"])
                    if len(done) == claims:
                        break
        finally:
            task.cancel()
            await asyncio.wait({task})
        ended, spent = time.perf_counter(), time.process_time() - spent
        begun = first or ended
        return {
            "nodes": nodes,
            "claims": claims,
            "claims a second": round((claims - 1) / max(ended - begun, 1e-9)),
            "processor_ms a claim": round(spent * 1000 / max(claims - 1, 1), 3),
            "until the first_s": round(begun - started, 2),
            "all_s": round(ended - started, 2),
        }


class StandInNode:
    """Stands in for the topology service and the gpu service of one node: a machine, eight cards and a ledger that it alone writes.

    Of the asks it answers `place`, for commits and not for dry runs, as the service does (tests/integration/test_topology_places.py runs on both). Five thousand
    real services would keep two watches each and read their ledgers every five seconds, on the machine that measures the controller.
    """

    def __init__(self, bus: Bus, index: int) -> None:
        self._bus = bus
        self.name = cases.node_name(index)
        devices = tuple(
            Device(name=f"card-{card}", device_class="gpu", numa_nodes=NodeSet(card // 4), pcie_root=f"pci0000:{card // 2:02x}")
            for card in range(8)
        )
        self.machine = Machine(
            node=self.name,
            numa_nodes=tuple(NumaNode(id=position, cpus=CpuSet(position), memory_bytes=0) for position in range(2)),
            cpus=tuple(Cpu(id=position, online=True, core=position, numa_node=position, socket=position) for position in range(2)),
        )
        self.inventory = Inventory(node=self.name, device_class="gpu", generation=1, devices=devices)
        self._view = node_view(self.machine, {"gpu": self.inventory}, None, AlignmentOptions(), CpuSet())
        self._ledger = Ledger(node=self.name)

    async def start(self) -> None:
        """Publish what there is and answer from now on."""
        await self._bus.put(catalogue.MACHINE, self.machine, node=self.name)
        await self._bus.put(catalogue.INVENTORY, self.inventory, node=self.name, device_class="gpu")
        await self._bus.answer(catalogue.PLACE, self._place, node=self.name)
        await self._bus.answer(catalogue.HINTS, self._hints, node=self.name, device_class="gpu")

    async def _hints(self, _: HintsRequest) -> HintsReply:
        """Answer for the device service: it is there, and has no opinion of its own."""
        return HintsReply(hints=None)

    async def _place(self, asked: PlaceRequest) -> PlaceReply:
        recorded = transitions.recorded_operation(self._ledger, asked.op_id)
        if recorded is not None:
            result = transitions.placed_by(self._ledger, recorded)
            return PlaceReply(decision_id=recorded.decision_id, node=self.name, result=result, ledger_sequence=self._ledger.sequence)
        result = place(with_ledger(self._view, self._ledger), asked.pod)
        if isinstance(result, Placement):
            step = transitions.reserve(self._ledger, op_id=asked.op_id, request=asked.pod, placement=result, decision_id=asked.op_id)
            self._ledger = step.ledger
            await self._bus.put(catalogue.LEDGER, self._ledger, node=self.name)
        return PlaceReply(decision_id=asked.op_id, node=self.name, result=result, ledger_sequence=self._ledger.sequence)


async def _crowd(url: str, nodes: int) -> None:
    async with Bus.session(NatsSettings(url=url), name="crowd") as bus:
        crowd = [StandInNode(bus, index) for index in range(nodes)]
        for start in range(0, nodes, 100):
            await asyncio.gather(*(node.start() for node in crowd[start : start + 100]))
        print(_READY, flush=True)  # noqa: T201 - the bench waits for this line
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_crowd(sys.argv[1], int(sys.argv[2])))
