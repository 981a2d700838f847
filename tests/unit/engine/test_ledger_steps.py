"""The ledger's single steps: what is asked again, what gives way, what refuses, and what is left
when a ledger has grown too large.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.alignment_nodes import container, dgx, owner, pod
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.engine.ledger.transitions import Step
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Adoption, Ledger, OperationRecord, PendingDecision
from topobus.values.outcome import MemoryBlock, Placement, Reason, Refusal
from topobus.values.request import Owner, OwnerKind

EMPTY = Ledger(node="demo-node")
REFUSAL = Refusal(
    reasons=(Reason(code="no-room", message="full", facts={"wanted": 1}), Reason(code="more", message="m"))
)
FIRST, SECOND = (
    Owner(kind=OwnerKind.CONTAINER, namespace="default", name="pod", uid=uid) for uid in ("first", "second")
)
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="claim", uid="c")


def _reserve(ledger: Ledger, op_id: str = "op") -> Step:
    request = pod("trainer", container(gpu=1))
    outcome = place(dgx(), request)
    assert isinstance(outcome, Placement)
    return transitions.reserve(ledger, op_id=op_id, request=request, placement=outcome, decision_id="d-1")


def _adopt(ledger: Ledger, owner: Owner = CLAIM, op_id: str = "op", **devices: tuple[str, ...]) -> Step:
    step = transitions.adopt(ledger, Adoption(owner=owner, devices=devices), op_id=op_id, decision_id=f"d-{op_id}")
    assert isinstance(step, Step), step
    return step


STEPS: dict[str, Callable[[Ledger], Step | Refusal]] = {
    "reserve": _reserve,
    "commit": lambda ledger: transitions.commit(
        ledger, op_id="op", owner=pod("trainer", container(gpu=1)).owner, decision_id="d-1"
    ),
    "name-pods": lambda ledger: transitions.name_pods(
        ledger, op_id="op", owner=CLAIM, decision_id="d-op-2", pods=(owner("trainer"),)
    ),
    "refusal": lambda ledger: transitions.record_refusal(
        ledger, op_id="op", verb="place", owner=CLAIM, decision_id="d-1", refusal=REFUSAL
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_step_changes_nothing_when_its_operation_is_known(name: str) -> None:
    """Whoever asks again gets the stored answer, whatever the ledger has become since."""
    before = _adopt(_reserve(EMPTY, "op-1").ledger, op_id="op-2", gpu=("gpu-7",)).ledger
    first = STEPS[name](before)
    assert isinstance(first, Step)
    assert not first.is_repeat

    again = STEPS[name](first.ledger)

    assert isinstance(again, Step)
    assert again.ledger is first.ledger
    assert again.record == first.ledger.operations["op"]
    assert again.is_repeat


def test_place_is_answered_with_its_refusal_when_it_is_asked_again() -> None:
    """A refusal stays true until the asker asks anew."""
    record = OperationRecord(verb="place", owner_key=CLAIM.key, outcome=REFUSAL)

    assert transitions.placed_by(EMPTY, record) is REFUSAL
    assert transitions.adopted_by(EMPTY, record, {}) is REFUSAL


def test_place_is_answered_from_the_allocation_when_its_answer_was_dropped() -> None:
    """An old answer has no reasons any more; what was placed stands in the ledger."""
    step = _reserve(EMPTY)
    placed = step.record.outcome
    assert isinstance(placed, Placement)
    slim = OperationRecord(verb="place", owner_key=step.record.owner_key, decision_id="d-1")

    again = transitions.placed_by(step.ledger, slim)

    assert isinstance(again, Placement)
    assert [(part.name, part.devices, part.cpus) for part in again.containers] == [
        (part.name, part.devices, part.cpus) for part in placed.containers
    ]


def test_place_is_answered_that_it_was_released_when_its_owner_holds_something_else_now() -> None:
    """The owner adopted other devices since: those of the old answer may be somebody else's."""
    step = _reserve(EMPTY)
    held = _adopt(
        transitions.release(step.ledger, op_id="op-2", owner=pod("trainer").owner, decision_id="d-2").ledger,
        pod("trainer").owner,
        "op-3",
        gpu=("gpu-7",),
    )

    again = transitions.placed_by(held.ledger, step.record)

    assert isinstance(again, Refusal)
    assert again.reasons[0].code == "released-since"


def test_place_is_answered_that_it_was_released_when_only_a_later_allocation_is_left() -> None:
    """Without its answer nothing shows what the operation placed: another decision's allocation does
    not stand for it.
    """
    ledger = _adopt(EMPTY, pod("trainer").owner, "op-2", gpu=("gpu-7",)).ledger
    slim = OperationRecord(verb="place", owner_key=pod("trainer").owner.key, decision_id="d-1")

    again = transitions.placed_by(ledger, slim)

    assert isinstance(again, Refusal)
    assert again.reasons[0].code == "released-since"


def test_newest_answers_keep_their_reasons() -> None:
    """Sixteen do, and the next older one has its first reason without numbers."""
    ledger = EMPTY
    for number in range(17):
        ledger = transitions.record_refusal(
            ledger, op_id=f"op-{number}", verb="place", owner=CLAIM, decision_id="d-1", refusal=REFUSAL
        ).ledger

    whole = [key for key, record in ledger.operations.items() if record.outcome == REFUSAL]

    assert whole == [f"op-{number}" for number in range(1, 17)]
    assert ledger.operations["op-0"].outcome == Refusal(reasons=(Reason(code="no-room", message="full"),))


