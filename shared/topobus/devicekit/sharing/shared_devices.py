"""Shares devices as their operator wants it: which of them, how often kubelet is offered them, and
what of them a claim may have. Pure.

Shared devices get their sharing, shares as a capacity, and the amounts that a claim may request. A
device that cannot be shared gives a warning. A device whose driver shares it already stays as its
driver reports it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from topobus.formats.kubernetes.classic.classic_parameters import TIME_SLICING
from topobus.formats.kubernetes.slices import fault_of_shares
from topobus.values.counters import CapacityPolicy
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing, SharePolicy
from topobus.values.errors import ConfigError
from topobus.values.pools import Pool, fault_of_pools
from topobus.values.shares import MEMORY, SHARES

__all__ = ["SharedPool", "check_sharing_settings", "odd_sharing", "with_sharing"]

_MIB = 1 << 20


class SharedPool(Pool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that several containers have at once, under a resource name of their own. `name` and
    `where` as a pool has them.
    """

    replicas: Annotated[int, Meta(ge=2, le=128)]
    """How many shares a device has: kubelet is offered it so many times, and claims use the
    same shares. 128 at most: kubelet gets a line for each."""
    policy: SharePolicy = SharePolicy.SPREAD
    """`spread`: the next replica is of the device with the fewest in use; `pack`: of the one with
    the most."""
    refuses_many: bool = True
    """A container that asks kubelet for more than one replica is refused, for two shares of one GPU
    are not twice a GPU. False: it gets them, of several devices first with `spread`."""
    strategy: Literal["", "TimeSlicing", "MPS"] = ""
    """What is set up on a device while it has an owner of a share and no claim sets anything else;
    empty: nothing."""
    time_slice: Literal["", "Default", "Short", "Medium", "Long"] = ""
    """With the strategy TimeSlicing: how long each container's turn is; empty: as the driver has
    it."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other.

        Errors: raises ValueError.
        """
        super().__post_init__()
        if self.time_slice and self.strategy != TIME_SLICING:
            raise ValueError(
                f"sharing {self.name}: time_slice is {self.time_slice}, which needs the strategy {TIME_SLICING}"
            )


def check_sharing_settings(device_class: str, sharing: Sequence[SharedPool], pools: Sequence[Pool]) -> None:
    """Refuse shared pools that conflict with each other, or with the pools.

    Errors: raises ConfigError that names the pool.
    """
    fault = fault_of_pools(device_class, sharing) or (sharing and fault_of_pools(device_class, (*sharing, *pools)))
    if fault:
        raise ConfigError(
            f"{device_class}: sharing: {fault}", next_step="docs/reference/pools.md has the rules", key="sharing"
        )


def with_sharing(
    devices: Sequence[Device], sharing: Sequence[SharedPool], moving: Collection[str] = ()
) -> tuple[Device, ...]:
    """Share the devices that are in a shared pool (`with_pools` came before), and only those.

    Shapes: moving — drivers whose devices move into a pod's sandbox, where only one pod can have
    them.
    """
    by_name = {pool.name: pool for pool in sharing}
    return tuple(_shared(_unshared(device), by_name.get(device.pool), moving) for device in devices)


def odd_sharing(
    devices: Sequence[Device], sharing: Sequence[SharedPool], moving: Collection[str] = ()
) -> tuple[str, ...]:
    """List devices that are in a shared pool and are still given whole (or as their driver shares
    them), with the reason.
    """
    by_name = {pool.name: pool for pool in sharing}
    odd: list[str] = []
    for device in devices:
        pool = by_name.get(device.pool)
        if pool is not None and device.sharing is None:
            odd.append(f"sharing {pool.name}: device {device.name} is not shared: {_fault(device, pool, moving)}")
    return tuple(odd)


def _shared(device: Device, pool: SharedPool | None, moving: Collection[str]) -> Device:
    return device if pool is None or _fault(device, pool, moving) else _with_shares(device, pool)


def _fault(device: Device, pool: SharedPool, moving: Collection[str]) -> str:
    if device.driver in moving:
        return f"driver {device.driver} moves its devices into a pod, where no other pod has them"
    if device.consumes and not device.uuid:
        # A partition without an identity of its own may be made when it is given to an owner, and
        # removed when that owner leaves.
        return "it is a partition that is made for its owner"
    if device.allows_multiple:
        return "its driver shares it already"
    if SHARES in device.capacity:
        return f"its driver counts {SHARES} of its own"
    return fault_of_shares(_with_shares(device, pool))


def _with_shares(device: Device, pool: SharedPool) -> Device:
    # A capacity without a policy would go whole to the first claim, and no other claim could have a
    # share.
    policies = {
        name: CapacityPolicy(default=amount // pool.replicas, minimum=0, step=1)
        for name, amount in device.capacity.items()
    }
    policies[SHARES] = CapacityPolicy(default=1, minimum=1, step=1)
    memory = device.capacity.get(MEMORY, 0) // pool.replicas // _MIB * _MIB
    if memory:
        policies[MEMORY] = CapacityPolicy(default=memory, minimum=_MIB, step=_MIB)
    return msgspec.structs.replace(
        device,
        allows_multiple=True,
        capacity={**device.capacity, SHARES: pool.replicas},
        capacity_policies={**device.capacity_policies, **policies},
        sharing=DeviceSharing(
            replicas=pool.replicas,
            policy=pool.policy,
            refuses_many=pool.refuses_many,
            strategy=pool.strategy,
            time_slice=pool.time_slice,
        ),
    )


def _unshared(device: Device) -> Device:
    """Return a device as its driver reported it. A known device that its driver does not show now
    was already shared.
    """
    if device.sharing is None:
        return device
    capacity = {name: amount for name, amount in device.capacity.items() if name != SHARES}
    return msgspec.structs.replace(device, allows_multiple=False, capacity=capacity, capacity_policies={}, sharing=None)
