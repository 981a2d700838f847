"""Which CPUs an adoption takes of the groups that it names, and how it is answered again."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import dgx
from topobus.engine.ledger import transitions
from topobus.engine.ledger.adoptions import Taken, adopted_cpus, read_adoption
from topobus.engine.ledger.transitions import Step
from topobus.formats.messages.messages import AdoptRequest
from topobus.values.device import Device
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

EMPTY = Ledger(node="demo-node")
# Two small groups of the demo machine's first socket that share CPU 4; its cores are (n, n + 112).
SMALL = structs.replace(
    dgx(), cores=tuple(core for core in dgx().cores if core.cpus.lowest in range(8)), unhealthy_cpus=CpuSet(7)
)
GROUPS = tuple(
    Device(name=name, device_class="cpu", allows_multiple=True, near_cpus=cpus)
    for name, cpus in (("near", CpuSet.parse("0-4,112-116")), ("far", CpuSet.parse("4-7,116-119")))
)


def request(uid: str = "a", op_id: str = "op", *, single: tuple[str, ...] = (), **counts: int) -> AdoptRequest:
    """Ask for so many CPUs of each group, and for single CPUs by name."""
    return AdoptRequest(
        op_id=op_id,
        owner=Owner(kind=OwnerKind.CLAIM, name="claim", uid=uid),
        devices={"cpu": (*counts, *single)},
        group_cpus=counts,
    )


def taken(asked: AdoptRequest, ledger: Ledger = EMPTY) -> dict[str, str]:
    """Choose, and return the CPUs of each group."""
    outcome = read_adoption(asked, ledger, SMALL, GROUPS)
    assert isinstance(outcome, Taken), outcome
    chosen = {name: str(cpus) for name, cpus in outcome.groups.items()}
    named = {name for name in outcome.adoption.devices["cpu"] if name not in asked.devices["cpu"]}
    assert named == {f"cpu-{cpu}" for cpus in outcome.groups.values() for cpu in cpus}
    return chosen


def adopted(ledger: Ledger, asked: AdoptRequest) -> Ledger:
    """Write an adoption into the ledger, as topology does."""
    outcome = read_adoption(asked, ledger, SMALL, GROUPS)
    assert isinstance(outcome, Taken), outcome
    step = transitions.adopt(ledger, outcome.adoption, op_id=asked.op_id, decision_id="d", groups=outcome.groups)
    assert isinstance(step, Step), step
    return step.ledger


def codes(outcome: object) -> list[str]:
    """The codes of a refusal."""
    assert isinstance(outcome, Refusal), outcome
    return [reason.code for reason in outcome.reasons]


def test_group_gives_its_own_cpus_by_whole_cores() -> None:
    """Two CPUs are the two threads of one core of that group."""
    assert taken(request(near=2)) == {"near": "0,112"}


def test_groups_of_one_claim_share_no_cpu() -> None:
    """CPU 4 lies in both; the group that comes first by name has it, and an unhealthy one is left."""
    assert taken(request(far=6, near=8)) == {"far": "4-6,116-118", "near": "0-3,112-115"}


@pytest.mark.parametrize(
    ("asked", "others", "owned"),
    [
        (request(near=10), request("b", "other", near=2), None),
        (request(near=10, single=("cpu-0",)), None, None),
        (request(near=10), None, CpuSet.parse("0-3,112-115")),
        (request(far=8), None, None),
    ],
    ids=["another claim has two", "one is named singly", "two are not Topobus'", "one is unhealthy"],
)
def test_group_is_refused_when_too_few_of_its_cpus_are_free(
    asked: AdoptRequest, others: AdoptRequest | None, owned: CpuSet | None
) -> None:
    """What others hold, the claim names, the operator keeps, or is sick is chosen of no group."""
    ledger = adopted(EMPTY, others) if others is not None else EMPTY

    outcome = read_adoption(structs.replace(asked, owned_cpus=owned), ledger, SMALL, GROUPS)

    assert codes(outcome) == ["not-enough-cpus"]
    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].facts["device"] in asked.group_cpus
    assert "free" in outcome.reasons[0].facts


def test_unknown_group_is_refused_by_its_name() -> None:
    """A group that the cpu service does not list any more."""
    outcome = read_adoption(request(gone=2), EMPTY, SMALL, GROUPS)

    assert codes(outcome) == ["unknown-device"]


@pytest.mark.parametrize(("count", "cpus"), [(2, "2,114"), (4, "0-1,112-113")])
def test_owner_keeps_its_cpus_of_a_group_when_it_asks_for_as_many(count: int, cpus: str) -> None:
    """The first free core would be another one by now; another count is chosen again."""
    ledger = adopted(adopted(EMPTY, request("b", "op-1", near=4)), request("a", "op-2", near=2))
    freed = transitions.release(ledger, op_id="op-3", owner=request("b").owner, decision_id="d").ledger

    assert taken(request("a", "op-4", near=count), freed) == {"near": cpus}


def test_kept_cpus_are_chosen_of_no_other_group() -> None:
    """CPU 4 was given as one of `near`: it is not given again as one of `far`."""
    ledger = adopted(EMPTY, request("a", "op-1", near=10))

    assert taken(request("a", "op-2", near=10, far=4), ledger) == {"far": "5-6,117-118", "near": "0-4,112-116"}


def test_adoption_is_answered_again_with_the_same_cpus() -> None:
    """The asker whose answer was lost gets what the ledger has."""
    asked = request(near=2, far=2)
    ledger = adopted(EMPTY, asked)

    assert adopted_cpus(asked, ledger, ledger.operations["op"]) == {"far": CpuSet(4, 116), "near": CpuSet(0, 112)}


def test_adoption_is_told_released_when_its_cpus_are_gone() -> None:
    """Released since, or adopted again with another count: both say so, and admin access loses
    nothing.
    """
    asked = request(near=2)
    ledger = adopted(EMPTY, asked)
    record = ledger.operations["op"]
    released = transitions.release(ledger, op_id="op-2", owner=asked.owner, decision_id="d-2").ledger
    changed = adopted(ledger, request(op_id="op-3", near=4))
    admin = structs.replace(asked, devices={"gpu": ("gpu-0",)}, group_cpus={}, is_shared=True)
    of_none = structs.replace(admin, group_cpus={"gone": 0})

    assert codes(adopted_cpus(asked, released, record)) == ["released-since"]
    assert codes(adopted_cpus(asked, changed, record)) == ["released-since"]
    assert adopted_cpus(admin, released, record) == {}
    assert codes(adopted_cpus(of_none, released, record)) == ["released-since"]


def test_adoption_without_groups_is_checked_against_the_inventories() -> None:
    """A device that no service lists is refused, one that is there is taken as it was asked."""
    owner = request().owner
    listed = AdoptRequest(op_id="op", owner=owner, devices={"gpu": ("gpu-7",)})
    unlisted = AdoptRequest(op_id="op", owner=owner, devices={"gpu": ("gpu-9",)})

    assert read_adoption(listed, EMPTY, SMALL, GROUPS) == Taken(adoption=listed)
    assert codes(read_adoption(unlisted, EMPTY, SMALL, GROUPS)) == ["unknown-device"]
