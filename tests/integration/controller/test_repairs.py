"""Repairs by policy with a real topology and a real device service: the controller asks, and what
was begun is finished, once, whoever dies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import pytest_asyncio
from msgspec import structs

from lab.memory_nats.fates import Dies, Fate, FatedBus, Fates, Interrupted, Step
from support.controllers import SETTINGS, controller
from support.looks import next_look
from support.real_topology import WatchedTopology, topology_service
from topobus.bus.bus import Bus
from topobus.bus.streams.events import Start
from topobus.devicekit.maintenance.maintenance import changed_by, fault_of_expectation, performed, with_operation
from topobus.formats.messages.catalogue import DECISION, INVENTORY, MACHINE, MAINTENANCE, OPERATE, PERFORM, REPAIR
from topobus.formats.messages.messages import AdoptRequest, DecisionEvent, RepairState
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.operation_messages import (
    ClassMaintenance,
    Operated,
    OperateRequest,
    PerformReply,
    PerformRequest,
)
from topobus.formats.messages.release_messages import ReleaseRequest
from topobus.process.config import NatsSettings
from topobus.process.service import Runtime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import LoopClock
from topobus.values.device import Device, Inventory
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal
from topobus.values.repair import REPAIR_POLICY, RepairEnd, RepairPause, RepairPolicy, RepairRuleSettings
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "n1"
_GPU = "gpu-0"
_FAULT = Condition(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="gpu-lost", is_sticky=True)
_STEPS = ("drain", "wait-idle", "reset", "forgive", "wait-healthy", "return")
_RULE = RepairRuleSettings(
    name="lost", device_class="gpu", reasons=("gpu-lost",), steps=_STEPS, hold_s=1.0, within_s=30.0
)
_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u")
_LIMIT_S = 600.0
# Several rounds of a controller, in which nothing may happen.
_LATER_S = 20.0


class _Gpus:
    """The gpu service of a node as far as operations go, without threads: by its own rules, with a
    fault that a reset ends, unless it is beyond that.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.resets: list[str] = []
        self.is_broken = False
        self._faults: tuple[Condition, ...] = ()
        self._stored = ClassMaintenance(node=NODE, device_class="gpu")
        self._generation = 0

    def device(self, name: str = _GPU) -> Device:
        """Give a device as it is published."""
        faults = self._faults if name == _GPU else ()
        health = DeviceHealth(state=HealthState.UNHEALTHY, conditions=faults) if faults else HEALTHY
        return Device(name=name, device_class="gpu", health=health, maintenance=self._stored.devices.get(name))

    async def put_faults(self, *faults: Condition) -> None:
        """Make the GPU sick, or healthy."""
        self._faults = faults
        await self._publish()

    async def perform(self, request: PerformRequest) -> PerformReply:
        """Perform an operation once."""
        operation, earlier = request.operation, performed(self._stored, request.op_id)
        if earlier is not None:
            assert earlier.operation == operation
            return PerformReply(result=earlier.result)
        refusal = fault_of_expectation(self._stored, operation)
        if refusal is not None:
            return PerformReply(result=refusal)
        if operation.verb is DeviceVerb.RESET:
            self.resets.append(operation.device)
        if operation.verb is DeviceVerb.FORGIVE and operation.who == REPAIR_POLICY and not self.is_broken:
            self._faults = ()
        changed = changed_by(self._stored, request)
        result = Operated(health=self.device().health, maintenance=changed.devices.get(operation.device))
        self._stored = with_operation(changed, request, result)
        await self._publish()
        return PerformReply(result=result)

    async def _publish(self) -> None:
        self._generation += 1
        inventory = Inventory(
            node=NODE,
            device_class="gpu",
            generation=self._generation,
            devices=(self.device(_GPU), self.device("gpu-1")),
        )
        await self.bus.put(MAINTENANCE, self._stored, node=NODE, device_class="gpu")
        await self.bus.put(INVENTORY, inventory, node=NODE, device_class="gpu")


