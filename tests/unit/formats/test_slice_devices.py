"""A device as it stands in a slice: times and amounts in the server's own form."""

from __future__ import annotations

import pytest

from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import Attribute, Pool, RequestPolicy, SliceDevice, SliceSpec, ValidRange
from topobus.formats.kubernetes.slice_limits import check_device
from topobus.formats.kubernetes.slices import fault_of_shares, health_reason, in_seconds, slice_device
from topobus.values.counters import CapacityPolicy, CounterUse
from topobus.values.device import Device
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState


def test_taint_keeps_the_faults_time_when_a_device_is_sick() -> None:
    """The taint says when the fault began, in whole seconds as the server writes it, and not when
    it was published.
    """
    fault = Condition(
        dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus", since="2026-01-02T03:04:05.678Z"
    )
    health = DeviceHealth(state=HealthState.UNHEALTHY, since="2026-01-01T00:00:00Z", conditions=(fault,))

    (taint,) = slice_device(Device(name="d", device_class="gpu", health=health)).taints

    assert (taint.key, taint.value, taint.effect, taint.time_added) == (
        "topobus.dev/health",
        "unhealthy",
        "NoExecute",
        "2026-01-02T03:04:05Z",
    )


@pytest.mark.parametrize(
    ("state", "reason"), [(HealthState.UNHEALTHY, "dirty"), (HealthState.UNKNOWN, "dirty"), (HealthState.DEGRADED, "")]
)
def test_reason_stands_beside_the_taint_when_a_device_may_not_be_handed_out(state: HealthState, reason: str) -> None:
    """Who waits for the device reads why.

    Of a device that may be had nothing is said, for its slice is not to change.
    """
    fault = Condition(dimension=Dimension.DRIVER, state=state, reason="dirty")
    device = slice_device(Device(name="d", device_class="gpu", health=DeviceHealth(state=state, conditions=(fault,))))

    assert [health_reason(device, taint) for taint in device.taints] == ([reason] if reason else [])
    assert ("healthReason" in device.attributes) is bool(reason)


def test_spare_has_a_taint_of_its_own_and_stays_listed() -> None:
    """No new claim gets it, and one that has it stays."""
    (taint,) = slice_device(Device(name="d", device_class="gpu", is_spare=True)).taints

    assert (taint.key, taint.value, taint.effect) == ("topobus.dev/spare", "true", "NoSchedule")


def test_taint_has_no_time_when_nobody_knows_it() -> None:
    """A fault without a time leaves the time to the server."""
    (taint,) = slice_device(Device(name="d", device_class="gpu", health=DeviceHealth(state=HealthState.UNKNOWN))).taints

    assert taint.time_added is None
    assert in_seconds("yesterday") == ""


def test_capacity_is_written_as_the_server_gives_it_back_when_it_is_a_round_number() -> None:
    """1000 comes back as 1k: written otherwise, every comparison would find a change."""
    device = Device(name="d", device_class="gpu", capacity={"memory": 80 << 30, "lanes": 1000})

    capacities = slice_device(device).capacity

    assert {name: capacity.value for name, capacity in capacities.items()} == {"lanes": "1k", "memory": "80Gi"}


@pytest.mark.parametrize(
    "model", ["x" * 80, "ß" * 40, "a" + "ß" * 40], ids=["long", "two-bytes-each", "cut-within-a-character"]
)
def test_text_is_cut_where_the_server_counts_when_it_is_too_long(model: str) -> None:
    """The limit is one of bytes: a device with a long name in another script is shown, and not left
    out for it.
    """
    shown = slice_device(Device(name="gpu-0", device_class="gpu", model=model))

    text = shown.attributes["model"].string
    assert text is not None
    assert model.startswith(text)
    assert 63 <= len(text.encode()) <= 64


@pytest.mark.parametrize("text", ["570.86.15", "1.2.3-rc.1", "570.86.05", "1.2.3-01", "1.2.3-a..b", "1.2.3-"])
def test_version_is_a_text_when_the_server_would_not_read_it_as_one(text: str) -> None:
    """Whatever a driver calls its version, the server takes the device."""
    shown = slice_device(Device(name="gpu-0", device_class="gpu", attributes={"driverVersion": text}))

    attribute = shown.attributes["driverVersion"]
    pool = Pool(name="n", resource_slice_count=1)
    assert check_slice(SliceSpec(driver="topobus.dev", node_name="n", pool=pool, devices=(shown,))) == []
    assert text in (attribute.version, attribute.string)


