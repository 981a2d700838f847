"""How many answers about kubelet's own allocations a ledger keeps: few, for nobody asks them again
and every service reads the ledger.
"""

from topobus.engine.ledger import transitions
from topobus.engine.ledger.transitions import Step
from topobus.values.ledger import Adoption, Ledger
from topobus.values.request import Owner, OwnerKind


def _adopt(ledger: Ledger, kind: OwnerKind, number: int) -> Ledger:
    owner = Owner(kind=kind, name="x", uid=f"u-{number}")
    step = transitions.adopt(
        ledger,
        Adoption(owner=owner, devices={"gpu": (f"gpu-{kind}-{number}",)}),
        op_id=f"{kind}-{number:03d}",
        decision_id="d",
    )
    assert isinstance(step, Step)
    return step.ledger


def test_ledger_keeps_few_answers_about_kubelets_allocations_and_all_others() -> None:
    """The newest ones stay, for a look at what has just happened.

    A claim's answer is asked again after a restart.
    """
    ledger = Ledger(node="n")
    for number in range(100):
        ledger = _adopt(_adopt(ledger, OwnerKind.DEVICE_PLUGIN, number), OwnerKind.CLAIM, number)
        ledger = transitions.announce(ledger, ledger.operations)

    plugins = sorted(key for key in ledger.operations if key.startswith(OwnerKind.DEVICE_PLUGIN))
    claims = [key for key in ledger.operations if key.startswith(OwnerKind.CLAIM)]
    # The last one came with a claim's answer after it, and nothing was to be let go then.
    assert plugins[0] >= "device-plugin-067"
    assert plugins[-1] == "device-plugin-099"
    assert len(claims) == 100
    assert len(ledger.allocations) == 200


def test_ledger_keeps_answers_whose_event_is_not_out() -> None:
    """What happened is told, however much has happened since."""
    ledger = Ledger(node="n")
    for number in range(100):
        ledger = _adopt(ledger, OwnerKind.DEVICE_PLUGIN, number)

    assert len(transitions.unannounced(ledger)) == 100


def test_ledger_keeps_every_answer_while_there_are_few() -> None:
    """Nothing is forgotten before there are more than 32 answers about kubelet's allocations."""
    ledger = Ledger(node="n")
    for number in range(32):
        ledger = transitions.announce(_adopt(ledger, OwnerKind.DEVICE_PLUGIN, number), [f"device-plugin-{number:03d}"])
    kept = len(ledger.operations)

    ledger = transitions.announce(_adopt(ledger, OwnerKind.DEVICE_PLUGIN, 32), ["device-plugin-032"])

    assert kept == 32
    assert sorted(ledger.operations)[0] == "device-plugin-001"
    assert len(ledger.operations) == 32
