"""What an operator's word makes of devices, and what stands after each operation."""

from __future__ import annotations

import pytest

from topobus.devicekit.maintenance.maintenance import (
    OPERATIONS_KEPT,
    changed_by,
    fault_of_expectation,
    forgiven,
    performed,
    sticky_signs,
    with_forgiveness,
    with_maintenance,
    with_operation,
)
from topobus.engine.health.inventory_merge import DriverView
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, PerformRequest
from topobus.values.device import Device
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState, Observation
from topobus.values.maintenance import DeviceOperation, DeviceVerb, Maintenance

EMPTY = ClassMaintenance(node="n1", device_class="gpu")
GPU = Device(name="gpu-0", device_class="gpu")


def request(
    verb: DeviceVerb, *, why: str = "fan", time: str = "t1", is_draining: bool = False, op_id: str = "op-1"
) -> PerformRequest:
    """An operation on gpu-0."""
    operation = DeviceOperation(
        device_class="gpu", device="gpu-0", verb=verb, why=why, who="ada", is_draining=is_draining
    )
    return PerformRequest(op_id=op_id, operation=operation, time=time)


@pytest.mark.parametrize(
    ("verb", "words"),
    [(DeviceVerb.MAINTAIN, "under maintenance by ada: fan"), (DeviceVerb.EXCLUDE, "excluded by ada: fan")],
)
def test_device_is_not_allocatable_and_healthy_when_it_is_kept_back(verb: DeviceVerb, words: str) -> None:
    """Nobody new gets it, and whoever reads it is told who and why; its health is what it was."""
    stands = changed_by(EMPTY, request(verb))

    (device,) = with_maintenance([GPU], stands.devices)

    assert (device.is_allocatable, device.why_not, device.health) == (False, words, HEALTHY)


def test_device_is_allocatable_when_it_was_returned() -> None:
    """Nothing is left of the word."""
    stands = changed_by(changed_by(EMPTY, request(DeviceVerb.EXCLUDE)), request(DeviceVerb.RETURN))
    kept_back = with_maintenance([GPU], {"gpu-0": Maintenance(verb=DeviceVerb.EXCLUDE, why="", who="ada")})

    assert with_maintenance(kept_back, stands.devices) == (GPU,)


def test_devices_are_the_same_values_when_nothing_is_said_of_them() -> None:
    """A word about one device is no news of its neighbours."""
    stands = changed_by(EMPTY, request(DeviceVerb.MAINTAIN))
    other = Device(name="gpu-1", device_class="gpu")

    assert with_maintenance([other], stands.devices)[0] is other


def test_time_stays_when_the_same_is_said_again_and_changes_when_it_drains() -> None:
    """A toleration that ends counts from when the taint came, and a
    stronger taint is another one.
    """
    first = changed_by(EMPTY, request(DeviceVerb.MAINTAIN, time="t1"))
    again = changed_by(first, request(DeviceVerb.MAINTAIN, why="fan ordered", time="t2"))
    draining = changed_by(again, request(DeviceVerb.MAINTAIN, time="t3", is_draining=True))

    assert [stands.devices["gpu-0"].since for stands in (first, again, draining)] == ["t1", "t1", "t3"]
    assert again.devices["gpu-0"].why == "fan ordered"


@pytest.mark.parametrize("verb", [DeviceVerb.FORGIVE, *(verb for verb in DeviceVerb if verb.needs_no_owner)])
def test_word_stands_when_a_fault_is_forgiven_or_the_device_reset(verb: DeviceVerb) -> None:
    """Only `return` gives a device back."""
    stands = changed_by(EMPTY, request(DeviceVerb.MAINTAIN))

    assert changed_by(stands, request(verb)) == stands


@pytest.mark.parametrize(
    ("in_force", "expects", "is_refused"),
    [
        (EMPTY, None, False),
        (EMPTY, "", False),
        (EMPTY, "op-1", True),
        (changed_by(EMPTY, request(DeviceVerb.MAINTAIN)), None, False),
        (changed_by(EMPTY, request(DeviceVerb.MAINTAIN)), "", True),
        (changed_by(EMPTY, request(DeviceVerb.MAINTAIN)), "op-1", False),
        (changed_by(EMPTY, request(DeviceVerb.MAINTAIN, op_id="op-2")), "op-1", True),
    ],
)
def test_operation_is_refused_when_it_expects_another_maintenance(
    in_force: ClassMaintenance, expects: str | None, *, is_refused: bool
) -> None:
    """A person, who expects nothing, is never refused."""
    operation = DeviceOperation(
        device_class="gpu", device="gpu-0", verb=DeviceVerb.RETURN, who="repair-policy", expects=expects
    )

    refusal = fault_of_expectation(in_force, operation)

    assert (refusal is not None) is is_refused
    assert refusal is None or refusal.reasons[0].code == "maintenance-changed"


def test_newest_answers_are_kept_when_there_were_too_many() -> None:
    """The newest is found, the oldest is gone, and one that is kept twice stands once."""
    stands = EMPTY
    for number in range(OPERATIONS_KEPT + 1):
        stands = with_operation(stands, request(DeviceVerb.MAINTAIN, op_id=f"op-{number}"), Operated(health=HEALTHY))
    stands = with_operation(stands, request(DeviceVerb.MAINTAIN, op_id="op-5"), Operated(health=HEALTHY))

    assert performed(stands, "op-0") is None
    assert performed(stands, "op-5") is not None
    assert len(stands.operations) == OPERATIONS_KEPT
    assert len({operation.op_id for operation in stands.operations}) == OPERATIONS_KEPT


def test_evidence_is_sticky_when_it_is_not_the_one_that_was_forgiven() -> None:
    """What was forgiven and is seen still is not sticky any more.

    Another value of the same reason is news, and so is the neighbour's.
    """
    old, new = (
        Observation(
            dimension=Dimension.MEMORY,
            state=HealthState.UNHEALTHY,
            reason="xid",
            evidence={"value": value},
            is_sticky=True,
        )
        for value in ("48", "79")
    )
    views = {"toy": DriverView(observations={"gpu-0": (old,), "gpu-1": (old,)})}
    signs = {"gpu-0": sticky_signs(views, "gpu-0")}

    after = with_forgiveness({"toy": DriverView(observations={"gpu-0": (old, new), "gpu-1": (old,)})}, signs)[
        "toy"
    ].observations

    assert {name: [sign.is_sticky for sign in seen] for name, seen in after.items()} == {
        "gpu-0": [False, True],
        "gpu-1": [True],
    }


def test_sticky_faults_of_one_device_are_lifted_when_it_is_forgiven() -> None:
    """Its neighbour's stay."""
    fault = Condition(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="xid", is_sticky=True)
    sick = [
        Device(name=name, device_class="gpu", health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(fault,)))
        for name in ("gpu-0", "gpu-1")
    ]

    after = forgiven(sick, {"gpu-0"})

    assert [device.health.conditions[0].is_sticky for device in after] == [False, True]
