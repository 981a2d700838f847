"""Reads an endless generator in the background and waits for items: tests wait on watches and feeds
with it instead of sleeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, Self, TypeVar

__all__ = ["Reader"]

T = TypeVar("T")


class Reader(Generic[T]):
    """Collects items while the `async with` block runs.

    Use as `async with Reader(bus.watch(MACHINE)) as reader: await
    reader.until(lambda items: len(items) == 3)`.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self.items: list[T] = []
        self._source = source
        self._arrived = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def until(self, is_enough: Callable[[list[T]], bool], *, timeout_s: float = 60.0) -> list[T]:
        """Wait until the items satisfy the test, and return them.

        Errors: raises AssertionError with the items so far when time is up or the source ended.
        """
        if self._task is None:
            raise RuntimeError("use the reader as a context manager")
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                while not is_enough(self.items):
                    if self._task.done():
                        self._task.result()
                        raise AssertionError(f"the source ended after {self.items}")
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(
                f"not enough within {timeout_s:g} s; {len(self.items)} came: {self.items[-20:]}"
            ) from None
        return self.items

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _read(self) -> None:
        try:
            async with aclosing(self._source) as items:
                async for item in items:
                    async with self._arrived:
                        self.items.append(item)
                        self._arrived.notify_all()
        finally:
            async with self._arrived:
                self._arrived.notify_all()
