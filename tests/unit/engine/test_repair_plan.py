"""What a repair does next, as a table: by its step, the device, its holders, a person, and time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert, structs

from topobus.engine.repair.fleet import Fleet
from topobus.engine.repair.plan import obstacle, operations, plan
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import RepairState
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, PerformedOperation
from topobus.values.device import Device, Inventory
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb, Maintenance
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.repair import (
    REPAIR_POLICY,
    Protected,
    Repair,
    RepairEnd,
    RepairPause,
    RepairPolicy,
    RepairRule,
    RepairRuleSettings,
)
from topobus.values.request import Owner, OwnerKind

_NOW_S = 10_000.0
_RULE = RepairRuleSettings(
    name="lost",
    device_class="gpu",
    reasons=("gpu-lost",),
    steps=("maintain", "drain", "wait-idle", "reset", "forgive", "wait-healthy", "return"),
    grace_s=100.0,
    idle_within_s=1000.0,
    within_s=500.0,
    hold_s=60.0,
)
_POLICY = RepairPolicy(rules=(_RULE,), at_once=2, at_once_per_node=2, per_hour=9)
_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u")
_PLACE = ("n1", "gpu", "gpu-0")
_DONE = Operated(health=HEALTHY)


def _sick(*reasons: str, state: HealthState = HealthState.UNHEALTHY) -> DeviceHealth:
    conditions = tuple(Condition(dimension=Dimension.COMPUTE, state=state, reason=reason) for reason in reasons)
    return DeviceHealth(state=state, conditions=conditions)


_LOST = _sick("gpu-lost")


def _fleet(
    *healths: DeviceHealth,
    held: tuple[str, ...] = (),
    person: DeviceVerb | None = None,
    withheld: Maintenance | None = None,
    parents: tuple[str, ...] = (),
) -> Fleet:
    devices = tuple(
        Device(
            name=f"gpu-{index}",
            device_class="gpu",
            health=health,
            maintenance=withheld if index == 0 else None,
            parent=parents[index] if parents else "",
        )
        for index, health in enumerate(healths)
    )
    inventory = Inventory(node="n1", device_class="gpu", generation=1, devices=devices)
    allocation = Allocation(owner=_POD, holdings=(Holding(devices={"gpu": held}),))
    ledger = Ledger(node="n1", allocations={_POD.key: allocation} if held else {})
    operation = DeviceOperation(device_class="gpu", device="gpu-0", verb=person or DeviceVerb.FORGIVE, who="ada")
    done = PerformedOperation(op_id="person-1", operation=operation, time="", result=_DONE)
    maintenance = ClassMaintenance(node="n1", device_class="gpu", operations=(done,) if person is not None else ())
    return Fleet({("n1", "gpu"): inventory}, {"n1": ledger}, {("n1", "gpu"): maintenance})


def _repair(step: int, **changes: Any) -> Repair:
    repair = Repair(
        id="r-1",
        node="n1",
        device_class="gpu",
        device="gpu-0",
        rule=convert(_RULE, RepairRule, from_attributes=True),
        codes=("gpu-lost",),
        began_s=_NOW_S,
        step_s=_NOW_S,
        step=step,
        withheld_by="r-1.1.0.0",
    )
    return structs.replace(repair, **changes)


def _after(repair: Repair, fleet: Fleet, waited_s: float = 0.0, **changes: Any) -> tuple[str, str]:
    """Give the step after a plan, or how the repair ended; and why it gives up."""
    state = RepairState(repairs=(repair,), **changes)
    after = plan(_POLICY, state, fleet, _NOW_S + waited_s)
    if after.under_way:
        return (after.repairs[0].what, after.repairs[0].why)
    note = after.events[-1].repair
    assert note is not None
    return (note.what, note.why)


def test_repair_begins_with_its_first_operation_when_a_rule_names_the_fault() -> None:
    """It asks for maintenance over nothing: a person's would be refused."""
    after = plan(_POLICY, RepairState(), _fleet(_LOST, HEALTHY), _NOW_S)
    (asked,) = operations(after, _NOW_S)

    assert (asked.request.op_id, asked.repair.place) == (f"{asked.repair.id}.1.0.0", _PLACE)
    assert (asked.request.operation.verb, asked.request.operation.expects) == (DeviceVerb.MAINTAIN, "")
    assert (asked.request.operation.who, after.begun_s) == (REPAIR_POLICY, (_NOW_S,))
    assert [(event.verb, event.text) for event in after.events] == [("repair", "repair gpu-0 by rule lost (gpu-lost)")]


