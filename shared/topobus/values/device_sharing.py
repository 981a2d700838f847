"""How an operator has a device shared, and what one owner holds of a shared device.

`topobus.values.shares` derives the ids of replicas and the amounts that are left.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["DeviceSharing", "HeldShare", "SharePolicy"]

Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""In base units, as far as every reader of Kubernetes' numbers goes (int64)."""


class SharePolicy(StrEnum):
    """Which of several shared devices gives the next replica."""

    SPREAD = "spread"
    """The one with the fewest replicas in use."""
    PACK = "pack"
    """The one with the most, so that others stay empty."""


class DeviceSharing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a device is shared, as the operator configured it."""

    replicas: int
    """How many times kubelet is offered it; a claim's part is counted in the same shares."""
    policy: SharePolicy = SharePolicy.SPREAD
    refuses_many: bool = True
    """A container that asks for more than one replica is refused: two shares of one GPU are not
    twice a GPU."""
    strategy: str = ""
    """The strategy of its containers where a claim sets no other: `TimeSlicing`, `MPS`; empty:
    nothing is set."""
    time_slice: str = ""
    """With TimeSlicing: `Default`, `Short`, `Medium` or `Long`; empty: Default."""


class HeldShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one owner has of a shared device."""

    amounts: dict[str, Amount] = {}
    """Capacity to amount: `{"memory": 21474836480, "shares": 1}`."""
    replicas: tuple[int, ...] = ()
    """Which of the replicas that kubelet is offered, by number, sorted; none: a claim's share."""
