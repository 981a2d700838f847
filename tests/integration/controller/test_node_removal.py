"""What stands of a node that is gone is removed from every bucket when an operator says so, and
nothing of a node that lives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from integration.values import health, inventory
from lab.memory_nats.fates import Interrupted, Refused, Step, Unconfirmed
from lab.memory_nats.memory_bus import FatedBus, Fates
from support.account_nats import account_nats
from support.asking import ask_patiently
from support.controller_home import NODE, Home
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.controller.node_removal import NodeRemoval
from topobus.formats.messages.catalogue import (
    ALIGNMENT,
    DISAGREEMENT,
    FORGET,
    HEALTH,
    HINT,
    INVENTORY,
    LEDGER,
    LINK,
    MACHINE,
    MAINTENANCE,
    RELAY,
)
from topobus.formats.messages.forget_messages import ForgetReply, ForgetRequest, KeyOutcome
from topobus.formats.messages.messages import DisagreementEvent, HintsReply, HintsRequest
from topobus.formats.messages.nouns import CLUSTER, State
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.formats.messages.relay_messages import LinkRequest, NodeRelay
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Machine, NumaNode
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = [pytest.mark.integration]

_GONE = "n1"
_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u1")
_HELD = Ledger(
    node=_GONE, allocations={_POD.key: Allocation(owner=_POD, holdings=(Holding(devices={"gpu": ("gpu-0",)}),))}
)
_KEPT_BACK = ClassMaintenance(
    node=_GONE,
    device_class="gpu",
    devices={"gpu-0": Maintenance(verb=DeviceVerb.EXCLUDE, why="ECC errors", who="root@vm")},
)


def _machine(node: str = _GONE) -> Machine:
    return Machine(node=node, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=1),), cpus=())


def _values(node: str = _GONE, ledger: Ledger | None = None) -> list[tuple[State[Any], str, Any, dict[str, str]]]:
    """Give a value of each state of a node: state, who writes it, value and the rest of its key."""
    return [
        (MACHINE, "discovery", _machine(node), {}),
        (INVENTORY, "gpu", inventory(1, node=node), {"device_class": "gpu"}),
        (INVENTORY, "gateway", inventory(1, node=node, device_class="npu"), {"device_class": "npu"}),
        (ALIGNMENT, "topology", NodeAlignment(node=node), {}),
        (MAINTENANCE, "gpu", ClassMaintenance(node=node, device_class="gpu"), {"device_class": "gpu"}),
        (LEDGER, "topology", ledger or Ledger(node=node), {}),
    ]


async def _fill(bus: Bus, node: str = _GONE, ledger: Ledger | None = None) -> None:
    for state, _, value, rest in _values(node, ledger):
        await bus.put(state, value, node=node, **rest)


async def _stands(bus: Bus, node: str = _GONE) -> set[str]:
    states: Sequence[State[Any]] = (MACHINE, INVENTORY, ALIGNMENT, MAINTENANCE, LEDGER, RELAY)
    return {state.name for state in states if await bus.keys(state, node=node)}


async def _forget(own: Bus, **options: bool) -> ForgetReply:
    return await NodeRemoval(own, SystemClock()).forget(ForgetRequest(node=_GONE, **options))


def _codes(reply: ForgetReply) -> list[str]:
    return [reason.code for reason in reply.refusal.reasons] if reply.refusal is not None else []


@pytest_asyncio.fixture
async def own(bus: Bus, nats_server: NatsServer) -> AsyncIterator[Bus]:
    """The controller's connection."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="controller") as controller:
        yield controller


