"""Shares of devices: the ids of replicas, the value of a replica, the shares that others hold of a
device, and what is left of it.

A replica is worth what a claim gets that names no amount, so both ways of asking count in the same
units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from topobus.values.device import Device
from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Holding

__all__ = [
    "MEMORY",
    "SHARES",
    "Shortage",
    "device_of_replica",
    "free_replicas",
    "number_of_replica",
    "replica_id",
    "replica_share",
    "share_without",
    "shares_held",
    "shortage_of",
]

MEMORY = "memory"
"""The capacity that is a device's own memory, in bytes."""
SHARES = "shares"
"""The capacity that counts shares: a device has as many as kubelet is offered replicas of it."""

# As NVIDIA's device plugin writes them: `GPU-…::0`.
_SEPARATOR = "::"


def replica_id(device: str, number: int) -> str:
    """Name a replica.

    >>> replica_id("gpu-0", 3)
    'gpu-0::3'
    """
    return f"{device}{_SEPARATOR}{number}"


def device_of_replica(name: str) -> str:
    """Name the device of a replica. A name that is not a replica's is returned unchanged.

    >>> device_of_replica("gpu-0::3"), device_of_replica("gpu-0")
    ('gpu-0', 'gpu-0')
    """
    return name.partition(_SEPARATOR)[0]


def number_of_replica(name: str) -> int | None:
    """Read a replica's number. Return None for a name that is not a replica's.

    >>> number_of_replica("gpu-0::3"), number_of_replica("gpu-0"), number_of_replica("gpu-0::03")
    (3, None, None)
    """
    device, _, digits = name.partition(_SEPARATOR)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 4):
        return None
    return int(digits) if replica_id(device, int(digits)) == name else None


def replica_share(device: Device, numbers: Iterable[int]) -> HeldShare:
    """Compute the share that these replicas of a device form together: of each capacity as much as
    a claim gets that names no amount, for each replica.

    >>> replica_share(Device(name="gpu-0", device_class="gpu", capacity={"cores": 8}), [2, 0]).replicas
    (0, 2)
    """
    replicas = tuple(sorted(set(numbers)))
    amounts = {
        name: policy.default * len(replicas)
        for name, policy in sorted(device.capacity_policies.items())
        if policy.default is not None
    }
    return HeldShare(amounts=amounts, replicas=replicas)


def share_without(share: HeldShare, taken: HeldShare) -> HeldShare | None:
    """Return what is left of a share after the replicas of another are taken out of it.

    Return None when no replica is left. A share without replicas is one whole, so nothing is left.
    """
    kept = tuple(number for number in share.replicas if number not in taken.replicas)
    if not kept:
        return None
    amounts = {name: amount * len(kept) // len(share.replicas) for name, amount in share.amounts.items()}
    return structs.replace(share, replicas=kept, amounts=amounts)


def shares_held(holdings: Iterable[tuple[str, Holding]]) -> dict[str, dict[str, dict[str, HeldShare]]]:
    """Collect the shares that owners hold of devices.

    Shapes: holdings — owner's key and what it holds; result — class to device to owner's key to its
            share.
    """
    held: dict[str, dict[str, dict[str, HeldShare]]] = {}
    for key, holding in holdings:
        for device_class, shares in holding.shares.items():
            for name, share in shares.items():
                held.setdefault(device_class, {}).setdefault(name, {})[key] = share
    return {device_class: dict(sorted(devices.items())) for device_class, devices in sorted(held.items())}


class Shortage(Struct, frozen=True, kw_only=True):
    """A capacity of which there is not enough left."""

    capacity: str
    wanted: int
    in_use: int
    total: int
    owners: tuple[str, ...] = ()
    """Keys of those who have some, sorted."""

    @property
    def left(self) -> int:
        """The amount left for a new owner. It is never below 0, even when a device has become
        smaller.
        """
        return max(0, self.total - self.in_use)


def shortage_of(device: Device, wanted: Mapping[str, int], held: Mapping[str, HeldShare]) -> Shortage | None:
    """Find the first capacity, by name, of which a device has too little left.

    What it does not have at all is not counted.

    >>> device = Device(name="gpu-0", device_class="gpu", capacity={"shares": 4})
    >>> shortage_of(device, {"shares": 2}, {"claim/a": HeldShare(amounts={"shares": 3})}).left
    1
    """
    for name, amount in sorted(wanted.items()):
        total = device.capacity.get(name)
        owners = {key: share.amounts[name] for key, share in held.items() if share.amounts.get(name)}
        if total is not None and amount and sum(owners.values()) + amount > total:
            return Shortage(
                capacity=name, wanted=amount, in_use=sum(owners.values()), total=total, owners=tuple(sorted(owners))
            )
    return None


def free_replicas(device: Device, held: Mapping[str, HeldShare]) -> int:
    """Count the replicas that a device can still give beside what others have of it.

    >>> device = Device(name="gpu-0", device_class="gpu", capacity={"shares": 4})
    >>> free_replicas(device, {})
    0
    """
    if device.sharing is None:
        return 0
    worth = replica_share(device, [0]).amounts
    counts = [device.sharing.replicas - sum(len(share.replicas) for share in held.values())]
    for name, amount in worth.items():
        total = device.capacity.get(name)
        if total is not None and amount:
            counts.append((total - sum(share.amounts.get(name, 0) for share in held.values())) // amount)
    return max(0, min(counts))
