"""Parses numbers in text that comes from the bus: headers, and the parts of a delivery's reply
subject.
"""

from __future__ import annotations

import re

from topobus.values.errors import ContractError

__all__ = ["read_count"]

# 19 digits are nanoseconds until the year 2286 and any 63-bit sequence. int() alone takes
# signs, spaces, underscores and the digits of every script, and raises ValueError for more than
# 4,300 (sys.set_int_max_str_digits).
_COUNT = re.compile(r"[0-9]{1,19}")


def read_count(text: str) -> int:
    """Read a whole number of at most 19 ASCII digits.

    Errors: raises ContractError for anything else.

    >>> read_count("0042")
    42
    """
    if _COUNT.fullmatch(text) is None:
        raise ContractError(f"not a number: got {text[:40]!r}, wanted at most 19 digits")
    return int(text)