class _Rig:
    """A node with its services, and what is seen of repairs there."""

    def __init__(self, bus: Bus, url: str, gpus: _Gpus, topology: WatchedTopology) -> None:
        self.bus = bus
        self.url = url
        self.gpus = gpus
        self.topology = topology

    async def document(self) -> RepairState:
        """Read the document of repairs."""
        entry = await self.bus.get(REPAIR, fleet=CLUSTER)
        return entry.value if entry is not None else RepairState()

    async def until_document(self, is_enough: Callable[[RepairState], bool]) -> RepairState:
        """Wait for a document, and until no decision of it is unpublished."""
        async with asyncio.timeout(_LIMIT_S):
            while not is_enough(document := await self.document()) or document.events:
                await next_look()
        return document

    async def until_ended(self) -> DecisionEvent:
        """Wait for the end of a repair."""
        async with asyncio.timeout(_LIMIT_S):
            async for received in self.bus.follow(DECISION, start=Start.ALL, node=NODE):
                if received.value.repair is not None and received.value.repair.end is not None:
                    return received.value
        raise AssertionError

    async def decisions(self) -> list[DecisionEvent]:
        """List all decisions of the node, oldest first."""
        return [received.value for received in await self.bus.last(DECISION, limit=200, node=NODE)]

    async def person(self, verb: DeviceVerb, op_id: str) -> Operated | Refusal:
        """Do what a person's `topobus device` does."""
        operation = DeviceOperation(device_class="gpu", device=_GPU, verb=verb, why="fan", who="ada")
        async with Bus.session(NatsSettings(url=self.url), name="topobus-cli") as cli:
            return (await cli.ask(OPERATE, OperateRequest(op_id=op_id, operation=operation), node=NODE)).result


@pytest_asyncio.fixture
async def rig(bus: Bus, nats_server: NatsServer) -> AsyncIterator[_Rig]:
    """A node with a sick GPU and a healthy one, no controller yet."""
    machine = Machine(node=NODE, numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),), cpus=())
    url = nats_server.url
    async with (
        Bus.session(NatsSettings(url=url), name="gpu") as gpu_bus,
        Bus.session(NatsSettings(url=url), name="topology") as topology_bus,
    ):
        gpus = _Gpus(gpu_bus)
        await bus.put(MACHINE, machine, node=NODE)
        await gpus.put_faults(_FAULT)
        await gpu_bus.answer(PERFORM, gpus.perform, node=NODE, device_class="gpu")
        async with topology_service(topology_bus, machine) as topology:
            yield _Rig(bus, url, gpus, topology)


def _replica(
    url: str, rule: RepairRuleSettings = _RULE, *, through: Callable[[Bus], Bus] = lambda bus: bus
) -> AbstractAsyncContextManager[Runtime]:
    """Run a controller with one rule, by the time of the test's loop."""
    settings = structs.replace(SETTINGS, repair=RepairPolicy(rules=(rule,)))
    return controller(url, settings, through=through, clock=LoopClock())


@asynccontextmanager
async def _mortal(url: str, number: int, *, is_done: bool) -> AsyncIterator[Fates]:
    """Run a replica that dies before or after one of its steps for a repair."""
    steps = 0

    def choose(step: Step) -> Fate | None:
        nonlocal steps
        is_counted = step.noun in ("repair", "operate", "decision")
        steps += is_counted
        return Dies(is_done) if is_counted and steps == number else None

    fates = Fates(choose, hangs=True)
    async with _replica(url, through=lambda bus: FatedBus(bus, fates)):
        yield fates


async def test_sick_device_is_repaired_and_each_step_is_a_decision_when_a_rule_names_its_fault(rig: _Rig) -> None:
    """It is drained, reset, forgiven, watched and returned; the stream has rule, evidence and ids."""
    async with _replica(rig.url) as runtime:
        end = await rig.until_ended()
        document = await rig.until_document(lambda state: not state.under_way)
        count = runtime.registry.get_sample_value(
            "topobus_controller_repair_seconds_count",
            {"class": "gpu", "reason": "gpu-lost", "outcome": "repaired"},
        )
    device, decisions = rig.gpus.device(), await rig.decisions()

    assert (device.is_allocatable, rig.gpus.resets, count) == (True, [_GPU], 1)
    assert end.repair is not None
    assert (end.repair.end, end.repair.rule, end.repair.codes) == (RepairEnd.REPAIRED, "lost", ("gpu-lost",))
    assert [repair.end for repair in document.repairs] == [RepairEnd.REPAIRED]
    assert [event.repair.what if event.repair else event.verb for event in decisions if not event.is_begun] == [
        "begun",
        "maintain",
        "wait-idle",
        "reset",
        "forgive",
        "wait-healthy",
        "return",
        "repaired",
    ]
    assert decisions[0].health is not None
    assert decisions[0].health.conditions[0].reason == "gpu-lost"
    operations = [event.operation for event in decisions if event.operation is not None]
    assert {operation.who for operation in operations} == {REPAIR_POLICY}
    assert all("rule lost for gpu-lost" in operation.why for operation in operations)


