"""A plan asked again while the controller's copy of the ledgers is behind: the node's word counts,
and the pod stays in one place.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
import pytest

from support.alignment_nodes import container, dgx_facts, pod
from support.controllers import runtime_on
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.planner import Planner
from topobus.controller.state.standalone_state import StandaloneState
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceRequest
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.values.outcome import Placement

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

TRAINER = pod("trainer", container(gpu=2))


async def test_plan_stays_with_the_node_that_holds_the_pod_when_the_ledgers_have_not_been_heard_yet(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """The answer of a plan was lost after its node had placed the pod: asked again at once, no
    second node gets it, and the answer is the lost one.
    """
    machine, inventories = dgx_facts()
    state = StandaloneState()
    nodes: dict[str, WatchedTopology] = {}
    for name in ("a-node", "b-node"):
        there = [msgspec.structs.replace(inventory, node=name) for inventory in inventories.values()]
        state.put_machine(msgspec.structs.replace(machine, node=name))
        nodes[name] = await topologies.enter_async_context(
            real_topology(bus, msgspec.structs.replace(machine, node=name), there)
        )
    lost = await bus.ask(catalogue.PLACE, PlaceRequest(op_id="op-1", pod=TRAINER), node="b-node")
    runtime = runtime_on(bus)
    planner = Planner(ControllerSettings(), runtime, state, ControllerMetrics(runtime.registry), lambda: True)

    again = await planner.plan(PlanRequest(op_id="op-1", pod=TRAINER))

    assert again.chosen is not None
    assert (again.chosen.node, again.chosen.result) == ("b-node", lost.result)
    assert isinstance(lost.result, Placement)
    assert nodes["a-node"].ledger.allocations == {}
    assert list(nodes["b-node"].ledger.allocations) == [TRAINER.owner.key]