@pytest.mark.parametrize(
    ("reasons", "health", "begins"),
    [
        (("gpu-lost",), _LOST, True),
        (("*",), _sick("xid"), True),
        (("*",), _sick("link-narrow", state=HealthState.DEGRADED), False),
        (("link-narrow",), _sick("link-narrow", state=HealthState.DEGRADED), True),
        (("unmonitored",), _sick("unmonitored", state=HealthState.UNKNOWN), True),
        (("gpu-lost",), _sick("gpu-lost", state=HealthState.RECOVERING), False),
        (("xid",), _LOST, False),
    ],
)
def test_rule_applies_when_it_names_a_present_fault(
    reasons: tuple[str, ...], health: DeviceHealth, *, begins: bool
) -> None:
    """What heals is no fault, and a device that works has to be named."""
    policy = RepairPolicy(rules=(structs.replace(_RULE, reasons=reasons),))

    after = plan(policy, RepairState(), _fleet(health), _NOW_S)

    assert bool(after.repairs) is begins


@pytest.mark.parametrize(
    ("policy", "state", "fleet", "code"),
    [
        pytest.param(
            structs.replace(_POLICY, rules=(structs.replace(_RULE, steps=("observe",)),)),
            RepairState(),
            _fleet(_LOST),
            "repair-observed",
            id="observe",
        ),
        pytest.param(
            _POLICY,
            RepairState(pause=RepairPause(who="ada", since_s=0.0)),
            _fleet(_LOST),
            "repair-paused",
            id="paused",
        ),
        pytest.param(
            _POLICY,
            RepairState(),
            _fleet(_LOST, withheld=Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="ada", op_id="p")),
            "repair-kept-back",
            id="a person has it",
        ),
        pytest.param(
            structs.replace(_POLICY, per_hour=1),
            RepairState(begun_s=(_NOW_S - 3599.0,)),
            _fleet(_LOST),
            "repair-budget",
            id="in the hour",
        ),
        pytest.param(
            structs.replace(_POLICY, at_once=1),
            RepairState(repairs=(_repair(2, device="gpu-1"),)),
            _fleet(_LOST, _LOST, held=("gpu-1",)),
            "repair-budget",
            id="at once",
        ),
        pytest.param(
            structs.replace(_POLICY, protect=(Protected(device_class="gpu"),)),
            RepairState(),
            _fleet(_sick("gpu-lost", state=HealthState.DEGRADED), _sick("xid")),
            "repair-protected",
            id="the last that works",
        ),
        pytest.param(
            structs.replace(_POLICY, protect=(Protected(device_class="gpu"),)),
            RepairState(),
            _fleet(_LOST, HEALTHY, parents=("", "gpu-0")),
            "repair-protected",
            id="its last part",
        ),
    ],
)
def test_repair_does_not_begin_and_says_why_when_something_forbids_it(
    policy: RepairPolicy, state: RepairState, fleet: Fleet, code: str
) -> None:
    """The reason is the one that `topobus repair explain` shows."""
    reason = obstacle(policy, state, fleet, _PLACE, _NOW_S)

    assert reason is not None
    assert reason.code == code
    assert _PLACE not in [repair.place for repair in plan(policy, state, fleet, _NOW_S).under_way]


def test_device_that_does_not_work_is_repaired_when_the_others_are_protected() -> None:
    """It is none of the healthy ones that stay."""
    policy = structs.replace(_POLICY, protect=(Protected(device_class="gpu"),))

    assert obstacle(policy, RepairState(), _fleet(_LOST, HEALTHY), _PLACE, _NOW_S) is None


