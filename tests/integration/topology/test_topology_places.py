"""What asks for a place may rely on, of the real topology service and of the one that benchmarks
play.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from lab.played_ledger import PlayedLedger
from support.card_node import CARDS, MACHINE, VIEW
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER, PLACE
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.memory_bus,
    pytest.mark.virtual_time,
    pytest.mark.parametrize("is_real", [True, False], ids=["service", "played"]),
]


async def start(bus: Bus, topologies: AsyncExitStack, *, is_real: bool) -> str:
    """Begin to answer for a node of eight cards; gives its name."""
    if is_real:
        await topologies.enter_async_context(real_topology(bus, MACHINE, [CARDS]))
    else:
        await PlayedLedger(bus, MACHINE.node, lambda: VIEW).start()
    return MACHINE.node


def request(op_id: str, name: str, count: int) -> PlaceRequest:
    """Ask for so many cards."""
    owner = Owner(kind=OwnerKind.POD, namespace="default", name=name, uid=f"uid-{name}")
    containers = (ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=count),)),)
    return PlaceRequest(op_id=op_id, pod=PodRequest(owner=owner, containers=containers))


def devices_of(reply: PlaceReply) -> tuple[str, ...]:
    """Name the devices of a placement."""
    assert isinstance(reply.result, Placement), reply.result
    return tuple(reply.result.containers[0].devices["gpu"])


async def ledger_of(bus: Bus, node: str) -> Ledger:
    """Read the node's ledger from its bucket."""
    entry = await bus.get(LEDGER, node=node)
    return entry.value if entry is not None else Ledger(node=node)


async def test_devices_are_in_the_ledger_when_the_answer_has_come(
    bus: Bus, topologies: AsyncExitStack, *, is_real: bool
) -> None:
    """Whoever is told of a placement finds it written, under the owner that was asked for, at the
    sequence that the answer names.
    """
    node = await start(bus, topologies, is_real=is_real)

    reply = await bus.ask(PLACE, request("op-1", "a", 3), node=node)

    ledger = await ledger_of(bus, node)
    (allocation,) = ledger.allocations.values()
    assert len(devices_of(reply)) == 3
    assert (allocation.owner.name, tuple(allocation.holdings[0].devices["gpu"])) == ("a", devices_of(reply))
    assert (reply.node, reply.ledger_sequence) == (node, ledger.sequence)


async def test_answer_is_the_same_when_an_operation_is_asked_again(
    bus: Bus, topologies: AsyncExitStack, *, is_real: bool
) -> None:
    """A repeated operation takes nothing more and gives the same devices and the same decision,
    also after others were placed.
    """
    node = await start(bus, topologies, is_real=is_real)

    first = await bus.ask(PLACE, request("op-1", "a", 3), node=node)
    other = await bus.ask(PLACE, request("op-2", "b", 2), node=node)
    again = await bus.ask(PLACE, request("op-1", "a", 3), node=node)

    assert (devices_of(again), again.decision_id) == (devices_of(first), first.decision_id)
    assert not set(devices_of(first)) & set(devices_of(other))
    assert len((await ledger_of(bus, node)).allocations) == 2


async def test_pod_is_refused_and_holds_nothing_when_too_few_devices_are_free(
    bus: Bus, topologies: AsyncExitStack, *, is_real: bool
) -> None:
    """What is held is not given twice; a refusal has a reason and leaves the others as they are."""
    node = await start(bus, topologies, is_real=is_real)

    await bus.ask(PLACE, request("op-1", "a", 6), node=node)
    refused = await bus.ask(PLACE, request("op-2", "b", 3), node=node)

    assert isinstance(refused.result, Refusal)
    assert refused.result.reasons[0].code
    assert [allocation.owner.name for allocation in (await ledger_of(bus, node)).allocations.values()] == ["a"]