@pytest.mark.memory_bus
async def test_forget_removes_every_key_of_a_node_and_of_no_other_when_it_is_gone(bus: Bus, own: Bus) -> None:
    """Of each bucket what names the node; its devices' present state ends.

    A second time there is nothing.
    """
    await _fill(bus)
    await bus.put(RELAY, NodeRelay(node=_GONE), node=_GONE)
    # As a relay wrote it at a hub: a class with a bucket of its own, in the common one.
    common: State[Any] = State(**{**vars(INVENTORY), "classes_apart": ()})
    await bus.put(common, inventory(1, device_class="nic"), node=_GONE, device_class="nic")
    await bus.publish(HEALTH, health(1), event_id="h-1", node=_GONE, device_class="gpu", device="gpu-0")
    seen = DisagreementEvent(
        node=_GONE, device_class="gpu", device="gpu-0", kubelet="a", ledger="b", time="2026-01-01T00:00:00Z"
    )
    await bus.publish(DISAGREEMENT, seen, event_id="d-1", node=_GONE, device_class="gpu", device="gpu-0")
    await _fill(bus, "n10")

    dry = await _forget(own, is_dry_run=True)
    before = await _stands(bus)
    reply = await _forget(own)
    again = await _forget(own)

    assert before == {"machine", "inventory", "alignment", "maintenance", "ledger", "relay"}
    assert {key.outcome for key in dry.keys} == {KeyOutcome.PRESENT}
    assert [(key.bucket, key.key, key.outcome) for key in reply.keys] == [
        (key.bucket, key.key, KeyOutcome.REMOVED) for key in dry.keys
    ]
    assert (reply.keys[0].bucket, reply.keys[-1].bucket, len(reply.keys)) == ("topobus_machines", "topobus_ledgers", 8)
    assert reply.events == {"TOPOBUS_HEALTH": 1, "TOPOBUS_DISAGREEMENTS": 1}
    assert await _stands(bus) == set()
    assert (again.keys, again.events, again.refusal) == ((), {"TOPOBUS_HEALTH": 0, "TOPOBUS_DISAGREEMENTS": 0}, None)
    assert await _stands(bus, "n10") == {"machine", "inventory", "alignment", "maintenance", "ledger"}
    (last,) = await bus.present(HEALTH, node=_GONE)
    assert (last.value.is_removed, last.value.generation) == (True, 2)


@pytest.mark.memory_bus
@pytest.mark.parametrize("is_forced", [False, True])
async def test_forget_is_refused_when_a_service_of_the_node_answers(bus: Bus, own: Bus, is_forced: bool) -> None:
    """A node that lives would write it all anew, and its ledger is what keeps devices from being
    given twice: no word of an operator changes that.
    """

    async def answer(_: HintsRequest) -> HintsReply:
        return HintsReply(hints=None)

    await _fill(bus)
    await bus.answer(HINT, answer, node=_GONE, device_class="npu")

    reply = await _forget(own, is_forced=is_forced)

    assert _codes(reply) == ["node-alive"]
    assert "npu" in reply.refusal.reasons[0].message if reply.refusal else False
    assert await _stands(bus) == {"machine", "inventory", "alignment", "maintenance", "ledger"}


@pytest.mark.memory_bus
async def test_forget_is_refused_when_the_relay_of_the_node_answers(bus: Bus, own: Bus) -> None:
    """What its node's own server has it would say to the hub anew, when all other services are
    gone.
    """

    async def answer(_: LinkRequest) -> NodeRelay:
        return NodeRelay(node=_GONE)

    await _fill(bus)
    await bus.answer(LINK, answer, node=_GONE)

    reply = await _forget(own, is_forced=True)

    assert _codes(reply) == ["node-alive"]
    assert "relay answers there" in reply.refusal.reasons[0].message if reply.refusal else False
    assert await _stands(bus) == {"machine", "inventory", "alignment", "maintenance", "ledger"}


@pytest.mark.memory_bus
async def test_forget_is_refused_with_what_would_be_lost_until_it_is_forced(bus: Bus, own: Bus) -> None:
    """Who holds something there, and which devices an operator keeps back, is named; with force it
    goes.
    """
    await _fill(bus, ledger=_HELD)
    await bus.put(MAINTENANCE, _KEPT_BACK, node=_GONE, device_class="gpu")

    reply = await _forget(own)
    dry = await _forget(own, is_dry_run=True)
    stood = await _stands(bus)
    forced = await _forget(own, is_forced=True)

    assert _codes(reply) == _codes(dry) == ["node-holds", "node-keeps-back"]
    assert reply.refusal is not None
    assert "pod default/trainer" in reply.refusal.reasons[0].message
    assert "gpu-0" in reply.refusal.reasons[1].message
    assert "ledger" in stood
    assert forced.refusal is None
    assert await _stands(bus) == set()


