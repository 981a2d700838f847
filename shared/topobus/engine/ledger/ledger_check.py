"""Decides whether to accept a ledger from the bucket that this process did not write.

The stored ledger is accepted when its operation records explain every difference. Otherwise the
result is the ledger to write back, with the reason (`Discrepancy`). Another instance of this
service (a roll-over, a second one started by mistake) writes a record with each change, and changes
only what the record names. A ledger that was forged, assembled from old parts or moved to another
epoch fails this check. Records are not signatures: an attacker who also forges the records passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, structs

from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.values.errors import InvariantError
from topobus.values.ledger import Allocation, Ledger, OperationRecord
from topobus.values.outcome import Refusal

__all__ = ["CheckedLedger", "Discrepancy", "check_stored_ledger", "is_plausible"]

# How far an epoch and a sequence may be ahead of what is known: a store is lost a few times in a
# node's life, and a million decisions are not made before this process reads again. One write must
# not bring them near 2**53, where they end.
_EPOCHS_AHEAD = 1024
_SEQUENCES_AHEAD = 2**20
# The highest number that a process without a ledger accepts from a bucket. A node that makes a
# thousand decisions a second reaches it in 34 years.
_HIGHEST = 2**40
# A ledger keeps at least this many of its newest records, whatever it drops to become smaller
# (transitions.shed).
_RECORDS_SURE = 16


class Discrepancy(StrEnum):
    """Why a stored ledger is not accepted."""

    ROLLED_BACK = "rolled-back"
    """Its epoch and sequence are older than what is known."""
    JUMPED = "jumped"
    """They are further ahead than can have happened."""
    UNEXPLAINED = "unexplained"
    """Owners came, went or changed, or answers changed, without a record of it."""
    UNREADABLE = "unreadable"
    """The stored bytes cannot be decoded as a ledger."""
    CONTRADICTORY = "contradictory"
    """Two owners hold the same device or CPU."""


class CheckedLedger(Struct, frozen=True, kw_only=True):
    """The ledger to hold from now on.

    `discrepancy` is the reason why it is not the stored one, and None when it is.
    """

    ledger: Ledger
    discrepancy: Discrepancy | None = None


def _is_sound(ledger: Ledger) -> bool:
    """Say whether a ledger is free of contradictions."""
    try:
        check_holders(ledger)
    except InvariantError:
        return False
    return True


def is_plausible(ledger: Ledger) -> bool:
    """Say whether a process without a ledger may start with this one: it is sound, and its numbers
    are not so high that only a forger reaches them.
    """
    return ledger.epoch <= _HIGHEST and ledger.sequence <= _HIGHEST and _is_sound(ledger)


def check_stored_ledger(cached: Ledger, stored: Ledger, *, is_next: bool) -> CheckedLedger:
    """Decide whether the stored ledger replaces the one that this process holds.

    Shapes: cached — the ledger in this process; stored — what the bucket has now; is_next — nothing
            was written between the two, so `stored` is at most one operation further; result —
            `stored` itself where there is no doubt, else `cached` with the newer operations of
            `stored` that are explained, as a newer epoch.
    Order: deterministic. Where both hold the same device, `cached` wins.
    Errors: raises nothing. A ledger that is refused gives a `Discrepancy`.
    Cost: O(allocations + operations).
    """
    discrepancy = _numbers(cached, stored, is_next=is_next)
    if discrepancy is Discrepancy.JUMPED or not _is_sound(stored) or stored.node != cached.node:
        return CheckedLedger(
            ledger=structs.replace(cached, epoch=cached.epoch + 1), discrepancy=discrepancy or Discrepancy.CONTRADICTORY
        )
    if discrepancy is Discrepancy.ROLLED_BACK:
        return CheckedLedger(
            ledger=structs.replace(cached, epoch=max(cached.epoch, stored.epoch) + 1), discrepancy=discrepancy
        )
    records_by_owner = _newer_records(cached, stored)
    strange = [
        key
        for key in sorted(cached.allocations.keys() | stored.allocations.keys())
        if not _is_explained(cached, stored, key, records_by_owner)
    ]
    if not strange and _keeps_answers(cached, stored):
        return CheckedLedger(ledger=stored)
    last = {key: records[-1] for key, records in records_by_owner.items()}
    return CheckedLedger(ledger=_restore(cached, stored, frozenset(strange), last), discrepancy=Discrepancy.UNEXPLAINED)


def _numbers(ledger: Ledger, stored: Ledger, *, is_next: bool) -> Discrepancy | None:
    if (stored.epoch, stored.sequence) < (ledger.epoch, ledger.sequence):
        return Discrepancy.ROLLED_BACK
    ahead = stored.sequence - ledger.sequence
    if stored.epoch - ledger.epoch > _EPOCHS_AHEAD or ahead > _SEQUENCES_AHEAD:
        return Discrepancy.JUMPED
    # A write-back (another epoch) may have any sequence. Within an epoch each write is one
    # operation, or marks alone.
    return Discrepancy.JUMPED if is_next and stored.epoch == ledger.epoch and ahead > 1 else None


def _newer_records(ledger: Ledger, stored: Ledger) -> dict[str, list[tuple[str, OperationRecord]]]:
    """Return for each owner the records that name it and that are not known yet, oldest first, each
    with its operation id.
    """
    newer = sorted(
        (record.number, op_id) for op_id, record in stored.operations.items() if op_id not in ledger.operations
    )
    records_by_owner: dict[str, list[tuple[str, OperationRecord]]] = {}
    for _, op_id in newer:
        record = stored.operations[op_id]
        if not isinstance(record.outcome, Refusal):
            for key in (record.owner_key, *(owner.key for owner in record.displaced)):
                records_by_owner.setdefault(key, []).append((op_id, record))
    return records_by_owner


def _is_explained(
    ledger: Ledger, stored: Ledger, key: str, records_by_owner: Mapping[str, list[tuple[str, OperationRecord]]]
) -> bool:
    """Say whether an owner's holding is unchanged, or as the newest record about it leaves it.

    Between the two ledgers the owner may have got a device by one operation and have lost a part of
    it by the next. The newest record then covers only the loss.
    """
    before, after = ledger.allocations.get(key), stored.allocations.get(key)
    if before == after:
        return True
    # So far ahead, records may have been dropped to keep the ledger small.
    may_be_dropped = stored.sequence - ledger.sequence > _RECORDS_SURE
    if key not in records_by_owner:
        return may_be_dropped
    was_given = may_be_dropped or any(
        record.owner_key == key and record.verb != "release" for _, record in records_by_owner[key]
    )
    record = records_by_owner[key][-1][1]
    if record.owner_key != key:
        return after is None or before is not None or was_given
    if record.verb == "release":
        return after is None or _is_only_unprepared(before, after) or (was_given and not after.is_prepared)
    return after is not None


def _is_only_unprepared(before: Allocation | None, after: Allocation) -> bool:
    """Say whether a release ended the preparation alone."""
    return before is None or structs.replace(before, is_prepared=False) == after


def _keeps_answers(ledger: Ledger, stored: Ledger) -> bool:
    """Say whether the records that both ledgers have are about the same operations, and `stored`
    has all of its own newest records.
    """
    for op_id in ledger.operations.keys() & stored.operations.keys():
        own_operation, other_operation = ledger.operations[op_id], stored.operations[op_id]
        if (own_operation.verb, own_operation.owner_key, own_operation.decision_id, own_operation.number) != (
            other_operation.verb,
            other_operation.owner_key,
            other_operation.decision_id,
            other_operation.number,
        ):
            return False
    numbers = {record.number for record in stored.operations.values()}
    return numbers >= set(range(max(ledger.sequence + 1, stored.sequence - _RECORDS_SURE + 1), stored.sequence + 1))


def _restore(
    ledger: Ledger, stored: Ledger, strange: frozenset[str], last: Mapping[str, tuple[str, OperationRecord]]
) -> Ledger:
    """Restore what was known, and keep the explained decisions of another instance, unless they
    contradict it.
    """
    explained = {key for key in last if key not in strange}
    allocations = {key: allocation for key, allocation in ledger.allocations.items() if key not in explained}
    operations = dict(ledger.operations)
    epoch = max(ledger.epoch, stored.epoch) + 1
    restored = structs.replace(ledger, epoch=epoch, allocations=allocations)
    for key in sorted(explained):
        op_id, record = last[key]
        after = stored.allocations.get(key)
        wanted = {**restored.allocations, **({key: after} if after is not None else {})}
        changed = structs.replace(restored, allocations=wanted)
        if _is_sound(changed):
            restored = changed
            operations[op_id] = record
    sequence = max((record.number for record in operations.values()), default=0)
    return structs.replace(restored, sequence=max(ledger.sequence, sequence), operations=operations)
