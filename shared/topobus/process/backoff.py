"""Computes the pause before the next attempt."""

from __future__ import annotations

import random

__all__ = ["full_jitter"]


def full_jitter(attempt: int, *, least_s: float = 0.1, most_s: float = 10.0) -> float:
    """Choose a random pause before the next attempt, so that a thousand clients do not come back at
    once.

    Shapes: attempt — how many have failed, from 0; result — uniform between half of `least_s` and
    `least_s` doubled with each attempt, at most `most_s`.
    Units: seconds.
    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
    """
    return random.uniform(least_s / 2, min(most_s, least_s * 2 ** min(attempt, 16)))
