"""Assigns devices of a class to the operator's pools, for the inventory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topobus.values.device import Device
from topobus.values.errors import ConfigError
from topobus.values.pools import Pool, fault_of_pools, pool_of

__all__ = ["check_pools", "odd_pools", "with_pools"]


def check_pools(device_class: str, pools: Sequence[Pool]) -> None:
    """Refuse pools that conflict with each other.

    Errors: raises ConfigError that names the pool.
    """
    fault = fault_of_pools(device_class, pools)
    if fault:
        raise ConfigError(
            f"{device_class}: pools: {fault}", next_step="docs/reference/pools.md has the rules", key="pools"
        )


def with_pools(devices: Sequence[Device], pools: Sequence[Pool]) -> tuple[Device, ...]:
    """Put each device into the first pool that takes it, or into none."""
    named = ((device, pool_of(device, pools)) for device in devices)
    return tuple(
        device if device.pool == pool else msgspec.structs.replace(device, pool=pool) for device, pool in named
    )


def odd_pools(devices: Sequence[Device], pools: Sequence[Pool]) -> tuple[str, ...]:
    """Report pools that have nothing on this node though it has devices of the class.

    On another kind of node that is normal.
    """
    odd: list[str] = []
    for pool in pools if devices else ():
        taken = [device for device in devices if pool.takes(device)]
        if not taken:
            odd.append(f"pool {pool.name}: none of the {len(devices)} devices matches")
        elif not any(device.pool == pool.name for device in taken):
            others = ", ".join(sorted({device.pool for device in taken}))
            odd.append(f"pool {pool.name}: earlier pools ({others}) have all {len(taken)} devices that match")
    return tuple(odd)
