"""What a repeated operation is told: the same answer while it is true, and the truth when its
devices have been let go since.
"""

from __future__ import annotations

import pytest

from support.alignment_nodes import container, dgx, pod
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.engine.ledger.transitions import Step
from topobus.values.ledger import Adoption, Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Owner, OwnerKind

CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u-1")
TRAINER = pod("trainer", container(cpus=2, gpu=1))


def _codes(outcome: object) -> list[str]:
    assert isinstance(outcome, Refusal)
    return [reason.code for reason in outcome.reasons]


def _placed() -> Step:
    outcome = place(dgx(), TRAINER)
    assert isinstance(outcome, Placement)
    return transitions.reserve(
        Ledger(node="demo-node"), op_id="op-1", request=TRAINER, placement=outcome, decision_id="d-1"
    )


def _adopted(ledger: Ledger, *names: str, op_id: str) -> Step:
    step = transitions.adopt(
        ledger, Adoption(owner=CLAIM, devices={"gpu": names, "cpu": ("cpu-3",)}), op_id=op_id, decision_id=f"d-{op_id}"
    )
    assert isinstance(step, Step)
    return step


def test_place_is_told_the_same_when_its_devices_are_still_held() -> None:
    """A retry of what still holds gets the very placement again."""
    step = _placed()

    assert transitions.placed_by(step.ledger, step.record) == step.record.outcome


@pytest.mark.parametrize("operations_between", [0, 40], ids=["at-once", "after-many-others"])
def test_place_is_told_of_the_release_when_its_devices_were_let_go(operations_between: int) -> None:
    """However new the stored answer is, it never hands out again what somebody else may have been
    given since.
    """
    step = _placed()
    ledger = transitions.release(step.ledger, op_id="op-2", owner=TRAINER.owner, decision_id="d-2").ledger
    for number in range(operations_between):
        ledger = transitions.release(ledger, op_id=f"other-{number}", owner=CLAIM, decision_id="d").ledger
    record = transitions.recorded_operation(ledger, "op-1")
    assert record is not None

    assert _codes(transitions.placed_by(ledger, record)) == ["released-since"]


def test_place_is_told_the_same_when_its_owner_adopted_the_devices_meanwhile() -> None:
    """The controller places a claim and the gateway adopts it: the placement stays true, though
    another decision wrote it last.
    """
    step = _placed()
    assert isinstance(step.record.outcome, Placement)
    devices = step.record.outcome.containers[0]
    names = {**devices.devices, "cpu": tuple(f"cpu-{cpu}" for cpu in devices.cpus)}
    adopted = transitions.adopt(
        step.ledger, Adoption(owner=TRAINER.owner, devices=names), op_id="op-2", decision_id="d-2"
    )
    assert isinstance(adopted, Step)

    assert transitions.placed_by(adopted.ledger, step.record) == step.record.outcome


def test_adopt_is_told_the_same_when_its_devices_are_still_held() -> None:
    """A gateway that died after the adoption goes on with it."""
    step = _adopted(Ledger(node="n"), "gpu-0", op_id="op-1")

    assert transitions.adopted_by(step.ledger, step.record, {"gpu": ("gpu-0",), "cpu": ("cpu-3",)}) is None


def test_adopt_is_told_of_the_release_when_the_claim_was_let_go_between() -> None:
    """A claim that was released and asks under its old operation holds nothing: saying yes would
    hand out a device that nobody holds.
    """
    step = _adopted(Ledger(node="n"), "gpu-0", op_id="op-1")
    ledger = transitions.release(step.ledger, op_id="op-2", owner=CLAIM, decision_id="d-2").ledger

    assert _codes(transitions.adopted_by(ledger, step.record, {"gpu": ("gpu-0",)})) == ["released-since"]


@pytest.mark.parametrize("asked", [{"gpu": ("gpu-1",)}, {"gpu": ("gpu-0", "gpu-1")}, {"cpu": ("cpu-4",)}])
def test_adopt_is_refused_when_the_same_operation_asks_for_other_devices(asked: dict[str, tuple[str, ...]]) -> None:
    """A claim that was allocated anew between two tries never gets its new devices by the answer
    for the old ones.
    """
    step = _adopted(Ledger(node="n"), "gpu-0", op_id="op-1")

    assert _codes(transitions.adopted_by(step.ledger, step.record, asked)) == ["released-since"]


def test_adopt_is_told_of_the_displacement_when_kubelet_gave_its_device_on() -> None:
    """An allocation of kubelet's that gave way to a newer one does not
    come back by asking again.
    """
    first, second = (
        Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=uid) for uid in "ab"
    )
    step = transitions.adopt(
        Ledger(node="n"), Adoption(owner=first, devices={"gpu": ("gpu-0",)}), op_id="op-1", decision_id="d-1"
    )
    assert isinstance(step, Step)
    newer = transitions.adopt(
        step.ledger, Adoption(owner=second, devices={"gpu": ("gpu-0",)}), op_id="op-2", decision_id="d-2"
    )
    assert isinstance(newer, Step)

    assert _codes(transitions.adopted_by(newer.ledger, step.record, {"gpu": ("gpu-0",)})) == ["released-since"]