async def test_nothing_is_done_when_no_rule_is_declared(rig: _Rig) -> None:
    """The default observes, and writes nothing."""
    async with controller(rig.url, clock=LoopClock()):
        await LoopClock().sleep(_LATER_S)

    assert rig.gpus.resets == []
    assert rig.gpus.device().maintenance is None
    assert await rig.bus.get(REPAIR, fleet=CLUSTER) is None
    assert await rig.decisions() == []


# On a real server each operation that a dead replica left waits for real.
@pytest.mark.timeout(_LIMIT_S)
@pytest.mark.parametrize("is_done", [False, True])
async def test_repair_is_done_once_when_a_replica_dies_at_each_of_its_steps(rig: _Rig, *, is_done: bool) -> None:
    """Each write, ask and event is cut off before or after it happened; the next life continues."""
    deaths: Counter[str] = Counter()
    ended = asyncio.create_task(rig.until_ended())
    for life in range(60):
        async with _mortal(rig.url, 1 + life % 3, is_done=is_done) as fates:
            dying = asyncio.create_task(fates.died.wait())
            await asyncio.wait({ended, dying}, return_when=asyncio.FIRST_COMPLETED)
            deaths.update([str(fates.steps[-1])] if fates.died.is_set() else [])
            dying.cancel()
        if ended.done():
            break
    async with _replica(rig.url):
        await ended
        await rig.until_document(lambda state: not state.under_way)
    decisions = await rig.decisions()

    assert deaths.total() >= 9
    assert set(deaths) == {"compare_and_set repair", "ask operate", "publish decision"}
    assert rig.gpus.resets == [_GPU]
    assert rig.gpus.device().is_allocatable
    assert set(Counter(event.op_id for event in decisions).values()) == {1}
    assert [event.repair.end for event in decisions if event.repair and event.repair.end] == [RepairEnd.REPAIRED]


async def test_each_step_is_done_once_when_two_replicas_plan_the_same(rig: _Rig) -> None:
    """Both see the fault and both ask; the device service does each operation once."""
    async with _replica(rig.url), _replica(rig.url):
        await rig.until_ended()
        await rig.until_document(lambda state: not state.under_way)
    decisions = await rig.decisions()

    assert rig.gpus.resets == [_GPU]
    assert set(Counter(event.op_id for event in decisions).values()) == {1}
    assert sum(event.repair is not None and event.repair.what == "begun" for event in decisions) == 1


async def test_person_is_called_once_and_device_stays_withheld_when_a_reset_does_not_help(rig: _Rig) -> None:
    """Long after that nothing more was done; a person who forgives it gets another try."""
    rig.gpus.is_broken = True
    async with _replica(rig.url) as runtime:
        end = await rig.until_ended()
        await LoopClock().sleep(_LATER_S)
        left = runtime.registry.get_sample_value("topobus_controller_repairs", {"state": "gave-up"})
        ends = [event.repair.end for event in await rig.decisions() if event.repair and event.repair.end]
        resets, device = list(rig.gpus.resets), rig.gpus.device()
        rig.gpus.is_broken = False
        await rig.person(DeviceVerb.FORGIVE, "person-1")
        await rig.until_document(lambda state: [repair.end for repair in state.repairs] == [RepairEnd.REPAIRED])
    healed = rig.gpus.device()

    assert isinstance(end.outcome, Refusal)
    assert end.outcome.reasons[0].code == "repair-gave-up"
    assert (ends, resets, left) == ([RepairEnd.GAVE_UP], [_GPU], 1)
    assert device.maintenance is not None
    assert device.maintenance.who == REPAIR_POLICY
    assert (healed.is_allocatable, rig.gpus.resets) == (True, [_GPU, _GPU])