def test_slice_device_shows_shares_and_what_they_may_be_of() -> None:
    """A device that several may hold says so, with the amounts that each may have, within every
    limit of the API.
    """
    device = Device(
        name="nic-0",
        device_class="nic",
        capacity={"bandwidth": 25_000, "queues": 64, "slots": 20},
        allows_multiple=True,
        capacity_policies={
            "bandwidth": CapacityPolicy(default=1_000, minimum=1_000, step=1_000),
            "queues": CapacityPolicy(default=1, valid_values=(1, 2, 4)),
            "slots": CapacityPolicy(default=1),
        },
    )

    shown = slice_device(device)

    assert shown.allow_multiple_allocations is True
    assert shown.capacity["bandwidth"].request_policy == RequestPolicy(
        default="1k", valid_range=ValidRange(min="1k", step="1k")
    )
    assert shown.capacity["queues"].request_policy == RequestPolicy(default="1", valid_values=("1", "2", "4"))
    assert shown.capacity["slots"].request_policy == RequestPolicy(default="1")
    assert (fault_of_shares(device), check_device(shown)) == ("", [])


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        pytest.param(CapacityPolicy(minimum=1), "requestPolicy.default: wanted one", id="a range without default"),
        pytest.param(CapacityPolicy(default=0, minimum=1), "default: got 0, wanted 1 to 20", id="a default below"),
        pytest.param(
            CapacityPolicy(default=1, valid_values=(2, 4)), "wanted the default 1 among them", id="a default outside"
        ),
        pytest.param(
            CapacityPolicy(default=4, valid_values=(4, 2)), "wanted them in ascending order", id="values in disorder"
        ),
        pytest.param(
            CapacityPolicy(default=1, valid_values=tuple(range(1, 12))),
            "got 11 entries, wanted at most 10",
            id="eleven values",
        ),
        pytest.param(CapacityPolicy(default=1, valid_values=(1,), minimum=1), "not both", id="values and a range"),
        pytest.param(CapacityPolicy(default=1, step=2), "validRange.min: wanted one", id="a step without a beginning"),
        pytest.param(
            CapacityPolicy(default=1, minimum=1, maximum=30),
            "wanted at most the capacity's value 20",
            id="more than there is",
        ),
    ],
)
def test_shares_have_a_fault_when_a_server_would_refuse_the_policy(policy: CapacityPolicy, fault: str) -> None:
    """The driver's author reads at home what the API server would say of the whole slice."""
    device = Device(
        name="n", device_class="nic", allows_multiple=True, capacity={"slots": 20}, capacity_policies={"slots": policy}
    )

    assert fault in fault_of_shares(device)


def test_shares_have_a_fault_when_a_policy_has_no_capacity() -> None:
    """A policy under a name that the device has no capacity of."""
    device = Device(
        name="n", device_class="nic", allows_multiple=True, capacity_policies={"slots": CapacityPolicy(default=1)}
    )

    assert fault_of_shares(device) == "capacity_policies.slots: there is no such capacity"


def test_slice_device_shows_what_it_consumes_by_counter_set() -> None:
    """One entry a counter set, with its counters by name.

    A device that says nothing of sharing shows nothing of it.
    """
    uses = [("b", "x", 1), ("a", "y", 2), ("b", "w", 3)]
    device = Device(
        name="g",
        device_class="gpu",
        consumes=tuple(CounterUse(counter_set=name, counter=key, amount=amount) for name, key, amount in uses),
    )

    shown = slice_device(device)

    assert [
        (consumption.counter_set, {name: counter.value for name, counter in consumption.counters.items()})
        for consumption in shown.consumes_counters
    ] == [("a", {"y": "2"}), ("b", {"w": "3", "x": "1"})]
    assert slice_device(Device(name="g", device_class="gpu")) == SliceDevice(
        name="g", attributes={"class": Attribute(string="gpu")}
    )


def test_slice_device_tells_its_class_whatever_its_driver_says() -> None:
    """DeviceClasses select by the class, so a driver's own attribute of that name does not count."""
    device = Device(name="gpu-0", device_class="gpu", attributes={"class": "nic", "model": "own"}, model="field")

    attributes = slice_device(device).attributes

    assert (attributes["class"], attributes["model"]) == (Attribute(string="gpu"), Attribute(string="own"))
