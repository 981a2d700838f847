"""A plan asks the nodes that can place something, and tells of the silent ones in one line."""

from __future__ import annotations

import structlog
from prometheus_client import CollectorRegistry

from lab.memory_nats.memory_bus import Fates, MemoryBus, MemoryNats
from topobus.bus.bus import Bus
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.planner import Planner
from topobus.controller.state.standalone_state import StandaloneState
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.clock import ManualClock
from topobus.values.device import Inventory
from topobus.values.machine import Machine
from topobus.values.request import ContainerRequest, Owner, OwnerKind, PodRequest

POD = PodRequest(owner=Owner(kind=OwnerKind.POD, name="p", uid="u"), containers=(ContainerRequest(name="main"),))


def planner(state: StandaloneState, bus: Bus) -> Planner:
    """Make a planner on that bus."""
    registry = CollectorRegistry()
    runtime = Runtime(
        name="controller", node="c", bus=bus, clock=ManualClock(), readiness=Readiness(), registry=registry
    )
    return Planner(ControllerSettings(), runtime, state, ControllerMetrics(registry), lambda: True)


async def test_plan_asks_no_node_that_has_published_nothing_but_an_inventory() -> None:
    """Two thousand inventories of nodes that nobody discovered cost a plan nothing."""
    state, fates = StandaloneState(), Fates()
    for number in range(2000):
        state.put_inventory(Inventory(node=f"ghost-{number}", device_class="gpu", generation=1))
    for node in ("n1", "n2"):
        state.put_machine(Machine(node=node, numa_nodes=(), cpus=()))

    async with MemoryBus.session(MemoryNats(), name="controller", fates=fates) as bus:
        reply = await planner(state, bus).plan(PlanRequest(op_id="op-1", pod=POD))

    assert sorted(step.parts["node"] for step in fates.steps) == ["n1", "n2"]
    assert reply.silent_nodes == ("n1", "n2")


async def test_plan_tells_of_all_silent_nodes_in_one_line() -> None:
    """However many nodes are silent, the log has one line with their
    number and the first of them.
    """
    state = StandaloneState()
    for number in range(200):
        state.put_machine(Machine(node=f"n{number:03d}", numa_nodes=(), cpus=()))

    async with MemoryBus.session(MemoryNats(), name="controller") as bus:
        with structlog.testing.capture_logs() as lines:
            await planner(state, bus).plan(PlanRequest(op_id="op-1", pod=POD))

    silent = [line for line in lines if line["event"] == "nodes.silent"]
    assert [(line["count"], len(line["nodes"])) for line in silent] == [(200, 16)]
