"""The operator's setting `sharing`: which devices are shared, what of them can be had, and what is
refused.
"""

from __future__ import annotations

import msgspec
import pytest

from topobus.devicekit.sharing.shared_devices import SharedPool, check_sharing_settings, odd_sharing, with_sharing
from topobus.devicekit.sharing.sharing import read_sharing, with_operators_sharing
from topobus.formats.kubernetes.slices import slice_device
from topobus.values.counters import CapacityPolicy, CounterUse
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.errors import ConfigError
from topobus.values.pools import Condition, Pool

MIB = 1 << 20
WHERE = (Condition(field="model", glob="*H100*"),)
GPU = Device(
    name="gpu-0", device_class="gpu", driver="nvidia", model="H100", pool="gpu-shared", capacity={"memory": 81559 * MIB}
)


def shared(name: str = "gpu-shared", **fields: object) -> SharedPool:
    """A shared pool, as settings are read."""
    conditions = [msgspec.to_builtins(condition) for condition in WHERE]
    return msgspec.convert({"name": name, "where": conditions, "replicas": 4, **fields}, SharedPool)


def test_with_sharing_gives_shares_and_a_default_of_an_equal_part() -> None:
    """A shared GPU has as many shares as replicas, and a claim that names no amount gets one share
    and an equal part of the memory in whole MiB.
    """
    (device,) = with_sharing([GPU], [shared()])

    assert device.allows_multiple
    assert device.sharing == DeviceSharing(replicas=4)
    assert device.capacity == {"memory": 81559 * MIB, "shares": 4}
    assert device.capacity_policies == {
        "memory": CapacityPolicy(default=20389 * MIB, minimum=MIB, step=MIB),
        "shares": CapacityPolicy(default=1, minimum=1, step=1),
    }


def test_with_sharing_is_undone_when_the_setting_goes() -> None:
    """A device that is not shared any more is as its driver reported it, also when the driver does
    not report it anew.
    """
    (device,) = with_sharing([GPU], [shared()])

    assert with_sharing([device], []) == (GPU,)


def test_with_sharing_changes_nothing_at_a_second_time() -> None:
    """The inventory of the step before goes through the same setting again."""
    once = with_sharing([GPU], [shared()])

    assert with_sharing(once, [shared()]) == once


@pytest.mark.parametrize(
    ("device", "moving", "why"),
    [
        (msgspec.structs.replace(GPU, allows_multiple=True), (), "its driver shares it already"),
        (msgspec.structs.replace(GPU, capacity={"shares": 2}), (), "its driver counts shares of its own"),
        (
            msgspec.structs.replace(GPU, consumes=(CounterUse(counter_set="card", counter="slices", amount=1),)),
            (),
            "it is a partition that is made for its owner",
        ),
        (GPU, ("nvidia",), "driver nvidia moves its devices into a pod, where no other pod has them"),
    ],
    ids=["shared-by-driver", "counts-shares", "made-for-its-owner", "moves"],
)
def test_with_sharing_leaves_alone_what_cannot_be_shared(device: Device, moving: tuple[str, ...], why: str) -> None:
    """What cannot be shared stays as its driver says, and a warning names it."""
    assert with_sharing([device], [shared()], moving) == (device,)
    assert odd_sharing([device], [shared()], moving) == (f"sharing gpu-shared: device gpu-0 is not shared: {why}",)


def test_slice_device_of_a_shared_gpu_has_policies_that_kubernetes_takes() -> None:
    """The slice says that several may have the device, and how much of it."""
    (device,) = with_sharing([GPU], [shared()])

    shown = slice_device(device)

    assert shown.allow_multiple_allocations is True
    policy = shown.capacity["memory"].request_policy
    assert policy is not None
    assert policy.valid_range is not None
    assert (policy.default, policy.valid_range.min, policy.valid_range.step) == ("20389Mi", "1Mi", "1Mi")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replicas": 1}, ">= 2"),
        ({"replicas": 500}, "<= 128"),
        ({"policy": "balance"}, "Invalid enum value 'balance'"),
        ({"time_slice": "Short"}, "needs the strategy TimeSlicing"),
        ({"strategy": "MPS", "time_slice": "Short"}, "needs the strategy TimeSlicing"),
        ({"strategy": "Fair"}, "Invalid enum value 'Fair'"),
    ],
)
def test_shared_pool_refuses_settings_that_mean_nothing(fields: dict[str, object], words: str) -> None:
    """A mistake is named when the settings are read."""
    with pytest.raises(msgspec.ValidationError, match=words):
        shared(**fields)


def test_check_sharing_settings_refuses_a_name_that_a_pool_has() -> None:
    """One resource cannot be whole devices and shares."""
    with pytest.raises(ConfigError, match="'gpu-shared' is listed twice"):
        check_sharing_settings("gpu", [shared()], [Pool(name="gpu-shared", where=WHERE)])


def test_check_sharing_settings_refuses_a_name_of_another_class() -> None:
    """A name tells the class."""
    with pytest.raises(ConfigError, match="begins with 'gpu-'"):
        check_sharing_settings("gpu", [shared("shared")], [])


def test_with_operators_sharing_comes_before_the_claims_word() -> None:
    """The operator's strategy is what a claim without one gets; what a claim says wins."""
    (device,) = with_sharing([GPU], [shared(strategy="TimeSlicing", time_slice="Short")])
    claims = {"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", "strategy": "Exclusive"}

    alone = read_sharing(with_operators_sharing([device], (), {})["gpu-0"])
    with_claim = read_sharing(with_operators_sharing([device], (claims,), {})["gpu-0"])

    assert alone is not None
    assert not hasattr(alone, "reasons")
    assert (alone.strategy, alone.time_slicing_config and alone.time_slicing_config.interval) == (
        "TimeSlicing",
        "Short",
    )
    assert with_claim is not None
    assert with_claim.strategy == "Exclusive"
