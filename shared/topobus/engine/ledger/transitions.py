"""The ledger's algebra: every change is a pure function from a ledger and an operation id to a
`Step` with the new ledger and the answer, or to a Refusal that names the owner in the way.

An operation id that is known already gets its stored answer and changes nothing. Invariant: no
device and no CPU is held by two owners. Admin access holds nothing (`ledger_invariant`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct, structs

from topobus.engine.ledger.holdings import (
    common,
    holding_of,
    holds_any,
    meets,
    missing,
    names_of,
    placed_holdings,
    without,
)
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet
from topobus.values.ledger import (
    Adoption,
    Allocation,
    AllocationPhase,
    Holding,
    Ledger,
    OperationRecord,
    PendingDecision,
)
from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal, refuse
from topobus.values.request import Owner, OwnerKind, PodRequest

__all__ = [
    "OPERATIONS_KEPT",
    "Step",
    "adopt",
    "adopted_by",
    "announce",
    "commit",
    "gives_way",
    "name_pods",
    "placed_by",
    "record_refusal",
    "recorded_operation",
    "release",
    "reserve",
    "shed",
    "unannounced",
]

_MEMORY = "memory"

OPERATIONS_KEPT = 256
"""Answers kept for askers that ask again; an asker gives up long before so many others came."""

# Of these, answers about allocations of kubelet's own that are kept: each such call has an
# operation id of its own and is never repeated. A node makes one for each container, so they would
# be most of a ledger that every service of the node reads.
_PLUGIN_OPERATIONS = 32
_PLUGIN_KEYS = f"{OwnerKind.DEVICE_PLUGIN}/"

# Answers kept with their reasons: an asker asks again within seconds. The others are answered
# from the allocation: the ledger is written with every operation and read by every service of
# the node, so it must stay small.
_FULL_OPERATIONS = 16


class Step(Struct, frozen=True, kw_only=True):
    """One transition: the ledger afterwards, and the stored answer, changed or not."""

    ledger: Ledger
    record: OperationRecord
    is_repeat: bool = False
    """True when the operation was known: nothing changed."""


def placed_by(ledger: Ledger, record: OperationRecord) -> Placement | Refusal:
    """Return the answer of a `place` again, as long as it is true.

    An old answer is rebuilt from the allocation, without the reasons. A placement that was released
    since gets a refusal, however new the answer is: its devices may belong to another owner by now.
    """
    if isinstance(record.outcome, Refusal):
        return record.outcome
    allocation = ledger.allocations.get(record.owner_key)
    if allocation is not None and allocation.decision_id == record.decision_id:
        return record.outcome if record.outcome is not None else _placement_of(allocation)
    if record.outcome is not None and allocation is not None:
        # Adopted by the same owner meanwhile: the gateway writes down
        # what the controller has placed.
        placed = [Holding(devices=container.devices, cpus=container.cpus) for container in record.outcome.containers]
        if not any(missing(allocation, holding) for holding in placed):
            return record.outcome
    message = f"{record.owner_key} was placed by decision {record.decision_id} and has been released since"
    return _released_since(record, message)


def adopted_by(ledger: Ledger, record: OperationRecord, devices: Mapping[str, Iterable[str]]) -> Refusal | None:
    """Return the refusal of an `adopt` again (None: it went well), as long as it is true.

    An owner that no longer holds what it asks for gets a refusal, because it was released since or
    asks for other devices under the same operation.
    """
    if isinstance(record.outcome, Refusal):
        return record.outcome
    wanted = holding_of(devices)
    if isinstance(wanted, Refusal):
        return wanted
    lacking = missing(ledger.allocations.get(record.owner_key), wanted)
    if not lacking:
        return None
    message = (
        f"decision {record.decision_id} adopted devices for {record.owner_key}, which does not hold "
        f"{', '.join(lacking)} now: use a new op_id"
    )
    return _released_since(record, message)


def recorded_operation(ledger: Ledger, op_id: str) -> OperationRecord | None:
    """Look up the stored record of an operation.

    None when the ledger has none (or has dropped it).
    """
    return ledger.operations.get(op_id)


def reserve(
    ledger: Ledger,
    *,
    op_id: str,
    request: PodRequest,
    placement: Placement,
    decision_id: str,
    phase: AllocationPhase = AllocationPhase.COMMITTED,
    pending: PendingDecision | None = None,
) -> Step:
    """Write a placement for its owner. With phase RESERVED it waits for `commit` or `release`.

    Errors: raises InvariantError when the placement takes what another owner holds (it was planned
            on another ledger).
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    holdings = placed_holdings(request, placement)
    allocation = Allocation(owner=request.owner, phase=phase, holdings=holdings, decision_id=decision_id)
    record = OperationRecord(
        verb="place", owner_key=request.owner.key, decision_id=decision_id, outcome=placement, pending=pending
    )
    changed = _with(ledger, op_id, record, {**ledger.allocations, request.owner.key: allocation})
    check_holders(changed)
    return Step(ledger=changed, record=record)


