"""When devices are let go: never while containers may be using them, whoever says that their claim
is over.
"""

from __future__ import annotations

import pytest

from topobus.engine.ledger import transitions
from topobus.engine.ledger.transitions import Step
from topobus.values.ledger import Adoption, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u-1")
OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u-2")
KUBELET = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="a")


def _adopt(ledger: Ledger, owner: Owner, *names: str, is_prepared: bool = False) -> Step | Refusal:
    return transitions.adopt(
        ledger,
        Adoption(owner=owner, devices={"gpu": names}, is_prepared=is_prepared),
        op_id=f"op-{ledger.sequence}",
        decision_id="d",
    )


def _prepared(*names: str) -> Ledger:
    step = _adopt(Ledger(node="n"), CLAIM, *names, is_prepared=True)
    assert isinstance(step, Step)
    return step.ledger


def _release(ledger: Ledger, **words: bool) -> Step | Refusal:
    return transitions.release(ledger, op_id=f"op-{ledger.sequence}", owner=CLAIM, decision_id="d", **words)


@pytest.mark.parametrize("next_owner", [OTHER, KUBELET], ids=["claim", "device-plugin"])
def test_release_is_refused_when_the_devices_are_prepared(next_owner: Owner) -> None:
    """A claim deleted under a running container frees nothing: its device goes to nobody, through
    no door.
    """
    ledger = _prepared("gpu-0")

    refused = _release(ledger)
    taken = _adopt(ledger, next_owner, "gpu-0")

    assert isinstance(refused, Refusal)
    assert [(reason.code, reason.facts) for reason in refused.reasons] == [("prepared", {"owner": CLAIM.key})]
    assert isinstance(taken, Refusal)


def test_release_goes_through_when_the_preparation_is_undone() -> None:
    """The gateway's word that nothing is prepared any more frees the devices, for whoever comes
    next.
    """
    step = _release(_prepared("gpu-0"), is_undone=True)

    assert isinstance(step, Step)
    assert step.record.devices == {"gpu": ("gpu-0",)}
    assert isinstance(_adopt(step.ledger, KUBELET, "gpu-0"), Step)


def test_release_keeps_the_devices_when_the_claim_stays_allocated() -> None:
    """Undone and still allocated: the devices stay the claim's own, and from now on whoever
    deallocates it lets them go.
    """
    kept = _release(_prepared("gpu-0"), is_undone=True, keeps_devices=True)
    assert isinstance(kept, Step)

    taken = _adopt(kept.ledger, OTHER, "gpu-0")
    freed = _release(kept.ledger)

    assert kept.record.devices == {}
    assert isinstance(taken, Refusal)
    assert isinstance(freed, Step)
    assert freed.ledger.allocations == {}


def test_adopt_keeps_a_claim_prepared_when_it_is_adopted_again() -> None:
    """The second driver of a claim, or a repeat, never takes the mark of the first one away."""
    again = _adopt(_prepared("gpu-0"), CLAIM, "gpu-0", "gpu-1")

    assert isinstance(again, Step)
    assert isinstance(_release(again.ledger), Refusal)


def test_release_leaves_a_newer_holding_alone_when_it_means_an_older_one() -> None:
    """Kubelet allocated the same devices again while the reconciliation was about to free them:
    what runs now keeps them.
    """
    first = transitions.adopt(
        Ledger(node="n"), Adoption(owner=KUBELET, devices={"gpu": ("gpu-0",)}), op_id="op-1", decision_id="d-1"
    )
    assert isinstance(first, Step)
    again = transitions.adopt(
        first.ledger, Adoption(owner=KUBELET, devices={"gpu": ("gpu-0",)}), op_id="op-2", decision_id="d-2"
    )
    assert isinstance(again, Step)

    stale = transitions.release(again.ledger, op_id="op-3", owner=KUBELET, decision_id="d-3", only="d-1")
    meant = transitions.release(again.ledger, op_id="op-3", owner=KUBELET, decision_id="d-3", only="d-2")

    assert isinstance(stale, Step)
    assert (stale.ledger.allocations, stale.record.devices) == (again.ledger.allocations, {})
    assert isinstance(meant, Step)
    assert meant.ledger.allocations == {}


def test_release_of_what_nobody_holds_is_no_error_when_it_keeps_devices() -> None:
    """A gateway may say twice that it has undone a claim, also one that the ledger never saw."""
    step = _release(Ledger(node="n"), is_undone=True, keeps_devices=True)

    assert isinstance(step, Step)
    assert step.ledger.allocations == {}
