"""Limits how long a read of existing data may go without progress.

A watch has no such limit, but a list has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from topobus.values.errors import PeerUnavailable

__all__ = ["ReadTimeout"]

T = TypeVar("T")


class ReadTimeout:
    """Takes items out of a feed, each within the same time."""

    def __init__(self, what: str, *, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s

    async def next(self, items: AsyncGenerator[T, None]) -> T:
        """Return the next item.

        Errors: raises PeerUnavailable when none comes in time. The opener of the feed then closes
        it.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                return await anext(items)
        except TimeoutError as err:
            raise PeerUnavailable(f"{self._what}: nothing came for {self._limit_s:g} s") from err
