"""How many examples of a law are tried: a share in the suite, all in the lane of the laws."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["every_third", "examples", "share", "steps"]

_FEWEST = 5
# Odd: many tests ask again after every second death.
_STRIDE = 3
_Case = TypeVar("_Case")


def examples(count: int) -> int:
    """Give the number of examples: `count`, or the share of it that TOPOBUS_EXAMPLES names (`make
    suite` sets 0.2, `make unit` 0.05).
    """
    return max(_FEWEST, int(count * _share()))


def share(cases: Sequence[_Case]) -> Sequence[_Case]:
    """Give all cases, or the first ones where TOPOBUS_EXAMPLES names a share.

    A test that takes them bears the marker `law`: `make laws` runs it with all.
    """
    return cases[: max(1, int(len(cases) * _share()))]


def every_third(cases: Sequence[_Case]) -> Sequence[_Case]:
    """Give all cases, or every third one where TOPOBUS_EXAMPLES names a share, from another first
    one in each run.

    As with `share`, such a test bears the marker `law`.
    """
    return cases if _share() >= 1 else cases[random.randrange(_STRIDE) :: _STRIDE]


def steps(most: int) -> Sequence[int]:
    """Give the steps, from 1 to below `most`, at which a test kills what it is about, as
    `every_third` does.
    """
    return every_third(range(1, most))


def _share() -> float:
    return float(os.environ.get("TOPOBUS_EXAMPLES", "1"))
