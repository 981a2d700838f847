"""Computes the pause before the next attempt."""

from __future__ import annotations

import random

__all__ = ["full_jitter"]


def full_jitter(attempt: int, *, least_s: float = 0.1, most_s: float = 10.0) -> float:
    """Give how long to wait before an attempt: anything up to the doubled ceiling, so that a thousand clients do not come back at once."""
    return random.uniform(least_s / 2, min(most_s, least_s * 2 ** min(attempt, 16)))