@pytest.mark.parametrize("verb", [DeviceVerb.MAINTAIN, DeviceVerb.FORGIVE, DeviceVerb.RETURN])
async def test_repair_ends_and_leaves_the_device_alone_when_a_person_works_on_it(rig: _Rig, verb: DeviceVerb) -> None:
    """While the device is held, the repair waits; the person's decision stands from then on."""
    rule = structs.replace(_RULE, steps=("maintain", "wait-healthy", "return"), within_s=86_400.0)
    async with _replica(rig.url, rule):
        await rig.until_document(lambda state: any(repair.what == "wait-healthy" for repair in state.repairs))
        await rig.person(verb, "person-1")
        end = await rig.until_ended()
        in_force = rig.gpus.device().maintenance
        await rig.gpus.put_faults()
        await LoopClock().sleep(_LATER_S)
        device = rig.gpus.device()

    assert end.repair is not None
    assert (end.repair.end, end.repair.why) == (RepairEnd.TAKEN_OVER, f"ada: {verb}")
    assert device.maintenance == in_force


async def test_operation_is_refused_when_a_person_was_faster_than_the_copies(rig: _Rig) -> None:
    """The device service compares what is in force with what the repair expects."""
    await rig.person(DeviceVerb.EXCLUDE, "person-1")
    operation = DeviceOperation(
        device_class="gpu", device=_GPU, verb=DeviceVerb.RETURN, who=REPAIR_POLICY, expects="r-1.1.0.0"
    )
    async with Bus.session(NatsSettings(url=rig.url), name="controller") as bus:
        result = (await bus.ask(OPERATE, OperateRequest(op_id="r-1.1.1.0", operation=operation), node=NODE)).result
    device = rig.gpus.device()

    assert isinstance(result, Refusal)
    assert (result.reasons[0].code, result.reasons[0].facts["who"]) == ("maintenance-changed", "ada")
    assert device.is_excluded


async def test_repairs_rest_while_they_are_paused(rig: _Rig) -> None:
    """A pause keeps a repair from beginning, and its end lets it begin."""
    pause = RepairPause(who="ada", since_s=0.0)
    await rig.bus.put(REPAIR, RepairState(pause=pause), fleet=CLUSTER)
    async with _replica(rig.url) as runtime:
        await LoopClock().sleep(_LATER_S)
        paused = await rig.document()
        ended = structs.replace(pause, until_s=runtime.clock.now().timestamp())
        await rig.bus.put(REPAIR, structs.replace(paused, pause=ended), fleet=CLUSTER)
        await rig.until_ended()

    assert (paused.repairs, "lost" in paused.policy) == ((), True)
    assert rig.gpus.resets == [_GPU]


async def test_pause_stays_when_it_comes_while_decisions_are_published(rig: _Rig) -> None:
    """The replica drops what it has published from the document as it is by then."""

    async def pause() -> None:
        document = structs.replace(await rig.document(), pause=RepairPause(who="ada", since_s=0.0))
        await rig.bus.put(REPAIR, document, fleet=CLUSTER)
        await LoopClock().sleep(1.0)

    fates = Fates(lambda step: Interrupted(pause) if step.noun == "decision" else None)
    async with _replica(rig.url, through=lambda bus: FatedBus(bus, fates)):
        await rig.until_document(lambda state: state.pause is not None)
        await LoopClock().sleep(_LATER_S)
        later = await rig.document()

    assert later.pause is not None
    assert ([repair.what for repair in later.repairs], rig.gpus.device().maintenance) == (["drain"], None)


async def test_device_is_reset_only_after_its_owner_let_go_when_it_is_held(rig: _Rig) -> None:
    """It is withheld, and waits as long as the pod has it."""
    await rig.topology.hold(
        AdoptRequest(op_id="hold-1", owner=_POD, devices={"gpu": (_GPU,)}),
    )
    rule = structs.replace(_RULE, steps=("maintain", "wait-idle", "reset", "wait-healthy", "return"))
    async with _replica(rig.url, rule):
        waiting = await rig.until_document(lambda state: any(repair.what == "wait-idle" for repair in state.repairs))
        await LoopClock().sleep(_LATER_S)
        resets = list(rig.gpus.resets)
        await rig.topology.let_go(ReleaseRequest(op_id="release-1", owner=_POD))
        end = await rig.until_ended()

    assert (len(waiting.repairs), resets) == (1, [])
    assert end.repair is not None
    assert rig.gpus.resets == [_GPU]
