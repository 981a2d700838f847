"""Which ledgers written by another process are accepted: those whose differences their records
explain.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_check import Discrepancy, check_stored_ledger, is_plausible
from topobus.values.ledger import Adoption, Allocation, Holding, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind


def _owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=name)


def _adopted(ledger: Ledger, name: str, device: str, *, op_id: str = "") -> Ledger:
    step = transitions.adopt(
        ledger,
        Adoption(owner=_owner(name), devices={"gpu": (device,)}),
        op_id=op_id or f"adopt-{name}",
        decision_id=f"d-{name}-{ledger.sequence}",
    )
    assert not isinstance(step, Refusal)
    return step.ledger


def _released(ledger: Ledger, name: str) -> Ledger:
    step = transitions.release(ledger, op_id=f"release-{name}", owner=_owner(name), decision_id=f"r-{name}")
    assert not isinstance(step, Refusal)
    return step.ledger


_KNOWN = _adopted(_adopted(Ledger(node="n1"), "a", "gpu-0"), "b", "gpu-1")
_A, _B, _C = (_owner(name).key for name in "abc")

_ACCEPTED: dict[str, Ledger] = {
    "a-release": _released(_KNOWN, "a"),
    "an-adoption": _adopted(_KNOWN, "c", "gpu-2"),
    "an-adoption-that-displaces": _adopted(_KNOWN, "c", "gpu-0"),
    "a-change-of-an-owner": _adopted(_KNOWN, "a", "gpu-5", op_id="adopt-a-again"),
    "marks": transitions.announce(_KNOWN, ["adopt-a"]),
    "a-write-back": structs.replace(_KNOWN, epoch=2),
    "a-write-back-and-a-release": structs.replace(_released(_KNOWN, "b"), epoch=3),
}

_REFUSED: dict[str, tuple[Ledger, Discrepancy]] = {
    "empty-of-a-later-epoch": (Ledger(node="n1", epoch=50, sequence=100), Discrepancy.UNEXPLAINED),
    "one-owner-less": (
        structs.replace(_KNOWN, epoch=2, allocations={_A: _KNOWN.allocations[_A]}),
        Discrepancy.UNEXPLAINED,
    ),
    "one-owner-more": (
        structs.replace(_KNOWN, allocations=_adopted(_KNOWN, "c", "gpu-2").allocations),
        Discrepancy.UNEXPLAINED,
    ),
    "another-device": (
        structs.replace(
            _KNOWN, allocations={**_KNOWN.allocations, _A: structs.replace(_KNOWN.allocations[_A], holdings=())}
        ),
        Discrepancy.UNEXPLAINED,
    ),
    "a-sequence-without-records": (structs.replace(_KNOWN, sequence=3), Discrepancy.UNEXPLAINED),
    "two-steps-at-once": (_released(_released(_KNOWN, "a"), "b"), Discrepancy.JUMPED),
    "an-answer-of-another-decision": (
        structs.replace(
            _KNOWN,
            operations={
                **_KNOWN.operations,
                "adopt-a": structs.replace(_KNOWN.operations["adopt-a"], decision_id="of-somebody-else"),
            },
        ),
        Discrepancy.UNEXPLAINED,
    ),
    "an-epoch-at-the-end": (structs.replace(_KNOWN, epoch=2**53), Discrepancy.JUMPED),
    "a-sequence-at-the-end": (structs.replace(_KNOWN, epoch=2, sequence=2**53), Discrepancy.JUMPED),
    "older": (Ledger(node="n1"), Discrepancy.ROLLED_BACK),
    "of-another-node": (structs.replace(_KNOWN, node="n2", epoch=2), Discrepancy.CONTRADICTORY),
    "a-device-held-twice": (
        structs.replace(
            _KNOWN,
            epoch=2,
            allocations={**_KNOWN.allocations, _C: structs.replace(_KNOWN.allocations[_A], owner=_owner("c"))},
        ),
        Discrepancy.CONTRADICTORY,
    ),
}


@pytest.mark.parametrize("ledger", _ACCEPTED.values(), ids=_ACCEPTED.keys())
def test_ledger_is_accepted_when_a_record_explains_each_difference(ledger: Ledger) -> None:
    """What another instance of the service writes is taken as it is."""
    checked = check_stored_ledger(_KNOWN, ledger, is_next=True)

    assert checked.discrepancy is None
    assert checked.ledger is ledger


@pytest.mark.parametrize(("ledger", "discrepancy"), _REFUSED.values(), ids=_REFUSED.keys())
def test_ledger_is_put_back_when_it_does_not_explain_itself(ledger: Ledger, discrepancy: Discrepancy) -> None:
    """Who held what is as it was, under an epoch that readers can take, and the reason is named."""
    checked = check_stored_ledger(_KNOWN, ledger, is_next=True)

    assert checked.discrepancy is discrepancy
    assert (checked.ledger.node, checked.ledger.allocations) == ("n1", _KNOWN.allocations)
    assert _KNOWN.epoch < checked.ledger.epoch <= 1026
    assert checked.ledger.sequence == _KNOWN.sequence


def _adopted_two(ledger: Ledger, name: str, *devices: str) -> Ledger:
    step = transitions.adopt(
        ledger, Adoption(owner=_owner(name), devices={"gpu": devices}), op_id=f"adopt-{name}", decision_id=f"d-{name}"
    )
    assert not isinstance(step, Refusal)
    return step.ledger


_GIVEN_AND_DISPLACED = _adopted(_adopted_two(_KNOWN, "c", "gpu-2", "gpu-3"), "d", "gpu-3")


def test_ledger_is_accepted_when_an_owner_came_and_lost_a_part_since_the_last_look() -> None:
    """Another instance gave an owner two devices and then one of them to the next owner: what is
    left of the first is explained by both records together.
    """
    checked = check_stored_ledger(_KNOWN, _GIVEN_AND_DISPLACED, is_next=False)

    assert checked.discrepancy is None
    assert checked.ledger is _GIVEN_AND_DISPLACED


def test_ledger_is_put_back_when_an_owner_lost_a_part_and_no_record_says_that_it_came() -> None:
    """The record of the loss alone explains no owner that nobody has heard of, while all records
    are sure to be there.
    """
    operations = {op_id: record for op_id, record in _GIVEN_AND_DISPLACED.operations.items() if op_id != "adopt-c"}
    renumbered = {**operations, "adopt-d": structs.replace(operations["adopt-d"], number=_KNOWN.sequence + 1)}
    forged = structs.replace(_GIVEN_AND_DISPLACED, sequence=_KNOWN.sequence + 1, operations=renumbered)

    checked = check_stored_ledger(_KNOWN, forged, is_next=True)

    assert checked.discrepancy is Discrepancy.UNEXPLAINED
    assert _C not in checked.ledger.allocations


def test_ledger_keeps_both_sides_when_two_instances_answered_apart_from_each_other() -> None:
    """After a store was put back, an instance that knew less has gone on in a later epoch: its
    answers stay, ours too, and what is held by us is not taken.
    """
    behind = _adopted(Ledger(node="n1"), "a", "gpu-0")
    ledger = structs.replace(_adopted(behind, "c", "gpu-2"), epoch=2)
    clashing = structs.replace(_adopted(behind, "c", "gpu-1"), epoch=2)

    both = check_stored_ledger(_KNOWN, ledger, is_next=False)
    ours = check_stored_ledger(_KNOWN, clashing, is_next=False)

    assert both.ledger.allocations.keys() == {_A, _B, _C}
    assert ours.ledger.allocations == _KNOWN.allocations


@pytest.mark.parametrize("numbers", [{"epoch": 2**53}, {"sequence": 2**53}, {"epoch": 2**40 + 1}])
def test_ledger_is_no_beginning_when_its_numbers_are_out_of_reach(numbers: dict[str, int]) -> None:
    """A start takes no epoch and no sequence whose successors would soon be unreadable."""
    change: Callable[..., Ledger] = structs.replace

    assert not is_plausible(change(_KNOWN, **numbers))
    assert is_plausible(_KNOWN)


def test_forged_allocation_is_plausible_only_when_nothing_is_held_twice() -> None:
    """A contradiction is no beginning either."""
    twice = Allocation(owner=_owner("c"), holdings=(Holding(devices={"gpu": ("gpu-0",)}),))

    assert not is_plausible(structs.replace(_KNOWN, allocations={**_KNOWN.allocations, _C: twice}))
