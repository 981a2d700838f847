"""Shortens texts to the length that an API accepts, in bytes and never within a character."""

from __future__ import annotations

__all__ = ["shortened"]


def shortened(text: str, limit_bytes: int) -> str:
    """Truncate a text that is too long, and mark it as truncated.

    >>> shortened("interface", 8), shortened("short", 8), shortened("äääää", 8)
    ('inter...', 'short', 'ää...')
    """
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit_bytes else data[: limit_bytes - 3].decode("utf-8", "ignore") + "..."
