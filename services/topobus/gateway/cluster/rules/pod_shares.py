"""Shared devices of which pods have replicas, as a ResourceSlice shows them: with less capacity, so
that a scheduler counts on no more than is left.

Flows in: a slice's device, what pods have of it. Flows out: the device with less, or None when
not even the smallest share is left. A scheduler knows what claims have; what kubelet gave by
its device plugins it does not.
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
    """Add up what others than claims have of a device: capacity to amount."""
    sums: dict[str, int] = {}
    for owner, share in sharers:
        for name, amount in share.amounts.items() if owner.kind is not OwnerKind.CLAIM else ():
            sums[name] = sums.get(name, 0) + amount
    return sums


def beside_pods(device: SliceDevice, taken: Mapping[str, int]) -> SliceDevice | None:
    """Show what is left of a device beside pods.

    None when a claim that names no amount would find too little.
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
        # Read and written once more, it stands as the API server would give it back.
        capacity[name] = structs.replace(whole, value=str(Quantity.parse(str(Quantity.of(left, QuantityForm.BINARY)))))
    return structs.replace(device, capacity=capacity)
