"""Informers: a list and a watch for each kind, which keep a copy in step with the API server.

A sink is called once for each object. A watch that ends is resumed from its last version, which
bookmarks keep recent. A 410, a periodic resync and a server that now serves another version all
lead to a new list, after which objects that are not in the list are dropped. An object that cannot
be parsed is counted, logged once for each version and skipped. It never ends an informer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol

from topobus.formats.kubernetes.objects import ObjectKey
from topobus.kubernetes.answers import HistoryLost, Plain
from topobus.kubernetes.object_feed import ObjectFeed
from topobus.kubernetes.reading import Kind, WatchEventKind
from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable

if TYPE_CHECKING:
    # It loads a client library, which a process that only keeps objects by this protocol does not need.
    from topobus.kubernetes.api_reader import ApiReader

__all__ = ["Informer", "Key", "Sink"]

# Versions count the writes of an etcd in 63 bits. Python refuses to parse numbers of more than 4300
# digits.
_LONGEST_VERSION = 20

Key = tuple[str, str]
"""Namespace (empty for a kind of the whole cluster) and name."""


class Sink(Protocol):
    """Receives the objects and keeps the copy."""

    def put(self, kind: str, version: str, plain: Plain) -> None:
        """Store an object as served in this API version.

        Raises ContractError for one that cannot be parsed.
        """
        ...

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object, if it is stored."""
        ...


class Informer:
    """Keeps the copy of one kind of an API server."""

    def __init__(
        self,
        api: ApiReader,
        kind: Kind,
        sink: Sink,
        *,
        clock: Clock,
        resync_s: float,
        retry_s: float,
        changed: Callable[[], None],
        refused: Callable[[Exception], None],
    ) -> None:
        self.kind = kind
        self._api = api
        self._sink = sink
        self._clock = clock
        self._resync_s = resync_s
        self._retry_s = retry_s
        self._changed = changed
        self._feed = ObjectFeed(clock, lambda key: sink.drop(kind.name, key[1:]), refused)
        self._version = ""
        self._trouble = ""

    @property
    def is_whole(self) -> bool:
        """Return whether a complete list has been stored."""
        return self._feed.is_whole

    @property
    def trouble(self) -> str:
        """The current problem with the connection. Empty: none."""
        return self._trouble

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the copy contains everything up to a resource version.

        Versions of one kind can be compared (guaranteed since Kubernetes 1.35, true before).
        False when the copy does not get there in time.
        """
        return await self._feed.reached(revision, timeout_s)

    async def run(self) -> None:
        """Follow until cancelled. A lasting outage is logged once."""
        failures = 0
        while True:
            try:
                is_alive = await self._follow()
                failures = 0
                if not is_alive:
                    # A server that ends every watch at once must not be requested in a hot loop.
                    await self._clock.sleep(full_jitter(0, least_s=self._retry_s))
            except HistoryLost:
                get_logger().info("informer.history-lost", kind=self.kind.name, resource_version=self._version)
                self._version = ""
            except PeerUnavailable as err:
                if not self._trouble:
                    get_logger().warning("informer.lost", kind=self.kind.name, error=str(err))
                self._trouble = str(err)
                self._changed()
                failures += 1
                await self._clock.sleep(max(err.retry_after_s, full_jitter(failures, least_s=self._retry_s)))

    async def _follow(self) -> bool:
        """List when a list is due, then watch until the server ends the watch or the next list is
        due.

        False when the watch delivered nothing.
        """
        served = await self._api.version_of(self.kind)
        if not served and self.kind.is_optional:
            self._feed.begin_list()
            self._settle("")
            await self._clock.sleep(self._resync_s)
            self._api.drop_versions()
            return True
        if not self._version:
            self._settle(await self._list(served))
        until_s = self._clock.monotonic() + self._resync_s
        is_alive = False
        async with aclosing(self._api.watch(self.kind, self._version)) as events:
            async for event in events:
                is_alive = True
                self._heal()
                if event.kind is WatchEventKind.PUT:
                    self._take(served, event.object)
                elif event.kind is WatchEventKind.DELETE:
                    self._feed.drop(self._key(event.object))
                self._advance(event.version)
                if event.kind is not WatchEventKind.BOOKMARK:
                    self._changed()
                if self._clock.monotonic() >= until_s:
                    # A periodic list repairs what a defect on either side may have lost.
                    self._version = ""
                    self._api.drop_versions()
                    return True
        return is_alive

    async def _list(self, served: str) -> str:
        """Store a list page by page, so that at most one page is in memory.

        Returns the list's version.
        """
        self._feed.begin_list()
        async with aclosing(self._api.pages(self.kind)) as pages:
            async for page in pages:
                for plain in page.items:
                    self._take(served, plain)
                if page.is_last:
                    return page.version
        raise PeerUnavailable(f"API server: the list of {self.kind.plural} has no last page")

    def _settle(self, version: str) -> None:
        """Drop the objects that the list lacks, and continue from the list's version."""
        self._heal()
        self._version = version
        self._feed.end_list(_number(version))
        self._changed()

    def _heal(self) -> None:
        if self._trouble:
            self._trouble = ""
            get_logger().info("informer.healed", kind=self.kind.name)

    def _take(self, served: str, plain: Plain) -> None:
        version = str(_metadata(plain).get("resourceVersion") or "")
        self._feed.put(self._key(plain), version, partial(self._sink.put, self.kind.name, served, plain))

    def _key(self, plain: Plain) -> ObjectKey:
        metadata = _metadata(plain)
        return ObjectKey(self.kind.name.lower(), str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))

    def _advance(self, version: str) -> None:
        self._version = version
        self._feed.advance(_number(version))


def _metadata(plain: Plain) -> Plain:
    metadata = plain.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdecimal() and len(version) < _LONGEST_VERSION else 0
