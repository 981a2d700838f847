"""Decisions of one round and their writes beside it: what is taken, what is given back, on one node
with its real topology.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from lab.memory_nats.fates import Delayed, FatedBus, Fates
from support.controllers import runtime_on
from support.real_topology import WatchedTopology
from support.replica import claims_of, read, start_node, store
from topobus.bus.bus import Bus
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.standalone.allocate_claims import ClaimReconciler
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.testing.clock import ManualClock

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


class _Node:
    """A node of eight GPUs, and a replica's copy of the world."""

    def __init__(self, topology: WatchedTopology, state: StandaloneState) -> None:
        self.topology = topology
        self.state = state

    @classmethod
    async def start(cls, bus: Bus, topologies: AsyncExitStack) -> _Node:
        """Publish the node and run its topology service."""
        topology, state = await start_node(bus, topologies)
        return cls(topology, state)

    def reconciler(self, bus: Bus, turns: ReplicaTurns | None = None) -> ClaimReconciler:
        """Give the replica's reconciler of claims on a bus."""
        runtime, settings = runtime_on(bus), ControllerSettings()
        metrics = ControllerMetrics(runtime.registry)
        allocator = Allocator(settings, runtime, self.state, CelCompiler(), metrics)
        return claims_of(runtime, self.state, allocator, metrics, turns)


def _wanting(name: str, count: int) -> ApiObject:
    return read(
        f"""
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: {count}}}}}]}}}}
"""
    )


async def test_devices_are_anothers_when_their_decision_could_not_be_written(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """A decision's devices are taken at once for whoever is decided on next, and free again when
    its claim went before it was written: who waited gets them.
    """
    node = await _Node.start(bus, topologies)
    all_eight = await store(bus, node.state, _wanting("a", 8))
    single = await store(bus, node.state, _wanting("b", 1))

    async def delete() -> None:
        await bus.delete(OBJECT, **all_eight._asdict())

    overtaken = FatedBus(
        bus,
        Fates(
            lambda step: (
                Delayed(delete) if step.operation == "compare_and_set" and step.parts.get("name") == "a" else None
            )
        ),
    )
    clock = ManualClock()
    reconciler = node.reconciler(overtaken, ReplicaTurns(clock, grace_s=2.0))
    await reconciler.reconcile_all()
    refused = node.state.objects[single].value.status["conditions"][0]["reason"]
    node.state.drop_object(all_eight)
    # The lost write shows another replica, to which claims are left for
    # a moment from the next look on.
    await reconciler.reconcile_all()
    clock.advance(0.5)

    await reconciler.reconcile_all()

    assert refused == "DoesNotFit"
    assert [
        result["device"] for result in node.state.objects[single].value.status["allocation"]["devices"]["results"]
    ] == ["gpu-0"]
    assert [allocation.owner.name for allocation in node.topology.ledger.allocations.values()] == ["b"]


async def test_claims_of_one_round_get_devices_of_their_own_when_all_are_written_beside_it(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """Eight claims are decided on before the first of them is written: no device is decided on
    twice, and no node has to refuse one.
    """
    node = await _Node.start(bus, topologies)
    keys = [await store(bus, node.state, _wanting(f"claim-{number}", 1)) for number in range(8)]

    await node.reconciler(bus).reconcile_all()

    granted = [node.state.objects[key].value.status["allocation"]["devices"]["results"][0]["device"] for key in keys]
    assert granted == [f"gpu-{number}" for number in range(8)]
    assert len(node.topology.ledger.allocations) == 8


async def test_claim_is_left_to_another_replica_for_its_turn_when_one_is_at_work(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """A lost write shows another replica: a claim that nobody has begun waits for this one's turn,
    and is decided on then, whether the other lives or not.
    """
    node = await _Node.start(bus, topologies)
    key = await store(bus, node.state, _wanting("a", 1))
    clock = ManualClock()
    turns = ReplicaTurns(clock, grace_s=2.0)
    turns.see_another()
    reconciler = node.reconciler(bus, turns)
    await reconciler.reconcile_all()
    before = dict(node.state.objects[key].value.status)
    clock.advance(0.5)

    await reconciler.reconcile_all()

    assert before == {}
    assert node.state.objects[key].value.status["allocation"]


async def test_lost_write_shows_another_replica(bus: Bus, topologies: AsyncExitStack) -> None:
    """Whoever lost a compare-and-set leaves the next claims for a moment."""
    node = await _Node.start(bus, topologies)
    key = await store(bus, node.state, _wanting("a", 1))

    async def write_first() -> None:
        await bus.put(OBJECT, _wanting("a", 2), **key._asdict())

    overtaken = FatedBus(bus, Fates(lambda step: Delayed(write_first) if step.operation == "compare_and_set" else None))
    turns = ReplicaTurns(ManualClock(), grace_s=2.0)
    before = turns.wait_s("uid", Stage.PLAN)
    reconciler = node.reconciler(overtaken, turns)

    await reconciler.reconcile_all()

    assert before == 0
    assert turns.wait_s("uid", Stage.FINISH) > 0
