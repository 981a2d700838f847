"""Plans: a pod is placed at a node that fits and answers, or each node's reasons are told."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
import pytest

from support.controller_home import NODE, Home, claim
from support.real_topology import real_topology
from topobus.formats.messages import catalogue
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.values.device import Inventory
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


def _pod(count: int, name: str = "trainer") -> PodRequest:
    return PodRequest(
        owner=Owner(kind=OwnerKind.POD, name=name, uid=f"uid-{name}"),
        containers=(ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=count),)),),
        policy=Policy.SINGLE_NUMA_NODE,
    )


async def _plan_ready(home: Home) -> None:
    """Wait until a controller answers plans: it does so before it decides on its first claim."""
    await home.put(claim("probe", count=9))
    await home.until_reason("probe", "DoesNotFit")


async def test_plan_commits_at_the_node_and_lists_silent_ones_when_asked(
    served: Home, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """A pod is placed on a node that answers.

    A node that is silent is listed as unknown, not as refusing.
    """
    silent = Machine(node="silent-node", numa_nodes=recorded[0].numa_nodes, cpus=recorded[0].cpus)
    await served.bus.put(catalogue.MACHINE, silent, node="silent-node")
    await _plan_ready(served)

    request = PlanRequest(op_id="op-1", pod=_pod(2))
    reply = await served.bus.ask(catalogue.PLAN, request, node=CLUSTER)
    again = await served.bus.ask(catalogue.PLAN, request, node=CLUSTER)

    assert reply.chosen is not None
    assert reply.chosen.node == NODE
    assert reply.silent_nodes == ("silent-node",)
    assert again.chosen is not None
    assert again.chosen.result == reply.chosen.result
    assert len(served.topology.ledger.allocations) == 1


async def test_plan_chooses_the_same_node_every_time_when_several_fit(
    served: Home, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """Of equally good nodes the first by name gets the pod; when it is full, the next one.

    A dry run holds nothing.
    """
    other = msgspec.structs.replace(recorded[0], node="another-node")
    inventories = [msgspec.structs.replace(inventory, node="another-node") for inventory in recorded[1]]
    topology = await topologies.enter_async_context(real_topology(served.bus, other, inventories))
    await _plan_ready(served)

    async def plan(name: str, *, is_dry_run: bool = False) -> str:
        request = PlanRequest(op_id=f"op-{name}-{is_dry_run}", pod=_pod(4, name), is_dry_run=is_dry_run)
        reply = await served.bus.ask(catalogue.PLAN, request, node=CLUSTER)
        assert [node_answer.node for node_answer in reply.answers] == ["another-node", NODE]
        return reply.chosen.node if reply.chosen is not None else ""

    dry = await plan("a", is_dry_run=True)
    chosen = [await plan(name) for name in ("a", "b", "c")]

    assert dry == "another-node"
    assert chosen == ["another-node", "another-node", NODE]
    assert len(topology.ledger.allocations) == 2


async def test_plan_tells_each_nodes_reasons_when_none_fits(served: Home) -> None:
    """A pod that fits nowhere gets what each node said."""
    await _plan_ready(served)

    reply = await served.bus.ask(catalogue.PLAN, PlanRequest(op_id="op-2", pod=_pod(5)), node=CLUSTER)
    nowhere = await served.bus.ask(
        catalogue.PLAN, PlanRequest(op_id="op-3", pod=_pod(1), node="elsewhere"), node=CLUSTER
    )

    assert reply.chosen is None
    assert [(node_answer.node, type(node_answer.result)) for node_answer in reply.answers] == [(NODE, Refusal)]
    assert isinstance(nowhere.answers[0].result, Refusal)
    assert nowhere.answers[0].result.reasons[0].code == "unknown-node"
