"""A device as it stands in a slice: times and amounts in the server's own form."""

from __future__ import annotations

from topobus.contracts.kubernetes.slices import in_seconds, slice_device
from topobus.domain.device import Device
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState


def test_taint_keeps_the_faults_time_when_a_device_is_sick() -> None:
    """The taint says when the fault began, in whole seconds as the server writes it, and not when it was published."""
    fault = Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus", since="2026-01-02T03:04:05.678Z")
    health = DeviceHealth(state=HealthState.UNHEALTHY, since="2026-01-01T00:00:00Z", conditions=(fault,))

    (taint,) = slice_device(Device(name="d", device_class="gpu", health=health)).taints

    assert (taint.key, taint.value, taint.effect, taint.time_added) == (
        "topobus.dev/health",
        "unhealthy",
        "NoExecute",
        "2026-01-02T03:04:05Z",
    )


def test_taint_has_no_time_when_nobody_knows_it() -> None:
    """A fault without a time leaves the time to the server."""
    (taint,) = slice_device(Device(name="d", device_class="gpu", health=DeviceHealth(state=HealthState.UNKNOWN))).taints

    assert taint.time_added is None
    assert in_seconds("yesterday") == ""


def test_capacity_is_written_as_the_server_gives_it_back_when_it_is_a_round_number() -> None:
    """1000 comes back as 1k: written otherwise, every comparison would find a change."""
    device = Device(name="d", device_class="gpu", capacity={"memory": 80 << 30, "lanes": 1000})

    found = slice_device(device).capacity

    assert {name: one.value for name, one in found.items()} == {"lanes": "1k", "memory": "80Gi"}
