"""Answers `operate`: decides on an operator's request for one device, has the device service
perform it, and publishes both as decision events.

The decision is in the ledger, with who and why, before anything is performed. So its event is
published exactly once, even after a crash in between. When the request is repeated with the same
id, it is sent to the device service again, which performs it only once. What the service has done
or refused is a second decision, `<op_id>:outcome`. The first one alone means that the operation was
begun.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.bus.bus import Bus
from topobus.engine.ledger import transitions
from topobus.engine.ledger.decision_events import decision_id
from topobus.engine.ledger.operation_faults import complaint_of_operation_text, fault_of_operation
from topobus.engine.ledger.transitions import Step
from topobus.engine.ledger.write_limits import complaint_of_devices, complaint_of_operation
from topobus.formats.messages.catalogue import PERFORM
from topobus.formats.messages.messages import OUTCOME
from topobus.formats.messages.operation_messages import Operated, OperateReply, OperateRequest, PerformRequest
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.topology.announcer import Announcer
from topobus.topology.ledger_store import LedgerStore
from topobus.topology.node_inputs import NodeInputs
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.ledger import Ledger, OperationRecord, PendingDecision
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner, OwnerKind
from topobus.values.timestamps import rfc3339

__all__ = ["DeviceOperations", "operator_of"]

# An inventory arrives milliseconds after it was published.
_SHOWN_S = 0.5


def operator_of(operation: DeviceOperation) -> Owner:
    """Return the owner under which an operation is recorded in the ledger and in its event: the
    requester and the device.

    >>> operator_of(DeviceOperation(device_class="gpu", device="gpu-0", verb=DeviceVerb.RESET, who="ada")).key
    'operator//ada/gpu:gpu-0'
    """
    return Owner(
        kind=OwnerKind.OPERATOR, namespace="", name=operation.who, uid=f"{operation.device_class}:{operation.device}"
    )


class DeviceOperations:
    """Handler of `operate`."""

    def __init__(
        self, bus: Bus, *, node: str, inputs: NodeInputs, store: LedgerStore, announcer: Announcer, clock: Clock
    ) -> None:
        self._bus = bus
        self._node = node
        self._inputs = inputs
        self._store = store
        self._announcer = announcer
        self._clock = clock

    async def operate(self, asked: OperateRequest) -> OperateReply:
        """Perform an operator's request, or return a refusal with its reasons.

        Errors: raises ContractError for a request out of bounds, PeerUnavailable when the device
        service is not there. The decision is then recorded, and repeating the request with the same
        id performs it.
        """
        operation, owner = asked.operation, operator_of(asked.operation)
        complaint = (
            complaint_of_operation_text(operation)
            or complaint_of_devices({operation.device_class: (operation.device,)})
            or complaint_of_operation(asked.op_id, owner)
        )
        if complaint:
            raise ContractError(complaint)
        inventory = self._inputs.inventories.get(operation.device_class)
        record = await self._record(
            asked.op_id, operation, inventory, lambda ledger: fault_of_operation(operation, inventory, ledger)
        )
        if (record.verb, record.owner_key) != (str(operation.verb), owner.key):
            text = f"operation {asked.op_id} was a {record.verb} for {record.owner_key}: choose another op_id"
            return self._reply(record, refuse("operation-reused", text, op_id=asked.op_id))
        if isinstance(record.outcome, Refusal):
            return self._reply(record, record.outcome)
        request = PerformRequest(op_id=asked.op_id, operation=operation, time=rfc3339(self._clock.now()))
        reply = await self._bus.ask(PERFORM, request, node=self._node, device_class=operation.device_class)
        outcome = reply.result if isinstance(reply.result, Refusal) else None
        await self._record(f"{asked.op_id}{OUTCOME}", operation, inventory, lambda _: outcome)
        if isinstance(reply.result, Operated) and (operation.verb.is_lasting or operation.verb is DeviceVerb.RETURN):
            await self._wait_shown(operation, reply.result)
        return self._reply(record, reply.result)

    async def _wait_shown(self, operation: DeviceOperation, result: Operated) -> None:
        """Wait until no plan uses the device's previous state.

        Not longer than an operator waits, because the operation is done.
        """
        try:
            async with self._clock.timeout(_SHOWN_S):
                await self._inputs.wait_shown(operation.device_class, operation.device, result.maintenance)
        except TimeoutError:
            get_logger().warning("operation.unseen", device=operation.device, waited_s=_SHOWN_S)

    async def _record(
        self,
        op_id: str,
        operation: DeviceOperation,
        inventory: Inventory | None,
        refusal_in: Callable[[Ledger], Refusal | None],
    ) -> OperationRecord:
        """Record a decision, unless it is recorded already. It is a refusal where `refusal_in`
        finds one in the ledger being written.
        """
        owner = operator_of(operation)
        device = inventory.device(operation.device) if inventory is not None else None

        async def decide(ledger: Ledger) -> Step:
            return transitions.record_refusal(
                ledger,
                op_id=op_id,
                verb=str(operation.verb),
                owner=owner,
                decision_id=decision_id(ledger, op_id),
                refusal=refusal_in(ledger),
                pending=PendingDecision(
                    owner=owner,
                    time=rfc3339(self._clock.now()),
                    ledger_sequence=ledger.sequence + 1,
                    operation=operation,
                    health=device.health if device is not None else None,
                ),
            )

        step = await self._store.change(decide)
        if not step.is_repeat:
            self._announcer.wake()
            get_logger().info(
                "operation.decided",
                verb=str(operation.verb),
                device=operation.device,
                who=operation.who,
                why=operation.why,
                op_id=op_id,
                decision_id=step.record.decision_id,
                reasons=[reason.code for reason in step.record.outcome.reasons]
                if isinstance(step.record.outcome, Refusal)
                else [],
            )
        return step.record

    def _reply(self, record: OperationRecord, result: Operated | Refusal) -> OperateReply:
        return OperateReply(decision_id=record.decision_id, node=self._node, result=result)
