"""The conditions of a Node about its device classes, and the taint that goes with them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from topobus.formats.kubernetes.resource import Taint
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.class_conditions import (
    ClassState,
    NodeCondition,
    class_conditions,
    read_taint,
    ready_classes,
    shown_conditions,
    taint_removal,
)
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState

BOOT = "0a1b2c3d-0000"
MARK = " (boot 0a1b2c3d)"
NOW = "2026-11-30T10:00:00Z"
EARLIER = "2026-11-30T09:00:00Z"
TAINT = Taint(key="topobus.dev/starting", effect="NoSchedule")


def gpu(number: int, reason: str = "", state: HealthState = HealthState.UNHEALTHY) -> Device:
    """A GPU, with one fault."""
    faults = (Condition(dimension=Dimension.DRIVER, state=state, reason=reason, message=f"{reason} of it"),)
    health = DeviceHealth(state=state, conditions=faults) if reason else DeviceHealth()
    return Device(name=f"gpu-{number}", device_class="gpu", health=health)


def gpus(*devices: Device, boot_id: str = BOOT, drivers: tuple[str, ...] = ("nvidia",), **more: Any) -> Inventory:
    """An inventory of the present boot."""
    return Inventory(
        node="n", device_class="gpu", generation=1, devices=devices, boot_id=boot_id, drivers=drivers, **more
    )


def condition(status: str, reason: str = "Ready", message: str = f"2 devices{MARK}") -> NodeCondition:
    """What a Node shows since an hour."""
    return NodeCondition(
        type="topobus.dev/gpu-ready", status=status, reason=reason, message=message, last_transition_time=EARLIER
    )


def decided(state: ClassState, before: NodeCondition | None = None) -> NodeCondition:
    """The condition of class gpu."""
    present = {} if before is None else {"gpu": before}
    return class_conditions({"gpu": state}, present, boot_id=BOOT, now=NOW)["gpu"]


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        pytest.param(
            ClassState(expected=2),
            "Starting",
            "its device service has not looked for devices since the node was booted; see whether it runs here",
            id="never-heard",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), boot_id="the boot before")),
            "Starting",
            "its device service has not looked for devices since the node was booted; see whether it runs here",
            id="heard-in-the-boot-before",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1)), expected=2, awaited=("its slices", "kubelet")),
            "Starting",
            "2 devices, 2 expected; waiting for its slices, kubelet",
            id="not-offered-yet",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1, "driver-hung", HealthState.UNKNOWN)), expected=2),
            "Starting",
            "1 device, 2 expected: no answer from the driver of gpu-1",
            id="driver-does-not-answer",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1)), expected=2), "Ready", "2 devices, 2 expected", id="all"
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1)), expected=1), "Ready", "2 devices, 1 expected", id="more"
        ),
        pytest.param(ClassState(inventory=gpus(), expected=0), "Ready", "no devices, 0 expected", id="none-expected"),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1, "no-kernel-driver"))), "Ready", "1 device", id="one-is-enough"
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0, "xid"), gpu(1)), expected=2), "Ready", "2 devices, 2 expected", id="sick"
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0, "no-kernel-driver", HealthState.RECOVERING))),
            "Ready",
            "1 device",
            id="driver-is-back",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1, "no-kernel-driver")), expected=2),
            "DriverMissing",
            "1 device, 2 expected: gpu-1 without a driver (no-kernel-driver of it); load it",
            id="one-without-driver",
        ),
        pytest.param(
            ClassState(inventory=gpus(*(gpu(number, "no-kernel-driver") for number in range(6)))),
            "DriverMissing",
            "no devices: gpu-0, gpu-1, gpu-2, gpu-3 and 2 more without a driver (no-kernel-driver of it); load it",
            id="all-without-driver",
        ),
        pytest.param(
            ClassState(inventory=gpus(drivers=(), warnings=("nvidia: plugin is skipped: denied",)), expected=1),
            "DriverMissing",
            "no devices, 1 expected: its service has loaded no plugin; nvidia: plugin is skipped: denied",
            id="no-plugin",
        ),
        pytest.param(
            ClassState(inventory=gpus(gpu(0), gpu(1, "fell-off-bus")), expected=2),
            "FewerThanExpected",
            "1 device, 2 expected; gpu-1 gone; compare with `topobus inventory`",
            id="one-gone",
        ),
        pytest.param(
            ClassState(inventory=gpus(warnings=("nvidia: libnvidia-ml.so.1 cannot be used", "more")), expected=1),
            "FewerThanExpected",
            "no devices, 1 expected; nvidia: libnvidia-ml.so.1 cannot be used; compare with `topobus inventory`",
            id="none",
        ),
    ],
)
def test_condition_tells_whether_the_class_is_ready(state: ClassState, reason: str, message: str) -> None:
    """Each reason comes with the numbers and what to do."""
    status = "True" if reason == "Ready" else "False"

    assert decided(state) == NodeCondition(
        type="topobus.dev/gpu-ready", status=status, reason=reason, message=message + MARK, last_transition_time=NOW
    )


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [
        pytest.param(ClassState(), True, id="unheard"),
        pytest.param(ClassState(inventory=gpus(gpu(0), boot_id="before")), True, id="not-looked-yet"),
        pytest.param(ClassState(inventory=gpus(gpu(0), gpu(1)), awaited=("its slices",)), True, id="not-published-yet"),
        pytest.param(ClassState(inventory=gpus(gpu(0, "unmonitored", HealthState.UNKNOWN))), True, id="unanswered"),
        pytest.param(ClassState(inventory=gpus(gpu(0), gpu(1))), True, id="as-before"),
        pytest.param(ClassState(inventory=gpus(gpu(0), gpu(1, "fell-off-bus")), expected=2), False, id="gone"),
        pytest.param(ClassState(inventory=gpus(gpu(0, "no-kernel-driver"))), False, id="driver-gone"),
    ],
)
def test_ready_class_stays_ready_when_nothing_speaks_against_it(state: ClassState, is_kept: bool) -> None:
    """What a gateway does not know yet changes nothing, evidence does."""
    before = condition("True")

    after = decided(state, before)

    assert (after == before) is is_kept
    assert after.last_transition_time == (EARLIER if is_kept else NOW)


def test_ready_class_is_starting_when_the_node_was_booted_again() -> None:
    """What the API server kept over a reboot counts for nothing."""
    before = condition("True", message="2 devices (boot ffffffff)")

    after = decided(ClassState(inventory=gpus(gpu(0), boot_id="ffffffff-0000")), before)

    assert (after.status, after.reason, after.last_transition_time) == ("False", "Starting", NOW)


def test_transition_time_stays_when_only_the_reason_changes() -> None:
    """It is the time of the status."""
    before = condition("False", "Starting", f"2 devices, 3 expected; waiting for its slices{MARK}")

    after = decided(ClassState(inventory=gpus(gpu(0)), expected=3), before)

    assert (after.status, after.reason, after.last_transition_time) == ("False", "FewerThanExpected", EARLIER)


def test_class_keeps_its_condition_until_the_next_boot_when_it_is_not_heard_of_any_more() -> None:
    """A store that lost its inventories takes no condition off, and a service that was removed does
    at the next boot.
    """
    old = condition("True", message="2 devices (boot ffffffff)")

    assert class_conditions({}, {"gpu": condition("True"), "nic": old}, boot_id=BOOT, now=NOW) == {
        "gpu": condition("True")
    }


def test_message_is_cut_when_it_is_long() -> None:
    """A Node is read by everybody, so it stays small; the boot is not cut off."""
    message = decided(ClassState(inventory=gpus(warnings=("x" * 2000,)), expected=1)).message

    assert len(message) == 512 + len(MARK)
    assert message.endswith(f"...{MARK}")


def test_conditions_of_others_are_left_out_when_a_node_is_read() -> None:
    """Ours are known by their type."""
    fields = {"status": "True", "reason": "Ready", "message": f"2 devices{MARK}", "lastTransitionTime": EARLIER}
    kinds = ("Ready", "topobus.dev/gpu-ready", "topobus.dev/-ready", "topobus.dev/gpu", "example.com/nic-ready")
    conditions = [{"type": kind, "lastHeartbeatTime": None, **fields} for kind in kinds]
    node = ApiObject(api_version="v1", kind="Node", metadata={}, status={"conditions": conditions})

    assert shown_conditions(node) == {"gpu": condition("True")}
    assert shown_conditions(structs.replace(node, status={"conditions": None})) == {}


def test_classes_are_ready_by_conditions_of_this_boot_alone() -> None:
    """What is False, or of the boot before, is not ready."""
    conditions = {
        "gpu": condition("True"),
        "nic": condition("True", message="2 devices (boot ffffffff)"),
        "fpga": condition("False", "Starting"),
    }

    assert ready_classes(conditions, BOOT) == {"gpu"}


@pytest.mark.parametrize(
    ("text", "taint"),
    [
        ("topobus.dev/starting:NoSchedule", TAINT),
        ("starting=yes:NoExecute", Taint(key="starting", value="yes", effect="NoExecute")),
    ],
)
def test_taint_is_read_in_kubelets_form(text: str, taint: Taint) -> None:
    """With and without a value."""
    assert read_taint(text) == taint


@pytest.mark.parametrize(
    "text", ["topobus.dev/starting", "a:Never", ":NoSchedule", "a b:NoSchedule", "a=b c:NoSchedule"]
)
def test_taint_is_refused_when_kubelet_would_refuse_it(text: str) -> None:
    """The error shows what was written and what was wanted."""
    with pytest.raises(ValueError, match=f"got '{text}', wanted KEY:EFFECT or KEY=VALUE:EFFECT"):
        read_taint(text)


def test_taint_removal_names_the_node_and_the_taint_that_were_seen() -> None:
    """Other taints stay, also where they come and go at the same time."""
    other = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    ours = {"key": TAINT.key, "effect": "NoSchedule", "timeAdded": EARLIER}
    node = ApiObject(api_version="v1", kind="Node", metadata={"uid": "u"}, spec={"taints": [other, ours]})

    assert taint_removal(node, TAINT) == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/spec/taints/1", "value": ours},
        {"op": "remove", "path": "/spec/taints/1"},
    ]
    assert taint_removal(node, Taint(key=TAINT.key, effect="NoExecute")) == []
    assert taint_removal(structs.replace(node, spec={}), TAINT) == []
