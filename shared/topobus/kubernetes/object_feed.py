"""The common part of both stores' watches: which objects were reported, how far the copy has come,
and how an object that cannot be read is handled.

An object that existed before the last list and is not in it is dropped, because it was deleted
while no watch ran. An object that the copy refuses is counted and logged once for each revision,
and the other objects are still stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from topobus.formats.kubernetes.objects import ObjectKey
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError

__all__ = ["ObjectFeed"]


class ObjectFeed:
    """Feeds one watch into a copy.

    Args: drop — removes an object from the copy; refused — is called once for each revision of an
    object that the copy refuses.
    """

    def __init__(self, clock: Clock, drop: Callable[[ObjectKey], None], refused: Callable[[Exception], None]) -> None:
        self._clock = clock
        self._drop = drop
        self._refused = refused
        self._revisions: dict[ObjectKey, Hashable] = {}
        """The revision of each object that was reported last."""
        self._listed: set[ObjectKey] | None = None
        """The objects reported by the running list. None: no list is running."""
        self._position = 0
        self._moved = Broadcast()
        self.is_whole = False
        """Whether a complete list has been stored."""

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the copy contains everything up to a revision.

        False when the copy does not get there in time.
        """
        return await self._moved.until(lambda: self._position >= revision, self._clock.timeout(timeout_s))

    def begin_list(self) -> None:
        """Begin a list that reports all existing objects."""
        self._listed = set()

    def put(self, key: ObjectKey, revision: Hashable, take: Callable[[], None]) -> None:
        """Report an existing object. `take` stores it, and raises when the copy refuses it."""
        is_news = self._revisions.get(key) != revision
        self._revisions[key] = revision
        if self._listed is not None:
            self._listed.add(key)
        self._guard(key, take, is_news=is_news)

    def drop(self, key: ObjectKey) -> None:
        """Report that an object is gone."""
        self._revisions.pop(key, None)
        self._guard(key, partial(self._drop, key))

    def end_list(self, revision: int) -> None:
        """End a list that was complete at a revision. Objects that were reported before and are not
        in the list are dropped.
        """
        for key in self._revisions.keys() - (self._listed or set()):
            self.drop(key)
        self._listed = None
        self.is_whole = True
        self.advance(revision)

    def advance(self, revision: int) -> None:
        """Note that everything up to a revision has been reported."""
        self._position = revision
        self._moved.announce()

    def reset(self) -> None:
        """Forget all that was reported, because the store and its revisions were replaced."""
        self._revisions.clear()
        self._position = 0
        self.is_whole = False

    def _guard(self, key: ObjectKey, work: Callable[[], None], *, is_news: bool = True) -> None:
        try:
            work()
        except Exception as err:  # noqa: BLE001 - boundary: one object, the others are stored
            if is_news:
                self._refused(err)
                why = str(err) if isinstance(err, ContractError) else f"{type(err).__name__}: {err}"
                unforeseen = {} if isinstance(err, ContractError) else {"exc_info": err}
                get_logger().warning(
                    "object.malformed", kind=key.kind, namespace=key.namespace, name=key.name, error=why, **unforeseen
                )
