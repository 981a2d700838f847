"""Ranges of sizes and costs, added and multiplied as upstream's estimate does: never above 2^64 -
1, which means an unknown size.

Source: cel-go checker/cost.go, SizeEstimate and CostEstimate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["LIST_COST", "MAP_COST", "NOTHING", "ONE", "UNKNOWN", "WORST", "Size"]

WORST = (1 << 64) - 1


class Size(NamedTuple):
    """The least and the most that a value can be, or that something can cost."""

    least: int
    most: int

    def plus(self, other: Size) -> Size:
        """Add ranges."""
        return Size(min(self.least + other.least, WORST), min(self.most + other.most, WORST))

    def times(self, other: Size) -> Size:
        """Multiply ranges."""
        return Size(min(self.least * other.least, WORST), min(self.most * other.most, WORST))

    def scaled(self, factor: float) -> Size:
        """Multiply by a factor, rounded up. Computed in doubles, as upstream does."""
        return Size(_scaled(self.least, factor), _scaled(self.most, factor))

    def widened(self, other: Size) -> Size:
        """Cover both."""
        return Size(min(self.least, other.least), max(self.most, other.most))


UNKNOWN, ONE, NOTHING = Size(0, WORST), Size(1, 1), Size(0, 0)
LIST_COST, MAP_COST = Size(10, 10), Size(30, 30)


def _scaled(number: int, factor: float) -> int:
    scaled = math.ceil(float(number) * factor)
    return min(scaled, WORST)
