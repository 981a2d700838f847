"""Who may work on a device, on a real server with accounts: the operator's user, and the controller
by a policy of the operator's.

A vendor, a subscriber, a node's other processes and another node are not heard.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.account_nats import account_nats
from topobus.bus.connection.reply_inbox import new_token
from topobus.bus.server_config.inboxes import connection_name, inbox_branch
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.formats.messages.catalogue import OPERATE, PERFORM
from topobus.formats.messages.codec import encode
from topobus.formats.messages.operation_messages import (
    Operated,
    OperateReply,
    OperateRequest,
    PerformReply,
    PerformRequest,
)
from topobus.values.health import HEALTHY
from topobus.values.maintenance import DeviceOperation, DeviceVerb

pytestmark = pytest.mark.integration

OPERATION = DeviceOperation(device_class="gpu", device="gpu-0", verb=DeviceVerb.RESET, who="mallory")
DONE = Operated(health=HEALTHY)
# Who has a credential and is no operator: vendors of this node and of another, a subscriber, other
# processes of this node, topology of another.
OUTSIDERS = ("gpu-n1", "nic-n1", "gpu-n2", "user", "gateway-n1", "discovery-n1", "topology-n2", "controller")


async def test_operator_alone_is_heard_when_others_ask_to_work_on_a_device(nats_binary: Path) -> None:
    """What outsiders send at both subjects, under any reply that they may choose, reaches no
    handler.

    The asks of CLI, controller and topology do.
    """
    described = accounts(Shape.CENTRAL, nodes=["n1", "n2"])
    handled: list[str] = []

    async def operate(request: OperateRequest) -> OperateReply:
        handled.append(f"operate by {request.operation.who}")
        return OperateReply(decision_id="d-1", node="n1", result=DONE)

    async def perform(request: PerformRequest) -> PerformReply:
        handled.append(f"perform by {request.operation.who}")
        return PerformReply(result=DONE)

    asked = OperateRequest(op_id="op-1", operation=OPERATION)
    performed = PerformRequest(op_id="op-1", operation=OPERATION, time="")
    async with account_nats(described, binary=nats_binary) as nats, AsyncExitStack() as stack:
        async with nats.bus("controller") as controller:
            await controller.provision()
        topology = await stack.enter_async_context(nats.bus("topology-n1"))
        gpu = await stack.enter_async_context(nats.bus("gpu-n1"))
        await topology.answer(OPERATE, operate, node="n1")
        await gpu.answer(PERFORM, perform, node="n1", device_class="gpu")
        for name in OUTSIDERS:
            async with nats.client(name) as outsider:
                principal = connection_name(nats.users[name].principal)
                for ask, request, answerer in (
                    (OPERATE, asked, "topology"),
                    (PERFORM, performed, "gpu"),
                ):
                    if (name, ask) in (("gpu-n1", PERFORM), ("controller", OPERATE)):
                        # It would ask itself; the other may.
                        continue
                    subject = f"topobus.v1.{ask.name}.n1" + (".gpu" if ask is PERFORM else "")
                    for asker in sorted({principal, "topobus-cli", "topology"}):
                        await outsider.send(
                            subject, encode(request), reply=f"{inbox_branch(asker, answerer)}.{new_token()}"
                        )
        before = list(handled)
        async with nats.bus("cli") as cli:
            answer = await cli.ask(OPERATE, OperateRequest(op_id="op-2", operation=_by("ada")), node="n1")
        async with nats.bus("controller") as controller:
            repaired = await controller.ask(OPERATE, OperateRequest(op_id="op-3", operation=_by("policy")), node="n1")
        await topology.ask(
            PERFORM, PerformRequest(op_id="op-2", operation=_by("ada"), time=""), node="n1", device_class="gpu"
        )

    assert before == []
    assert answer.result == DONE
    assert repaired.result == DONE
    assert handled == ["operate by ada", "operate by policy", "perform by ada"]


def _by(who: str) -> DeviceOperation:
    return DeviceOperation(device_class="gpu", device="gpu-0", verb=DeviceVerb.RESET, who=who)