def test_adoption_counts_its_memory_and_not_its_huge_pages() -> None:
    """A holding's bytes are those of ordinary memory."""
    blocks = (
        MemoryBlock(kind="memory", nodes=NodeSet(0), shares=((0, 1 << 30),)),
        MemoryBlock(kind="hugepages-2Mi", nodes=NodeSet(0), shares=((0, 1 << 21),)),
    )

    step = transitions.adopt(
        EMPTY, Adoption(owner=CLAIM, devices={"gpu": ("gpu-0",)}, memory=blocks), op_id="op", decision_id="d-1"
    )

    assert isinstance(step, Step)
    assert [holding.memory_bytes for holding in step.ledger.allocations[CLAIM.key].holdings] == [1 << 30]


@pytest.mark.parametrize("call", ["adopt", "again"])
def test_adoption_is_refused_when_a_cpu_has_no_such_name(call: str) -> None:
    """A CPU is named cpu-<id>; anything else is told, by name."""
    devices = {"cpu": ("cpu-x",)}

    if call == "adopt":
        answer = transitions.adopt(EMPTY, Adoption(owner=CLAIM, devices=devices), op_id="op", decision_id="d-1")
    else:
        answer = transitions.adopted_by(EMPTY, OperationRecord(verb="adopt", owner_key=CLAIM.key), devices)

    assert isinstance(answer, Refusal)
    assert answer.reasons[0].facts == {"resource": "cpu", "device": "cpu-x"}


def test_adoption_holds_nothing_when_the_owner_only_looks() -> None:
    """A shared look is written down as an operation and stands in nobody's way."""
    before = _adopt(EMPTY, op_id="op-1", gpu=("gpu-0",)).ledger

    step = transitions.adopt(
        before, Adoption(owner=FIRST, devices={"gpu": ("gpu-0",)}, is_shared=True), op_id="op-2", decision_id="d-2"
    )

    assert isinstance(step, Step)
    assert step.ledger.allocations == before.allocations
    assert step.ledger.operations["op-2"].owner_key == FIRST.key


def test_container_gives_way_when_kubelet_gave_its_cpus_to_another() -> None:
    """Both are kubelet's word about the same CPUs: the newer one is right."""
    before = _adopt(EMPTY, FIRST, "op-1", cpu=("cpu-1", "cpu-2")).ledger

    step = _adopt(before, SECOND, "op-2", cpu=("cpu-2",))

    assert step.ledger.allocations[SECOND.key].holdings[0].cpus == CpuSet(2)
    assert step.ledger.allocations[FIRST.key].holdings[0].cpus == CpuSet(1)
    assert step.record.displaced == (FIRST,)


def test_ledger_keeps_holdings_and_what_is_not_announced_when_it_sheds() -> None:
    """What only explains goes: reasons, inputs of decisions and old answers.

    What is held stays, and each decision that is not out yet.
    """
    request = pod("trainer", container(gpu=1))
    pending = PendingDecision(owner=CLAIM, time="2026-01-01T00:00:00Z", ledger_sequence=1, request=request, view=dgx())
    ledger = _reserve(EMPTY, "held").ledger
    for number in range(40):
        ledger = transitions.record_refusal(
            ledger, op_id=f"op-{number}", verb="place", owner=CLAIM, decision_id="d", refusal=REFUSAL, pending=pending
        ).ledger
    ledger = transitions.announce(ledger, [f"op-{number}" for number in range(1, 40)])

    shed = transitions.shed(ledger)

    assert shed.allocations == ledger.allocations
    assert [op_id for op_id, _ in transitions.unannounced(shed)] == ["held", "op-0"]
    assert sorted(shed.operations) == sorted(["held", "op-0", *(f"op-{number}" for number in range(24, 40))])
    waiting = shed.operations["op-0"].pending
    assert waiting is not None
    assert (waiting.request, waiting.view, waiting.time) == (None, None, "2026-01-01T00:00:00Z")
    newest = shed.operations["op-39"].outcome
    assert isinstance(newest, Refusal)
    assert [(reason.code, reason.facts) for reason in newest.reasons] == [("no-room", {})]


def test_release_is_no_decision_to_be_told_when_nothing_is_let_go() -> None:
    """Controller and gateway may both ask a node to let go of one claim: the second one frees
    nothing, so nobody is told of it twice.
    """
    held = _adopt(EMPTY, gpu=("gpu-0",)).ledger
    pending = PendingDecision(owner=CLAIM, time="2026-01-01T00:00:00Z", ledger_sequence=2)

    def release(ledger: Ledger, op_id: str, only: str = "") -> Step:
        step = transitions.release(
            ledger, op_id=op_id, owner=CLAIM, decision_id=f"d-{op_id}", only=only, pending=pending
        )
        assert isinstance(step, Step)
        return step

    other = release(held, "other", only="d-another")
    first = release(other.ledger, "first")
    second = release(first.ledger, "second")

    assert [step.record.pending for step in (other, first, second)] == [None, pending, None]