@pytest.mark.memory_bus
async def test_forget_leaves_what_a_service_writes_anew_meanwhile(bus: Bus, own: Bus) -> None:
    """By revision: the newer value stays, what comes after it is not touched, the ledger least of
    all.

    The answer says so.
    """
    await _fill(bus)

    async def write_anew() -> None:
        await bus.put(INVENTORY, inventory(2), node=_GONE, device_class="gpu")

    def choose(step: Step) -> Interrupted | None:
        return Interrupted(write_anew) if step.noun == "machine" else None

    reply = await _forget(FatedBus(own, Fates(choose, counted=frozenset({"compare_and_delete"}))))
    entry = await bus.get(INVENTORY, node=_GONE, device_class="gpu")

    assert entry is not None
    assert entry.value.generation == 2
    outcomes = {(key.bucket, key.key): key.outcome for key in reply.keys}
    assert outcomes["topobus_machines", "n1"] is KeyOutcome.REMOVED
    assert outcomes["topobus_inventories_gpu", "n1.gpu"] is KeyOutcome.KEPT
    assert outcomes["topobus_ledgers", "n1"] is KeyOutcome.KEPT
    assert await bus.get(LEDGER, node=_GONE) is not None


@pytest.mark.memory_bus
@pytest.mark.parametrize("is_done", [True, False])
async def test_forget_says_unknown_and_goes_on_the_next_time_when_a_deletion_is_not_confirmed(
    bus: Bus, own: Bus, is_done: bool
) -> None:
    """A write that timed out may have happened or not; asked again it removes what is there."""
    await _fill(bus)
    fates = Fates({2: Unconfirmed(is_done=is_done)}, counted=frozenset({"compare_and_delete"}))

    reply = await _forget(FatedBus(own, fates))
    again = await _forget(own)

    assert [key.outcome for key in reply.keys[:3]] == [KeyOutcome.REMOVED, KeyOutcome.UNKNOWN, KeyOutcome.KEPT]
    assert {key.outcome for key in again.keys} == {KeyOutcome.REMOVED}
    assert await _stands(bus) == set()


@pytest.mark.memory_bus
async def test_forget_keeps_what_it_could_not_delete_when_nats_is_away(bus: Bus, own: Bus) -> None:
    """A deletion that surely was not done is told as such."""
    await _fill(bus)

    reply = await _forget(FatedBus(own, Fates({1: Refused()}, counted=frozenset({"compare_and_delete"}))))

    assert {key.outcome for key in reply.keys} == {KeyOutcome.KEPT}
    assert "no connection" in reply.keys[0].why


@pytest.mark.memory_bus
async def test_forget_removes_what_nobody_can_read(bus: Bus, own: Bus) -> None:
    """Garbage at a key of a ghost goes as any other value does."""
    await bus._connection.request("$KV.topobus_inventories_gpu.n1.gpu", b"x", timeout_s=30.0)

    reply = await _forget(own)

    assert [(key.key, key.outcome) for key in reply.keys] == [("n1.gpu", KeyOutcome.REMOVED)]
    assert await _stands(bus) == set()


@pytest.mark.memory_bus
async def test_controller_forgets_a_ghost_and_refuses_its_own_node_when_it_is_asked(served: Home) -> None:
    """As it runs: a node that is none is removed, and the node whose topology answers is not."""
    await _fill(served.bus)

    gone = await ask_patiently(served.bus, FORGET, ForgetRequest(node=_GONE), node=CLUSTER)
    alive = await served.bus.ask(FORGET, ForgetRequest(node=NODE, is_forced=True), node=CLUSTER)

    assert {key.outcome for key in gone.keys} == {KeyOutcome.REMOVED}
    assert _codes(alive) == ["node-alive"]
    assert await served.bus.get(LEDGER, node=NODE) is not None


async def test_controller_has_the_rights_to_forget_and_others_have_not_when_the_server_has_accounts(
    nats_binary: Path,
) -> None:
    """Each key is written by its own service's login, and removed by the controller's."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as nats, nats.bus("controller") as controller:
        await controller.provision()
        for state, writer, value, rest in _values():
            async with nats.bus(writer) as service:
                await service.put(state, value, node=_GONE, **rest)
        async with nats.bus("gpu") as gpu:
            await gpu.publish(HEALTH, health(1), event_id="h-1", node=_GONE, device_class="gpu", device="gpu-0")

        reply = await NodeRemoval(controller, SystemClock()).forget(ForgetRequest(node=_GONE))

        assert {key.outcome for key in reply.keys} == {KeyOutcome.REMOVED}
        assert len(reply.keys) == len(_values())
        assert await _stands(controller) == set()
        (last,) = await controller.present(HEALTH, node=_GONE)
        assert last.value.is_removed
