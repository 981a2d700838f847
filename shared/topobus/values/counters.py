"""Amounts of devices: which amounts of a capacity may be asked for, and the counters that the
devices of one card share.

`topobus.values.partitions` computes from them which devices can be held together.
Source: resource.k8s.io/v1, requestPolicy, sharedCounters and consumesCounters, 1.36; KEP-4815 and
KEP-5075.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["CapacityPolicy", "CounterSet", "CounterUse"]

Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An amount in base units, as far as every reader of Kubernetes' numbers goes (int64)."""


class CapacityPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The amounts of one capacity that a claim may ask for, of a device that several claims may
    share.

    Either `valid_values` (ascending, at most 10) or a range that begins at `minimum`. With neither,
    any amount is allowed. An amount that is not allowed is rounded up to the next one that is.
    Without a policy, a claim that names no amount takes the whole capacity.
    """

    default: Amount | None = None
    """What a claim takes that names no amount, in base units; needed beside values or a range."""
    valid_values: tuple[Amount, ...] = ()
    minimum: Amount | None = None
    maximum: Amount | None = None
    """None: the whole capacity."""
    step: Amount | None = None
    """From `minimum` on; None: any amount of the range."""


class CounterUse(Struct, frozen=True, kw_only=True):
    """What a device takes of a counter while it is held.

    A device with several holders takes it once.
    """

    counter_set: str
    counter: str
    amount: Amount


class CounterSet(Struct, frozen=True, kw_only=True):
    """What one piece of hardware has for all of its partitions: 7 slices and 80 GiB of a card."""

    name: str
    """A DNS label that begins with the class, unique in the inventory."""
    counters: dict[str, Amount] = {}
    """By the counters' names, which are DNS labels; at most 32."""
