"""What the watches of both stores do alike: which objects were told, how far the copy has come, and
what becomes of an object that nobody can read.

Flows in: objects of a list and changes, each with how the copy takes it in. Flows out: the
copy in step with the store. What existed before the last list and is not in it is dropped: it
went while nobody watched. An object that the copy refuses is counted and logged once a
revision, and its neighbours go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import partial

from topobus.formats.kubernetes.objects import ObjectKey
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError

__all__ = ["ObjectFeed"]


class ObjectFeed:
    """Feeds one watch into a copy.

    Args: drop — has the copy forget an object; refused — hears of each object that the copy
    does not take in, once a revision.
    """

    def __init__(self, clock: Clock, drop: Callable[[ObjectKey], None], refused: Callable[[Exception], None]) -> None:
        self._clock = clock
        self._drop = drop
        self._refused = refused
        self._revisions: dict[ObjectKey, Hashable] = {}
        """At which revision each object was told last."""
        self._listed: set[ObjectKey] | None = None
        """What the list under way has told; None while there is none."""
        self._position = 0
        self._moved = asyncio.Event()
        self.is_whole = False
        """Whether a whole list has been taken in."""

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the copy shows everything up to a revision.

        False when it does not come so far in time.
        """
        try:
            async with self._clock.timeout(timeout_s):
                while self._position < revision:
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def begin_list(self) -> None:
        """Say that all objects there are will be told now."""
        self._listed = set()

    def put(self, key: ObjectKey, revision: Hashable, take: Callable[[], None]) -> None:
        """Tell an object that is there, by `take`, which raises for one that the copy does not take
        in.
        """
        is_news = self._revisions.get(key) != revision
        self._revisions[key] = revision
        if self._listed is not None:
            self._listed.add(key)
        self._guard(key, take, is_news=is_news)

    def drop(self, key: ObjectKey) -> None:
        """Tell that an object is gone."""
        self._revisions.pop(key, None)
        self._guard(key, partial(self._drop, key))

    def end_list(self, revision: int) -> None:
        """Say that all has been told that there was at a revision: what was told before and not now
        is gone.
        """
        for key in self._revisions.keys() - (self._listed or set()):
            self.drop(key)
        self._listed = None
        self.is_whole = True
        self.advance(revision)

    def advance(self, revision: int) -> None:
        """Say that everything up to a revision has been told."""
        self._position = revision
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def reset(self) -> None:
        """Forget all that was told: the store is another one now, and its revisions count anew."""
        self._revisions.clear()
        self._position = 0
        self.is_whole = False

    def _guard(self, key: ObjectKey, work: Callable[[], None], *, is_news: bool = True) -> None:
        try:
            work()
        except Exception as err:  # noqa: BLE001 - boundary: one object of a list or watch; the others are taken in, whatever is wrong with it
            if is_news:
                self._refused(err)
                why = str(err) if isinstance(err, ContractError) else f"{type(err).__name__}: {err}"
                unforeseen = {} if isinstance(err, ContractError) else {"exc_info": err}
                get_logger().warning(
                    "object.malformed", kind=key.kind, namespace=key.namespace, name=key.name, error=why, **unforeseen
                )
