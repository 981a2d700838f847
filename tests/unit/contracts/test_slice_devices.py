"""A device as it stands in a slice: times and amounts in the server's own form."""

from __future__ import annotations

import pytest

from topobus.domain.device import Device
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.kubernetes.api.limits import check_slice
from topobus.kubernetes.api.resource import Pool, SliceSpec
from topobus.kubernetes.api.slices import in_seconds, slice_device


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

    capacities = slice_device(device).capacity

    assert {name: capacity.value for name, capacity in capacities.items()} == {"lanes": "1k", "memory": "80Gi"}


@pytest.mark.parametrize("model", ["x" * 80, "ß" * 40, "a" + "ß" * 40], ids=["long", "two-bytes-each", "cut-within-a-character"])
def test_text_is_cut_where_the_server_counts_when_it_is_too_long(model: str) -> None:
    """The limit is one of bytes: a device with a long name in another script is shown, and not left out for it."""
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
    assert check_slice(SliceSpec(driver="gpu.topobus.dev", node_name="n", pool=pool, devices=(shown,))) == []
    assert text in (attribute.version, attribute.string)
