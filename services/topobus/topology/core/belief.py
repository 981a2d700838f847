"""What to believe of a ledger that stands in the bucket and that this process did not write.

Flows in: the ledger that is known, and one that was found after it. Flows out: the one found, when it explains itself; else what must be put back. Another
instance of this service (a roll-over, a twin by mistake) writes ledgers like ours: each change has a record, and only what a record names differs. A ledger
that somebody forged, put together from old parts or moved to another epoch does not. Records are no signatures: who forges them, too, is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, structs

from topobus.domain.errors import InvariantError
from topobus.domain.ledger import Allocation, Ledger, OperationRecord
from topobus.domain.outcome import Refusal
from topobus.domain.transitions import check

__all__ = ["Belief", "Doubt", "believe", "is_plausible"]

# How far an epoch and a sequence may be ahead of what is known: a store is lost a few times in a node's life, and nobody makes a million decisions while
# this process looks away. One write must not bring them near 2**53, where they end.
_EPOCHS_AHEAD = 1024
_SEQUENCES_AHEAD = 2**20
# The highest that is taken from a bucket by a process that knows nothing yet; a node that makes a thousand decisions a second reaches it in 34 years.
_HIGHEST = 2**40
# A ledger keeps at least so many of its newest records, whatever it drops to become smaller (transitions.shed).
_RECORDS_SURE = 16


class Doubt(StrEnum):
    """Why a ledger is not believed."""

    ROLLED_BACK = "rolled-back"
    """Its epoch and sequence are older than what is known."""
    JUMPED = "jumped"
    """They are further ahead than can have happened."""
    UNEXPLAINED = "unexplained"
    """Owners came, went or changed, or answers changed, without a record that says so."""
    UNREADABLE = "unreadable"
    """It is no ledger."""
    CONTRADICTORY = "contradictory"
    """Two owners hold the same."""


class Belief(Struct, frozen=True, kw_only=True):
    """What to hold now, and why that is not what was found; no doubt: it is."""

    ledger: Ledger
    doubt: Doubt | None = None


def _is_sound(ledger: Ledger) -> bool:
    """Say whether a ledger contradicts itself nowhere."""
    try:
        check(ledger)
    except InvariantError:
        return False
    return True


def is_plausible(ledger: Ledger) -> bool:
    """Say whether a process that knows nothing yet may begin with a ledger: sound, and its numbers are none that only a forger reaches."""
    return ledger.epoch <= _HIGHEST and ledger.sequence <= _HIGHEST and _is_sound(ledger)


def believe(known: Ledger, found: Ledger, *, is_next: bool) -> Belief:
    """Decide between what is known and what was found.

    Shapes: is_next — nothing was written between the two, so `found` is at most one operation further.
    Result: `found` itself without a doubt; else `known` with those of the newer operations of `found` that are explained, as a newer epoch.
    Order: deterministic; where both hold the same device, what is known stays.
    Cost: O(allocations + operations).
    """
    doubt = _numbers(known, found, is_next=is_next)
    if doubt is Doubt.JUMPED or not _is_sound(found) or found.node != known.node:
        return Belief(ledger=structs.replace(known, epoch=known.epoch + 1), doubt=doubt or Doubt.CONTRADICTORY)
    if doubt is Doubt.ROLLED_BACK:
        return Belief(ledger=structs.replace(known, epoch=max(known.epoch, found.epoch) + 1), doubt=doubt)
    last = _last_words(known, found)
    strange = [key for key in sorted(known.allocations.keys() | found.allocations.keys()) if not _is_explained(known, found, key, last)]
    if not strange and _keeps_answers(known, found):
        return Belief(ledger=found)
    return Belief(ledger=_mended(known, found, frozenset(strange), last), doubt=Doubt.UNEXPLAINED)


def _numbers(ledger: Ledger, found_ledger: Ledger, *, is_next: bool) -> Doubt | None:
    if (found_ledger.epoch, found_ledger.sequence) < (ledger.epoch, ledger.sequence):
        return Doubt.ROLLED_BACK
    ahead = found_ledger.sequence - ledger.sequence
    if found_ledger.epoch - ledger.epoch > _EPOCHS_AHEAD or ahead > _SEQUENCES_AHEAD:
        return Doubt.JUMPED
    # A write-back (another epoch) may stand anywhere; within an epoch each write is one operation, or marks alone.
    return Doubt.JUMPED if is_next and found_ledger.epoch == ledger.epoch and ahead > 1 else None


def _last_words(ledger: Ledger, found_ledger: Ledger) -> dict[str, tuple[str, OperationRecord]]:
    """Give for each owner the newest record that names it and that is not known yet, with its operation id."""
    newer = sorted((record.number, op_id) for op_id, record in found_ledger.operations.items() if op_id not in ledger.operations)
    words: dict[str, tuple[str, OperationRecord]] = {}
    for _, op_id in newer:
        record = found_ledger.operations[op_id]
        if not isinstance(record.outcome, Refusal):
            for key in (record.owner_key, *(owner.key for owner in record.displaced)):
                words[key] = (op_id, record)
    return words


def _is_explained(ledger: Ledger, found_ledger: Ledger, key: str, last: Mapping[str, tuple[str, OperationRecord]]) -> bool:
    """Say whether what an owner holds is as it was, or as the newest record about it says."""
    before, after = ledger.allocations.get(key), found_ledger.allocations.get(key)
    if before == after:
        return True
    if key not in last:
        # So far ahead, the record may have been dropped to keep the ledger small.
        return found_ledger.sequence - ledger.sequence > _RECORDS_SURE
    record = last[key][1]
    if record.owner_key != key:
        return after is None or before is not None
    if record.verb == "release":
        return after is None or _is_only_unprepared(before, after)
    return after is not None


def _is_only_unprepared(before: Allocation | None, after: Allocation) -> bool:
    """Say whether a release let go of the preparation alone."""
    return before is None or structs.replace(before, is_prepared=False) == after


def _keeps_answers(ledger: Ledger, found: Ledger) -> bool:
    """Say whether the records that both have are about the same, and the newest of `found` are there."""
    for op_id in ledger.operations.keys() & found.operations.keys():
        own_operation, other_operation = ledger.operations[op_id], found.operations[op_id]
        if (own_operation.verb, own_operation.owner_key, own_operation.decision_id, own_operation.number) != (
            other_operation.verb,
            other_operation.owner_key,
            other_operation.decision_id,
            other_operation.number,
        ):
            return False
    numbers = {record.number for record in found.operations.values()}
    return numbers >= set(range(max(ledger.sequence + 1, found.sequence - _RECORDS_SURE + 1), found.sequence + 1))


def _mended(ledger: Ledger, found_ledger: Ledger, strange: frozenset[str], last: Mapping[str, tuple[str, OperationRecord]]) -> Ledger:
    """Put back what was known, and keep what another instance has decided meanwhile and can explain, unless it stands in the way."""
    explained = {key for key in last if key not in strange}
    allocations = {key: allocation for key, allocation in ledger.allocations.items() if key not in explained}
    operations = dict(ledger.operations)
    epoch = max(ledger.epoch, found_ledger.epoch) + 1
    mended = structs.replace(ledger, epoch=epoch, allocations=allocations)
    for key in sorted(explained):
        op_id, record = last[key]
        after = found_ledger.allocations.get(key)
        wanted = {**mended.allocations, **({key: after} if after is not None else {})}
        changed = structs.replace(mended, allocations=wanted)
        if _is_sound(changed):
            mended = changed
            operations[op_id] = record
    sequence = max((record.number for record in operations.values()), default=0)
    return structs.replace(mended, sequence=max(ledger.sequence, sequence), operations=operations)
