"""Who gives way to whom when one device is allocated through two of kubelet's resources."""

from topobus.engine.ledger import transitions
from topobus.engine.ledger.transitions import Step
from topobus.values.ledger import Adoption, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind


def _adopt(ledger: Ledger, resource: str, uid: str) -> Step | Refusal:
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=resource, uid=uid)
    return transitions.adopt(
        ledger, Adoption(owner=owner, devices={"gpu": ("gpu-0",)}), op_id=f"op-{ledger.sequence}", decision_id="d"
    )


def test_adopt_is_refused_when_another_resource_of_kubelets_holds_the_device() -> None:
    """A device that went into another pool while a container has it is not free: kubelet counts
    resources apart, so only the holder's word frees it.
    """
    first = _adopt(Ledger(node="n"), "topobus.dev/gpu", "a")
    assert isinstance(first, Step)

    other, same = _adopt(first.ledger, "topobus.dev/gpu-h100", "b"), _adopt(first.ledger, "topobus.dev/gpu", "b")

    assert isinstance(other, Refusal)
    assert [reason.message for reason in other.reasons] == ["device-plugin kubelet/topobus.dev/gpu holds gpu-0"]
    assert isinstance(same, Step)
