"""Devices put into pools for the inventory, and what is said of pools that have nothing."""

from __future__ import annotations

import pytest

from topobus.engine.health.pool_assignment import check_pools, odd_pools, with_pools
from topobus.values.device import Device
from topobus.values.errors import ConfigError
from topobus.values.pools import Condition, Pool


def pool(name: str, model: str) -> Pool:
    """A pool of one model."""
    return Pool(name=name, where=(Condition(field="model", glob=model),))


def gpu(name: str, model: str, *, was_in: str = "") -> Device:
    """A GPU of a model."""
    return Device(name=name, device_class="gpu", model=model, pool=was_in)


def test_devices_get_their_pool_anew_when_the_pools_have_changed() -> None:
    """The inventory of the life before remembers pools that are gone.

    What counts is what is configured now.
    """
    devices = (
        gpu("gpu-0", "H100", was_in="gpu-old"),
        gpu("gpu-1", "A100", was_in="gpu-old"),
        gpu("gpu-2", "H100", was_in="gpu-h100"),
    )

    assert [device.pool for device in with_pools(devices, (pool("gpu-h100", "H100"),))] == ["gpu-h100", "", "gpu-h100"]


def test_warnings_tell_of_pools_that_have_nothing() -> None:
    """A pool without a device, and one whose devices earlier pools have.

    None for a node without devices of the class.
    """
    pools = (pool("gpu-all", "*"), pool("gpu-h100", "H100"), pool("gpu-b200", "B200"))
    devices = with_pools((gpu("gpu-0", "H100"), gpu("gpu-1", "A100")), pools)

    assert odd_pools(devices, pools) == (
        "pool gpu-h100: earlier pools (gpu-all) have all 1 devices that match",
        "pool gpu-b200: none of the 2 devices matches",
    )
    assert odd_pools((), pools) == ()


def test_service_refuses_pools_that_exclude_each_other() -> None:
    """The operator learns which pool, and where the rules stand, before anything is served."""
    with pytest.raises(ConfigError) as refused:
        check_pools("gpu", (pool("gpu-a", "*"), pool("gpu-a", "H100")))

    assert "gpu: pools: pool 'gpu-a' is listed twice" in str(refused.value)