def commit(
    ledger: Ledger, *, op_id: str, owner: Owner, decision_id: str, pending: PendingDecision | None = None
) -> Step | Refusal:
    """Make a reservation final. A committed one stays as it is.

    Errors: raises nothing; Refusal code no-reservation when the owner has none.
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    held = ledger.allocations.get(owner.key)
    if held is None:
        message = f"{owner} has no reservation to commit; it was released, or never made"
        return refuse("no-reservation", message, owner=owner.key)
    record = OperationRecord(verb="commit", owner_key=owner.key, decision_id=decision_id, pending=pending)
    allocation = structs.replace(held, phase=AllocationPhase.COMMITTED)
    return Step(ledger=_with(ledger, op_id, record, {**ledger.allocations, owner.key: allocation}), record=record)


def release(
    ledger: Ledger,
    *,
    op_id: str,
    owner: Owner,
    decision_id: str,
    is_undone: bool = False,
    keeps_devices: bool = False,
    only: str = "",
    pending: PendingDecision | None = None,
) -> Step | Refusal:
    """Release all that an owner holds, or abort its reservation.

    An owner that holds nothing is no error, and no decision to be published. Prepared devices may
    be in use by a container, even when their claim is gone: without `is_undone` they are refused
    and stay held. `keeps_devices` ends the preparation alone. `only` names the decision whose
    holding is meant: a later one of the same owner stays as it is.
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    held = ledger.allocations.get(owner.key)
    if held is not None and only not in ("", held.decision_id):
        record = OperationRecord(verb="release", owner_key=owner.key, decision_id=decision_id)
        return Step(ledger=_with(ledger, op_id, record, ledger.allocations), record=record)
    if held is not None and held.is_prepared and not is_undone:
        message = f"{owner} is prepared on this node: its devices are released when that is undone"
        return refuse("prepared", message, owner=owner.key)
    left = {key: allocation for key, allocation in ledger.allocations.items() if key != owner.key}
    if keeps_devices and held is not None:
        left[owner.key] = structs.replace(held, is_prepared=False)
    gone = names_of(held) if held is not None and not keeps_devices else {}
    announced = pending if held is not None else None
    record = OperationRecord(
        verb="release", owner_key=owner.key, decision_id=decision_id, devices=gone, pending=announced
    )
    return Step(ledger=_with(ledger, op_id, record, left), record=record)


