"""An operator works on one device: topology decides, the device service performs, and the decision
stream says who wanted what and why; exactly once, whoever dies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.asking import ask_patiently
from support.topology_node import NODE, TRAINER, ask_place, decisions, no_more_than, publish_node, topology
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OPERATE, PERFORM
from topobus.formats.messages.operation_messages import (
    Operated,
    OperateReply,
    OperateRequest,
    PerformReply,
    PerformRequest,
)
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.health import HEALTHY
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import OwnerKind

pytestmark = pytest.mark.integration

DRIVER_SAYS_NO = Refusal(reasons=(Reason(code="reset-unsupported", message="no way"),))


class _GpuService:
    """Answers `perform` as it is told to, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[PerformRequest] = []
        self.result: Operated | Refusal = Operated(health=HEALTHY)

    async def perform(self, request: PerformRequest) -> PerformReply:
        """Answer."""
        self.asked.append(request)
        return PerformReply(result=self.result)


@asynccontextmanager
async def _gpu_service(url: str) -> AsyncIterator[_GpuService]:
    service = _GpuService()
    async with Bus.session(NatsSettings(url=url), name="gpu") as bus:
        await bus.answer(PERFORM, service.perform, node=NODE, device_class="gpu")
        yield service


async def _operate(
    bus: Bus, verb: DeviceVerb, device: str, op_id: str, *, why: str = "fan", device_class: str = "gpu"
) -> OperateReply:
    operation = DeviceOperation(device_class=device_class, device=device, verb=verb, why=why, who="ada@desk")
    return await ask_patiently(bus, OPERATE, OperateRequest(op_id=op_id, operation=operation), node=NODE)


async def test_decision_event_says_who_and_why_when_a_device_is_maintained(bus: Bus, nats_server: NatsServer) -> None:
    """Asked again it is performed again under the same id, for the first answer may have been lost,
    and decided once.
    """
    await publish_node(bus)
    async with topology(nats_server.url), _gpu_service(nats_server.url) as service:
        name = await _a_gpu(bus)
        first = await _operate(bus, DeviceVerb.MAINTAIN, name, "op-1")
        again = await _operate(bus, DeviceVerb.MAINTAIN, name, "op-1")
        events = await decisions(bus, 3)
        only = await no_more_than(bus, 3)

    assert isinstance(first.result, Operated)
    assert again == first
    assert [request.op_id for request in service.asked] == ["op-1", "op-1"]
    event = events[1]
    assert only
    assert (event.verb, event.id, event.owner.kind, event.owner.name) == (
        "maintain",
        first.decision_id,
        OwnerKind.OPERATOR,
        "ada@desk",
    )
    assert event.operation is not None
    assert (event.operation.device, event.operation.why) == (name, "fan")
    assert event.health is not None


async def _a_gpu(bus: Bus) -> str:
    """Name a GPU that a pod holds from now on: decision number one."""
    placed = await ask_place(bus, "place-1", TRAINER)
    assert isinstance(placed.result, Placement)
    return placed.result.containers[0].devices["gpu"][0]


@pytest.mark.parametrize("op_id", ["op-1", "op-1:outcome"])
async def test_reset_is_refused_with_the_holder_and_nobody_performs_it_when_the_device_is_held(
    bus: Bus, nats_server: NatsServer, op_id: str
) -> None:
    """The refusal is a decision, too, and the same id has the same answer.

    Whatever id it is, also that of another's outcome.
    """
    await publish_node(bus)
    async with topology(nats_server.url), _gpu_service(nats_server.url) as service:
        name = await _a_gpu(bus)
        held = await _operate(bus, DeviceVerb.RESET, name, op_id)
        again = await _operate(bus, DeviceVerb.RESET, name, op_id)
        other = await _operate(bus, DeviceVerb.FORGIVE, name, op_id)
        events = await decisions(bus, 2)

    assert isinstance(held.result, Refusal)
    assert (held.result.reasons[0].code, "trainer" in held.result.reasons[0].message) == ("device-held", True)
    assert again == held
    assert isinstance(other.result, Refusal)
    assert other.result.reasons[0].code == "operation-reused"
    assert service.asked == []
    assert events[1].outcome == held.result