@pytest.mark.parametrize(
    ("repair", "fleet", "waited_s", "expected"),
    [
        pytest.param(_repair(2), _fleet(_LOST, held=("gpu-0",)), 900.0, ("wait-idle", ""), id="held"),
        pytest.param(_repair(2), _fleet(_LOST, held=("gpu-1",)), 0.0, ("reset", ""), id="idle"),
        pytest.param(
            _repair(2),
            _fleet(_LOST, HEALTHY, held=("gpu-1",), parents=("", "gpu-0")),
            0.0,
            ("wait-idle", ""),
            id="part",
        ),
        pytest.param(
            _repair(2), _fleet(_LOST, held=("gpu-0",)), 1001.0, ("gave-up", "it is still held"), id="held for long"
        ),
        pytest.param(_repair(2, attempt=1), _fleet(_LOST), 9.0, ("wait-idle", ""), id="refused lately"),
        pytest.param(_repair(2, attempt=1), _fleet(_LOST), 10.0, ("reset", ""), id="refused a while ago"),
        pytest.param(_repair(3, is_asked=True), _fleet(_LOST), 499.0, ("reset", ""), id="not answered"),
        pytest.param(
            _repair(3, is_asked=True),
            _fleet(_LOST),
            501.0,
            ("gave-up", "reset is not done after 501 s"),
            id="never answered",
        ),
        pytest.param(_repair(5), _fleet(_LOST), 499.0, ("wait-healthy", ""), id="sick"),
        pytest.param(
            _repair(5), _fleet(_LOST), 501.0, ("gave-up", "it is still unhealthy: gpu-lost"), id="sick for long"
        ),
        pytest.param(_repair(5, healthy_s=_NOW_S), _fleet(HEALTHY), 59.0, ("wait-healthy", ""), id="healthy just now"),
        pytest.param(_repair(5, healthy_s=_NOW_S), _fleet(HEALTHY), 60.0, ("return", ""), id="healthy for long"),
        pytest.param(_repair(2), _fleet(), 0.0, ("gone", "it is not published any more"), id="gone"),
        pytest.param(
            _repair(2),
            _fleet(_LOST, person=DeviceVerb.FORGIVE),
            0.0,
            ("taken-over", "ada: forgive"),
            id="a person forgave it",
        ),
        pytest.param(
            _repair(2, seen="person-1"),
            _fleet(_LOST, person=DeviceVerb.RETURN),
            0.0,
            ("reset", ""),
            id="a person before",
        ),
    ],
)
def test_repair_goes_on_as_far_as_its_device_lets_it(
    repair: Repair, fleet: Fleet, waited_s: float, expected: tuple[str, str]
) -> None:
    """One row a case: the step, what is seen, the time since it began, and what follows."""
    assert _after(repair, fleet, waited_s) == expected


def test_drain_waits_for_its_grace_when_the_device_is_held() -> None:
    """Owners may end by themselves; without an owner nothing is waited for."""
    fleet, repair = _fleet(_LOST, held=("gpu-0",)), _repair(1)
    waiting = plan(_POLICY, RepairState(repairs=(repair,)), fleet, _NOW_S + 99.0)
    drained = plan(_POLICY, RepairState(repairs=(repair,)), fleet, _NOW_S + 100.0)
    free = plan(_POLICY, RepairState(repairs=(repair,)), _fleet(_LOST), _NOW_S)

    assert operations(waiting, _NOW_S) == ()
    assert [asked.request.operation.is_draining for asked in operations(drained, _NOW_S)] == [True]
    assert [asked.request.operation.is_draining for asked in operations(free, _NOW_S)] == [True]


def test_time_of_a_pause_does_not_count_when_it_is_over() -> None:
    """A repair that waited through a pause has its whole time afterwards."""
    pause = RepairPause(who="ada", since_s=_NOW_S, until_s=_NOW_S + 5000.0)

    assert _after(_repair(5), _fleet(_LOST), 5400.0, pause=pause) == ("wait-healthy", "")
    assert operations(RepairState(repairs=(_repair(3, is_asked=True),), pause=pause), _NOW_S) == ()


@pytest.mark.parametrize(
    ("step", "result", "expected"),
    [
        (0, _DONE, ("drain", 1, 0)),
        (3, _DONE, ("forgive", 1, 0)),
        (3, refuse("device-held", "held"), ("wait-idle", 1, 1)),
        (3, refuse("reset-unsupported", "no"), ("maintain", 2, 0)),
        (6, _DONE, None),
    ],
)
def test_answer_moves_a_repair_on(step: int, result: Operated | Refusal, expected: tuple[str, int, int] | None) -> None:
    """A refusal for a holder waits for idleness again, another one is a failed try."""
    repair = _repair(step, is_asked=True, rule=structs.replace(_repair(0).rule, tries=2))
    after = plan(_POLICY, RepairState(repairs=(repair,)), _fleet(_LOST), _NOW_S, {repair.op_id: result})

    assert [(each.what, each.trial, each.attempt) for each in after.under_way] == ([expected] if expected else [])


def test_answer_is_ignored_when_the_repair_has_moved_on() -> None:
    """An answer may come twice, or late."""
    state = RepairState(repairs=(_repair(3, is_asked=True),))

    assert plan(_POLICY, state, _fleet(_LOST), _NOW_S, {"r-1.1.0.0": _DONE}) is state


