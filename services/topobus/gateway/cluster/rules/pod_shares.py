"""Reduces the capacity that a ResourceSlice shows of a shared device by what pods have of it, so
that a scheduler does not count on more than is left.

A scheduler knows what claims have, and does not know what kubelet's device plugins gave to pods. A
device without even the smallest share left is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from topobus.formats.kubernetes.resource import SliceDevice
from topobus.values.device_sharing import HeldShare
from topobus.values.quantity import Quantity, QuantityForm
from topobus.values.request import Owner, OwnerKind

__all__ = ["amounts_of_pods", "beside_pods"]


def amounts_of_pods(sharers: Iterable[tuple[Owner, HeldShare]]) -> dict[str, int]:
    """Add up what holders other than claims have of a device, by capacity."""
    sums: dict[str, int] = {}
    for owner, share in sharers:
        for name, amount in share.amounts.items() if owner.kind is not OwnerKind.CLAIM else ():
            sums[name] = sums.get(name, 0) + amount
    return sums


def beside_pods(device: SliceDevice, taken: Mapping[str, int]) -> SliceDevice | None:
    """Return a device with the capacity that pods leave.

    None when a claim that names no amount would not get enough.
    """
    capacity = dict(device.capacity)
    for name, amount in taken.items():
        whole = capacity.get(name)
        if whole is None:
            continue
        left = Quantity.parse(whole.value).nano // 10**9 - amount
        default = whole.request_policy.default if whole.request_policy is not None else None
        if left < 0 or (default is not None and left < Quantity.parse(default).nano // 10**9):
            return None
        # Parsed and written again, it has the form in which the API server returns it.
        capacity[name] = structs.replace(whole, value=str(Quantity.parse(str(Quantity.of(left, QuantityForm.BINARY)))))
    return structs.replace(device, capacity=capacity)
