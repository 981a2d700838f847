"""The object store on a NATS bucket: the revision is the message's sequence in the bucket's stream.

Each written object is put into the state at once, so that the next decision sees it. Objects of
other writers arrive by the watch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import partial

from topobus.bus.bus import Bus, Change, ChangeKind, Conflict
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.releases import is_of_other_release
from topobus.kubernetes.object_feed import ObjectFeed
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError

__all__ = ["NatsStore", "NatsWatch"]


class NatsStore:
    """The bucket of objects, and the copy that each write updates."""

    def __init__(self, bus: Bus, state: StandaloneState) -> None:
        self._bus = bus
        self._state = state

    async def read(self, key: ObjectKey) -> Stored | None:
        """Read an object from the stream's leader. None when there is none."""
        entry = await self._bus.get(catalogue.OBJECT, **key._asdict())
        return Stored(entry.revision, entry.value) if entry is not None else None

    async def create(self, key: ObjectKey, value: ApiObject) -> Stored | None:
        """Create an object."""
        return await self.write(key, 0, value)

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write an object if its stored revision is `revision`, 0 for an object that does not
        exist.
        """
        written = await self._bus.compare_and_set(catalogue.OBJECT, value, revision, **key._asdict())
        if isinstance(written, Conflict):
            get_logger().debug("object.write-lost", object=name_of(value), revision=revision)
            return None
        stored = Stored(written.revision, value)
        if written.revision <= self._state.watched_revision:
            # The watch was faster than the answer: the copy has this write, or what came after it.
            return stored
        try:
            self._state.put_object(key, stored)
        except ContractError as err:
            # The write succeeded, and the copy keeps what can be read of it. This very write may
            # have reported that the content is malformed.
            get_logger().debug("object.written-malformed", object=name_of(value), error=str(err))
        return stored

    async def delete(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object at a revision. The watch updates the state."""
        conflict = await self._bus.compare_and_delete(catalogue.OBJECT, revision, **key._asdict())
        if conflict is not None:
            get_logger().debug(
                "object.deletion-lost", object=f"{key.kind} {key.namespace}/{key.name}", revision=revision
            )
        return conflict is None


class NatsWatch:
    """Keeps the copy of all kinds of the bucket.

    After the bucket was lost, the copy is emptied before the new content arrives. Args: changed —
    called after each change; refused — called for each object that the copy does not accept;
    dropped — called with the last known version of each object that is gone; forgotten — called
    when the bucket was lost.
    """

    def __init__(
        self,
        bus: Bus,
        state: StandaloneState,
        clock: Clock,
        *,
        changed: Callable[[], None],
        refused: Callable[[Exception], None],
        dropped: Callable[[Stored], None],
        forgotten: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._state = state
        self._changed = changed
        self._dropped = dropped
        self._forgotten = forgotten
        self._feed = ObjectFeed(clock, self._drop, refused)
        self._trouble = "no snapshot yet"

    @property
    def is_whole(self) -> bool:
        """Say whether a complete snapshot has arrived."""
        return self._feed.is_whole

    @property
    def trouble(self) -> str:
        """Why the copy is not complete. Empty while it is."""
        return self._trouble

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the copy shows everything up to a revision.

        False when that takes longer than the time-out.
        """
        return await self._feed.reached(revision, timeout_s)

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        self._feed.begin_list()
        async with aclosing(self._bus.watch_to_write(catalogue.OBJECT)) as changes:
            async for change in changes:
                self._take(change)
                self._changed()

    def _take(self, change: Change[ApiObject]) -> None:
        if change.kind is ChangeKind.RESET:
            self._trouble = "the history was lost, a new snapshot follows"
            self._state.watched_revision = 0
            self._feed.reset()
            self._feed.begin_list()
            self._state.clear_objects()
            self._forgotten()
            return
        if change.kind is ChangeKind.SNAPSHOT_END:
            self._trouble = ""
            self._feed.end_list(self._state.watched_revision)
            return
        key = ObjectKey(change.parts["kind"], change.parts["namespace"], change.parts["name"])
        self._state.watched_revision = change.revision
        if change.kind is ChangeKind.UNREADABLE:
            self._fall_back(key, change)
        elif change.kind is ChangeKind.PUT and change.value is not None:
            self._feed.put(key, change.revision, partial(self._put, key, Stored(change.revision, change.value)))
        elif not self._is_known(key, change.revision):
            self._feed.drop(key)
        if self.is_whole:
            self._feed.advance(change.revision)

    def _fall_back(self, key: ObjectKey, change: Change[ApiObject]) -> None:
        """Continue with the newest version that can be read, at the key's present revision, so that
        the next write replaces the unreadable one.

        A value that another release wrote may be right, and is not overwritten: the copy then keeps
        what it has.
        """
        last = change.value or (stored.value if (stored := self._state.objects.get(key)) is not None else None)
        if last is None or is_of_other_release(change.origin.release, self._bus.release):
            return
        get_logger().warning(
            "object.fell-back",
            object=name_of(last),
            revision=change.revision,
            why="its newest value cannot be read",
        )
        self._feed.put(key, change.revision, partial(self._put, key, Stored(change.revision, last)))

    def _is_known(self, key: ObjectKey, revision: int) -> bool:
        """Say whether the copy is at least as new: our own write was put into it when it was
        made.
        """
        stored = self._state.objects.get(key)
        return stored is not None and stored.revision >= revision

    def _put(self, key: ObjectKey, stored: Stored) -> None:
        if not self._is_known(key, stored.revision):
            self._state.put_object(key, stored)

    def _drop(self, key: ObjectKey) -> None:
        stored = self._state.drop_object(key)
        if stored is not None:
            self._dropped(stored)
