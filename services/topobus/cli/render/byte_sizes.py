"""Writes amounts of memory for people."""

from __future__ import annotations

__all__ = ["human_bytes"]


def human_bytes(count: int) -> str:
    """Write an amount of memory in binary units.

    >>> human_bytes(137438953472), human_bytes(0), human_bytes(1536)
    ('128 GiB', '0 B', '1.5 KiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
