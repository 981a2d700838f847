"""Reads how much of a shared device a claim was given: the consumed capacity in its allocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.domain.quantity import Quantity

__all__ = ["add_amounts", "consumed_amounts"]

_LARGEST = 2**63 - 1


def consumed_amounts(result: Mapping[str, Any], driver: str) -> dict[str, int] | None:
    """Read the amounts of one result, fractions rounded up; None when one of them is no amount.

    Names stand as the driver's inventory has them, without the driver's domain.
    >>> consumed_amounts({"consumedCapacity": {"memory": "20Gi", "gpu.topobus.dev/shares": "1"}}, "gpu.topobus.dev")
    {'shares': 1, 'memory': 21474836480}
    """
    consumed = result.get("consumedCapacity") or {}
    if not isinstance(consumed, Mapping):
        return None
    amounts: dict[str, int] = {}
    for name, text in sorted(consumed.items()):
        try:
            quantity = Quantity.parse(text) if isinstance(text, str) else None
        except ValueError:
            return None
        if quantity is None or not 0 <= quantity.nano <= _LARGEST * 10**9:
            return None
        amounts[str(name).removeprefix(f"{driver}/")] = -(-quantity.nano // 10**9)
    return amounts


def add_amounts(sums: dict[str, int], amounts: Mapping[str, int]) -> None:
    """Add one share of a device to the others that a claim has of it."""
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + amount