def adopt(
    ledger: Ledger,
    adoption: Adoption,
    *,
    op_id: str,
    decision_id: str,
    groups: Mapping[str, CpuSet] = MappingProxyType({}),
    pending: PendingDecision | None = None,
) -> Step | Refusal:
    """Write a decision of kubelet or of a claim into the ledger.

    Of kubelet's own allocations of one resource the newer one is right: kubelet allocates a device
    again only when it is free for kubelet, and the device-plugin API has no "deallocate". So an
    older DEVICE_PLUGIN owner loses the devices in common (all, when nothing is left to it), but
    only to another DEVICE_PLUGIN owner of the same resource (`name`). kubelet treats two resources
    as unrelated, so a device that was moved to another pool while a container has it is not free.
    The same holds for CPUs of kubelet's CPU manager: the newer CONTAINER owner is right. Any other
    live holding refuses the adoption and is named. Shares do not conflict with each other, only
    with the whole, and a replica with itself. `groups` names the CPUs among the devices that were
    chosen out of each group.
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    owner = adoption.owner
    wanted = holding_of(adoption.devices, adoption.shared, adoption.shares)
    if isinstance(wanted, Refusal):
        return wanted
    record = OperationRecord(verb="adopt", owner_key=owner.key, decision_id=decision_id, pending=pending)
    if adoption.is_shared:
        return Step(ledger=_with(ledger, op_id, record, ledger.allocations), record=record)
    left = {key: allocation for key, allocation in ledger.allocations.items() if key != owner.key}
    clashes = [allocation for allocation in left.values() if meets(allocation, wanted)]
    live = [clash for clash in clashes if not gives_way(clash.owner, owner)]
    if live:
        return _held_by(live, wanted)
    for clash in clashes:
        kept = tuple(rest for holding in clash.holdings if holds_any(rest := without(holding, wanted)))
        if kept:
            left[clash.owner.key] = structs.replace(clash, holdings=kept)
        else:
            del left[clash.owner.key]
    before = ledger.allocations.get(owner.key)
    # Once prepared it stays so until that is undone, whatever else is adopted.
    is_prepared = adoption.is_prepared or (before is not None and before.is_prepared)
    wanted = structs.replace(
        wanted,
        groups=dict(sorted(groups.items())),
        container=adoption.container,
        memory=adoption.memory,
        memory_bytes=sum(memory_block.size_bytes for memory_block in adoption.memory if memory_block.kind == _MEMORY),
    )
    left[owner.key] = Allocation(
        owner=owner, holdings=(wanted,), decision_id=decision_id, is_prepared=is_prepared, pods=adoption.pods
    )
    displaced = tuple(clash.owner for clash in sorted(clashes, key=lambda allocation: allocation.owner.key))
    record = structs.replace(record, displaced=displaced)
    changed = _with(ledger, op_id, record, left)
    check_holders(changed)
    return Step(ledger=changed, record=record)


def name_pods(
    ledger: Ledger, *, op_id: str, owner: Owner, decision_id: str, pods: tuple[Owner, ...], container: str = ""
) -> Step:
    """Record which pods, and which one container, use the devices that an owner holds by a decision.

    This decides nothing, and a later holding of the owner stays as it is.
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    held = ledger.allocations.get(owner.key)
    record = OperationRecord(verb="adopt", owner_key=owner.key, decision_id=decision_id, is_announced=True)
    if held is None or held.decision_id != decision_id or (held.pods, held.container) == (pods, container):
        return Step(ledger=ledger, record=record, is_repeat=True)
    left = {**ledger.allocations, owner.key: structs.replace(held, pods=pods, container=container)}
    return Step(ledger=_with(ledger, op_id, record, left), record=record)


def gives_way(old: Owner, new: Owner) -> bool:
    """Say whether both are kubelet's own report of one thing, of which the newer is right."""
    if old.kind is new.kind is OwnerKind.CONTAINER:
        return True
    return old.kind is new.kind is OwnerKind.DEVICE_PLUGIN and old.name == new.name


def record_refusal(
    ledger: Ledger,
    *,
    op_id: str,
    verb: str,
    owner: Owner,
    decision_id: str,
    refusal: Refusal | None,
    pending: PendingDecision | None = None,
) -> Step:
    """Store a refusal, so that a repeated request gets the same answer.

    None: a decision that gives no owner anything (an operator's, about a device).
    """
    operation_record = recorded_operation(ledger, op_id)
    if operation_record is not None:
        return _repeat(ledger, operation_record)
    record = OperationRecord(verb=verb, owner_key=owner.key, decision_id=decision_id, outcome=refusal, pending=pending)
    return Step(ledger=_with(ledger, op_id, record, ledger.allocations), record=record)


def announce(ledger: Ledger, op_ids: Iterable[str]) -> Ledger:
    """Mark operations as announced, and drop the events that waited with them.

    It does not count as a change: the sequence stays, so readers see nothing new. Ids that the
    ledger does not have, or has dropped, are ignored.
    """
    done = set(op_ids)
    operations = {
        key: structs.replace(operation, is_announced=True, pending=None)
        if key in done and not operation.is_announced
        else operation
        for key, operation in ledger.operations.items()
    }
    return structs.replace(ledger, operations=operations)