@pytest.mark.parametrize("verb", list(DeviceVerb))
async def test_decision_is_begun_and_its_outcome_done_when_an_operator_is_obeyed(
    bus: Bus, nats_server: NatsServer, verb: DeviceVerb
) -> None:
    """What is wanted is never told as done before the device service has done it, and then as done
    once.
    """
    await publish_node(bus)
    async with topology(nats_server.url), _gpu_service(nats_server.url):
        reply = await _operate(bus, verb, "gpu-0", "op-1")
        events = await decisions(bus, 2)

    assert isinstance(reply.result, Operated)
    assert [(event.op_id, event.is_begun, event.outcome) for event in events] == [
        ("op-1", True, None),
        ("op-1:outcome", False, None),
    ]


async def test_outcome_is_a_second_decision_when_the_device_service_refuses(bus: Bus, nats_server: NatsServer) -> None:
    """Who reads the stream sees that it was wanted, and that nothing came of it."""
    await publish_node(bus)
    async with topology(nats_server.url), _gpu_service(nats_server.url) as service:
        service.result = DRIVER_SAYS_NO
        name = await _a_gpu(bus)
        reply = await _operate(bus, DeviceVerb.FORGIVE, name, "op-1")
        events = await decisions(bus, 3)

    assert reply.result == DRIVER_SAYS_NO
    assert [(event.op_id, event.outcome) for event in events[1:]] == [("op-1", None), ("op-1:outcome", DRIVER_SAYS_NO)]


@pytest.mark.parametrize(
    ("device_class", "device", "code"),
    [("gpu", "gpu-7777", "unknown-device"), ("quantum", "q-0", "unknown-class")],
)
async def test_operation_is_refused_when_nothing_has_that_name(
    bus: Bus, nats_server: NatsServer, device_class: str, device: str, code: str
) -> None:
    """What, where and what there is instead stand in the message."""
    await publish_node(bus)
    async with topology(nats_server.url):
        reply = await _operate(bus, DeviceVerb.MAINTAIN, device, "op-1", device_class=device_class)

    assert isinstance(reply.result, Refusal)
    assert reply.result.reasons[0].code == code
    assert NODE in reply.result.reasons[0].message


async def test_operation_is_no_request_when_it_does_not_say_why(bus: Bus, nats_server: NatsServer) -> None:
    """What lasts needs a reason, for whoever finds it; nothing is written."""
    await publish_node(bus)
    async with topology(nats_server.url):
        with pytest.raises(ContractError, match="why is empty"):
            await _operate(bus, DeviceVerb.MAINTAIN, "gpu-0", "op-1", why="")


async def test_decision_is_announced_once_and_performed_later_when_the_service_was_away_and_topology_restarts(
    bus: Bus, nats_server: NatsServer
) -> None:
    """Nobody there to perform it: the asker is told so, the stream says that it was begun, and the
    same id is performed, and said to be, by a later topology.
    """
    await publish_node(bus)
    async with topology(nats_server.url):
        name = await _a_gpu(bus)
        # From here on somebody answers `operate`: what is not known
        # then is whether it was performed.
        await _operate(bus, DeviceVerb.MAINTAIN, "gpu-7777", "op-0")
        operation = DeviceOperation(device_class="gpu", device=name, verb=DeviceVerb.EXCLUDE, why="fan", who="ada@desk")
        with pytest.raises(PeerUnavailable):
            await bus.ask(OPERATE, OperateRequest(op_id="op-1", operation=operation), node=NODE)
        begun = await decisions(bus, 3)
        is_undone = await no_more_than(bus, 3)
    async with topology(nats_server.url), _gpu_service(nats_server.url) as service:
        later = await _operate(bus, DeviceVerb.EXCLUDE, name, "op-1")
        events = await decisions(bus, 4)
        only = await no_more_than(bus, 4)

    assert isinstance(later.result, Operated)
    assert [request.op_id for request in service.asked] == ["op-1"]
    assert is_undone
    assert events[:3] == begun
    assert [(event.op_id, event.is_begun, event.outcome) for event in events[2:]] == [
        ("op-1", True, None),
        ("op-1:outcome", False, None),
    ]
    assert only
