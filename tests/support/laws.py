"""How many examples of a law are tried: all in the suite, a few for a first look."""

from __future__ import annotations

import os

__all__ = ["examples"]

_FEWEST = 5


def examples(count: int) -> int:
    """Give the number of examples: `count`, or the share of it that TOPOBUS_EXAMPLES names (`make
    unit` sets 0.05).

    >>> examples(600)
    600
    """
    return max(_FEWEST, int(count * float(os.environ.get("TOPOBUS_EXAMPLES", "1"))))