def unannounced(ledger: Ledger) -> tuple[tuple[str, OperationRecord], ...]:
    """List the operations whose decision event is not known to be published, with their ids.

    Order: oldest first, by their numbers, which is the order in which they were decided. After a
            crash some of them may be published: their ids make that harmless.
    """
    waiting = [(key, operation) for key, operation in ledger.operations.items() if not operation.is_announced]
    return tuple(sorted(waiting, key=lambda pair: pair[1].number))


def shed(ledger: Ledger) -> Ledger:
    """Drop explanations when a ledger has grown too large to be stored: holdings stay, and the
    answers of the newest operations stay without their reasons.

    An operation that is not announced yet remains to be announced, without its inputs.
    """
    newest = set(sorted(ledger.operations, key=lambda key: ledger.operations[key].number)[-_FULL_OPERATIONS:])
    operations = {
        key: structs.replace(
            slim, pending=structs.replace(slim.pending, request=None) if slim.pending is not None else None
        )
        for key, operation in ledger.operations.items()
        if key in newest or not operation.is_announced
        for slim in (_slim(operation),)
    }
    return structs.replace(ledger, operations=operations)


def _with(ledger: Ledger, op_id: str, record: OperationRecord, allocations: Mapping[str, Allocation]) -> Ledger:
    operations = {**ledger.operations, op_id: structs.replace(record, number=ledger.sequence + 1)}
    # By number: a stored ledger comes back with its keys sorted by name.
    ages = sorted(operations, key=lambda key: operations[key].number)
    plugins = [key for key in ages if operations[key].owner_key.startswith(_PLUGIN_KEYS)]
    # An operation that is not announced yet waits for its event.
    over = [key for key in plugins[: max(0, len(plugins) - _PLUGIN_OPERATIONS)] if operations[key].is_announced]
    for key in {*ages[: max(0, len(ages) - OPERATIONS_KEPT)], *over}:
        del operations[key]
    # One record grows old with each operation, so one is slimmed down each time.
    if len(ages) > _FULL_OPERATIONS:
        old = ages[-_FULL_OPERATIONS - 1]
        operations[old] = _slim(operations[old])
    return structs.replace(ledger, sequence=ledger.sequence + 1, allocations=dict(allocations), operations=operations)


def _slim(record: OperationRecord) -> OperationRecord:
    """Keep the decision in the fewest bytes.

    The decision event has all of it, and the allocation has what was placed.
    """
    outcome = record.outcome
    if isinstance(outcome, Placement):
        outcome = None
    elif isinstance(outcome, Refusal):
        outcome = Refusal(
            reasons=tuple(Reason(code=reason.code, message=reason.message) for reason in outcome.reasons[:1])
        )
    pending = structs.replace(record.pending, view=None) if record.pending is not None else None
    return structs.replace(record, outcome=outcome, pending=pending)


def _placement_of(allocation: Allocation) -> Placement:
    containers = tuple(
        ContainerPlacement(
            name=holding.container, alignment=Hint(None, preferred=False), cpus=holding.cpus, devices=holding.devices
        )
        for holding in allocation.holdings
    )
    return Placement(containers=containers)


def _released_since(record: OperationRecord, message: str) -> Refusal:
    return refuse("released-since", message, decision=record.decision_id)


def _held_by(holders: Iterable[Allocation], wanted: Holding) -> Refusal:
    """Refuse with the holders of what is wanted."""
    reasons = tuple(
        Reason(
            code="device-held",
            message=f"{allocation.owner} holds {', '.join(common(allocation, wanted))}",
            facts={"owner": allocation.owner.key, "devices": common(allocation, wanted)},
        )
        for allocation in sorted(holders, key=lambda allocation: allocation.owner.key)
    )
    return Refusal(reasons=reasons)


def _repeat(ledger: Ledger, record: OperationRecord) -> Step:
    return Step(ledger=ledger, record=record, is_repeat=True)