def test_person_takes_over_when_the_device_service_refuses_what_was_expected() -> None:
    """The copies were late, the device service was not."""
    repair = _repair(6, is_asked=True)
    refusal = refuse("maintenance-changed", "exclude by ada", who="ada")
    after = plan(_POLICY, RepairState(repairs=(repair,)), _fleet(_LOST), _NOW_S, {repair.op_id: refusal})

    assert [repair.end for repair in after.repairs] == [RepairEnd.TAKEN_OVER]


def test_document_stays_readable_when_a_node_refuses_at_length() -> None:
    """A document out of bounds would be begun again, with all repairs lost."""
    repair = _repair(3, is_asked=True, trial=9)
    refusal = Refusal(reasons=tuple(Reason(code="reset-failed", message="why\n" * 10_000) for _ in range(9)))
    after = plan(_POLICY, RepairState(repairs=(repair,)), _fleet(_LOST), _NOW_S, {repair.op_id: refusal})

    assert decode(encode(after), RepairState, where="repairs") == after
    assert len(after.repairs[0].why) < 600
    assert after.repairs[0].why.startswith("reset was refused: why why")


def test_repair_gives_up_without_steps_when_the_evidence_is_back_after_its_last_try() -> None:
    """The device is withheld, one decision calls a person, and the next plans change nothing."""
    fleet = _fleet(_LOST, HEALTHY)
    state = RepairState(repairs=(_repair(6, is_asked=True),))
    repaired = plan(_POLICY, state, _fleet(HEALTHY, HEALTHY), _NOW_S, {"r-1.1.6.0": _DONE})
    back = plan(_POLICY, repaired, fleet, _NOW_S + 60.0)
    (asked,) = operations(back, _NOW_S + 60.0)
    ended = plan(_POLICY, back, fleet, _NOW_S + 61.0, {asked.request.op_id: _DONE})

    assert asked.request.operation.verb is DeviceVerb.MAINTAIN
    assert "gpu-lost came back after try 1" in asked.request.operation.why
    assert [(left.end, left.withheld_by) for left in ended.repairs] == [(RepairEnd.GAVE_UP, asked.request.op_id)]
    assert [event.repair.end for event in ended.events if event.repair and event.repair.end] == [
        RepairEnd.REPAIRED,
        RepairEnd.GAVE_UP,
    ]
    assert plan(_POLICY, ended, fleet, _NOW_S + 1e6) is ended


def test_left_device_is_repaired_again_when_its_evidence_changes_or_a_person_forgives_it() -> None:
    """The new repair takes over the maintenance of the old one."""
    withheld = Maintenance(verb=DeviceVerb.MAINTAIN, why="", who=REPAIR_POLICY, op_id="r-1.1.0.0")
    fleet = _fleet(_LOST, withheld=withheld)
    state = plan(_POLICY, RepairState(repairs=(_repair(2),)), _fleet(_LOST, held=("gpu-0",)), _NOW_S + 1001.0)
    gave_up = plan(_POLICY, state, fleet, _NOW_S + 1002.0)
    policy = structs.replace(_POLICY, rules=(structs.replace(_RULE, reasons=("*",)),))
    changed = _fleet(_sick("gpu-lost", "xid"), withheld=withheld)
    forgiven = _fleet(_LOST, person=DeviceVerb.FORGIVE, withheld=withheld)
    returned = _fleet(_LOST, person=DeviceVerb.RETURN)

    def begun(policy: RepairPolicy, fleet: Fleet) -> list[str]:
        return [repair.withheld_by for repair in plan(policy, gave_up, fleet, _NOW_S + 1003.0).under_way]

    assert [left.end for left in gave_up.repairs] == [RepairEnd.GAVE_UP]
    assert begun(_POLICY, fleet) == []
    assert begun(policy, changed) == ["r-1.1.0.0"]
    assert begun(_POLICY, forgiven) == ["r-1.1.0.0"]
    assert begun(_POLICY, returned) == []


@pytest.mark.parametrize(
    ("changes", "what", "text"),
    [
        ({}, "drain", "step 2 of 7, try 1 of 1"),
        ({"why": "the reset failed"}, "give up", "the reset failed"),
        ({"why": "the reset failed", "end": RepairEnd.GAVE_UP}, "gave-up", "the reset failed"),
    ],
    ids=["under way", "giving up", "ended"],
)
def test_repair_reads_as_its_step_or_its_end(changes: dict[str, Any], what: str, text: str) -> None:
    """What people are shown: a step of so many, or why it gives up or ended."""
    repair = _repair(1, **changes)

    assert (repair.what, repair.text) == (what, text)
