"""Who gives way to whom when a device is adopted twice."""

import pytest

from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.engine.ledger.transitions import Step
from topobus.values.errors import InvariantError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Adoption, Allocation, Holding, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind


def _owner(kind: OwnerKind, uid: str) -> Owner:
    return Owner(kind=kind, namespace="kubelet", name="x", uid=uid)


def _adopt(ledger: Ledger, owner: Owner, *names: str, cpus: tuple[str, ...] = ()) -> Step | Refusal:
    devices = {"gpu": names, "cpu": cpus}
    return transitions.adopt(
        ledger, Adoption(owner=owner, devices=devices), op_id=f"op-{ledger.sequence}", decision_id="d"
    )


def test_adopt_keeps_the_rest_when_kubelet_hands_out_a_part_again() -> None:
    """A container that took over one of an older allocation's two GPUs leaves the other where it
    was: it may be in use still.
    """
    first = _adopt(Ledger(node="n"), _owner(OwnerKind.DEVICE_PLUGIN, "a"), "gpu-0", "gpu-1", cpus=("cpu-3",))
    assert isinstance(first, Step)

    second = _adopt(first.ledger, _owner(OwnerKind.DEVICE_PLUGIN, "b"), "gpu-1")

    assert isinstance(second, Step)
    older = second.ledger.allocations[_owner(OwnerKind.DEVICE_PLUGIN, "a").key].holdings[0]
    assert (older.devices, older.cpus, second.record.displaced) == (
        {"gpu": ("gpu-0",)},
        CpuSet(3),
        (_owner(OwnerKind.DEVICE_PLUGIN, "a"),),
    )


def test_adopt_forgets_the_older_when_nothing_is_left_to_it() -> None:
    """An allocation whose every device went on to another container is gone."""
    first = _adopt(Ledger(node="n"), _owner(OwnerKind.DEVICE_PLUGIN, "a"), "gpu-0")
    assert isinstance(first, Step)

    second = _adopt(first.ledger, _owner(OwnerKind.DEVICE_PLUGIN, "b"), "gpu-0", "gpu-1")

    assert isinstance(second, Step)
    assert list(second.ledger.allocations) == [_owner(OwnerKind.DEVICE_PLUGIN, "b").key]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (OwnerKind.DEVICE_PLUGIN, OwnerKind.CLAIM),
        (OwnerKind.CLAIM, OwnerKind.DEVICE_PLUGIN),
        (OwnerKind.CLAIM, OwnerKind.CLAIM),
        (OwnerKind.POD, OwnerKind.DEVICE_PLUGIN),
        (OwnerKind.POD, OwnerKind.CLAIM),
    ],
)
def test_adopt_is_refused_when_another_door_holds_the_device(older: OwnerKind, newer: OwnerKind) -> None:
    """A device is never handed out twice: whoever holds it is named, whichever door the second
    asker came through.
    """
    first = _adopt(Ledger(node="n"), _owner(older, "a"), "gpu-0")
    assert isinstance(first, Step)

    second = _adopt(first.ledger, _owner(newer, "b"), "gpu-0")

    assert isinstance(second, Refusal)
    assert [(reason.code, reason.facts["owner"]) for reason in second.reasons] == [
        ("device-held", _owner(older, "a").key)
    ]


def _adopt_share(ledger: Ledger, owner: Owner, name: str) -> Step | Refusal:
    op_id = f"op-{ledger.sequence}"
    return transitions.adopt(
        ledger, Adoption(owner=owner, devices={"gpu": (name,)}, shared={"gpu": (name,)}), op_id=op_id, decision_id="d"
    )


def test_adopt_lets_claims_share_a_device_when_all_of_them_have_a_share() -> None:
    """Owners of shares stand beside each other, and the ledger's own check agrees."""
    first = _adopt_share(Ledger(node="n"), _owner(OwnerKind.CLAIM, "a"), "gpu-0")
    assert isinstance(first, Step)

    second = _adopt_share(first.ledger, _owner(OwnerKind.CLAIM, "b"), "gpu-0")

    assert isinstance(second, Step)
    assert [allocation.holdings[0].devices for allocation in second.ledger.allocations.values()] == [
        {"gpu": ("gpu-0",)}
    ] * 2


@pytest.mark.parametrize("is_share_first", [True, False])
def test_adopt_is_refused_when_one_has_a_share_and_the_other_wants_the_whole(*, is_share_first: bool) -> None:
    """A share and the whole never live together, whichever comes first: the refused one is told of
    the holder.
    """
    ways = (_adopt_share, lambda ledger, owner, name: _adopt(ledger, owner, name))
    take, want = ways if is_share_first else ways[::-1]
    first = take(Ledger(node="n"), _owner(OwnerKind.CLAIM, "a"), "gpu-0")
    assert isinstance(first, Step)

    second = want(first.ledger, _owner(OwnerKind.CLAIM, "b"), "gpu-0")

    assert isinstance(second, Refusal)
    assert "gpu-0" in second.reasons[0].message


def test_check_finds_a_device_held_twice_when_only_one_of_the_two_has_a_share() -> None:
    """The last check of the ledger knows shares, too: it accepts nothing that the transitions would
    not make.
    """
    whole = Allocation(owner=_owner(OwnerKind.CLAIM, "a"), holdings=(Holding(devices={"gpu": ("gpu-0",)}),))
    share = Allocation(
        owner=_owner(OwnerKind.CLAIM, "b"), holdings=(Holding(devices={"gpu": ("gpu-0",)}, shared={"gpu": ("gpu-0",)}),)
    )

    with pytest.raises(InvariantError, match="gpu-0"):
        check_holders(Ledger(node="n", allocations={allocation.owner.key: allocation for allocation in (whole, share)}))
