"""Shortens texts to what an API takes, in bytes and never within a character."""

from __future__ import annotations

__all__ = ["shortened"]


def shortened(text: str, limit_bytes: int) -> str:
    """Cut a text that is longer, and mark it as cut.

    >>> shortened("interface", 8), shortened("short", 8), shortened("äääää", 8)
    ('inter...', 'short', 'ää...')
    """
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit_bytes else data[: limit_bytes - 3].decode("utf-8", "ignore") + "..."
