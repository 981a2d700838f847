"""Informers: one list and watch a kind, for ever, that keep copies in step with the API server.

Flows in: pages and watch lines. Flows out: calls of a sink, one an object, and how far this copy has come. A watch that ends goes on from its last version (bookmarks
keep that young); history that the server forgot (410), a resync that is due and a server that serves another version now all end in a list, after which
objects that it lacks are dropped. An object that nobody can read is counted, logged once a version and skipped: it never ends an informer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from topobus.controller.store.api import (
    Api,
    HistoryLost,
    Kind,
    Plain,
    WatchEventKind,
)
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.runtime.backoff import full_jitter
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["Informer", "Key", "Sink"]

# Versions count the writes of an etcd, in 63 bits; Python refuses to read numbers of more than 4300 digits.
_LONGEST_VERSION = 20

Key = tuple[str, str]
"""Namespace (empty for a kind of the whole cluster) and name."""


class Sink(Protocol):
    """Who keeps the copy."""

    def put(self, kind: Kind, version: str, plain: Plain) -> None:
        """Take in an object as served in this API version; raises ContractError for one that nobody can read."""
        ...

    def drop(self, kind: Kind, key: Key) -> None:
        """Forget an object; one that is not known is no error."""
        ...


class Informer:
    """Keeps the copy of one kind."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        sink: Sink,
        *,
        clock: Clock,
        resync_s: float,
        retry_s: float,
        changed: Callable[[], None],
        malformed: Callable[[], None],
    ) -> None:
        self.kind = kind
        self._api = api
        self._sink = sink
        self._clock = clock
        self._resync_s = resync_s
        self._retry_s = retry_s
        self._changed = changed
        self._malformed = malformed
        self._known: dict[Key, str] = {}
        self._version = ""
        self._is_synced = False
        self._trouble = ""
        self._moved = asyncio.Event()

    @property
    def is_synced(self) -> bool:
        """Say whether a whole list has been taken in."""
        return self._is_synced

    @property
    def trouble(self) -> str:
        """What is wrong with the connection; empty while all is well."""
        return self._trouble

    @property
    def version(self) -> int:
        """The resource version up to which this copy shows everything; versions of one kind may be compared (Kubernetes 1.35; true before, too)."""
        return int(self._version) if self._version.isascii() and self._version.isdecimal() and len(self._version) < _LONGEST_VERSION else 0

    async def reached(self, version: int, timeout_s: float) -> bool:
        """Wait until the copy shows everything up to a version; False when it does not come so far in time."""
        try:
            async with self._clock.timeout(timeout_s):
                while self.version < version:
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Follow for ever; the trouble of a lasting outage is logged once."""
        failures = 0
        while True:
            try:
                is_alive = await self._follow()
                failures = 0
                if not is_alive:
                    # A server that ends every watch at once must not be asked in a hot loop.
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
        """List when that is due, then watch until the server ends the watch or the next list is due; False when the watch said nothing at all."""
        served = await self._api.version_of(self.kind)
        if not served and self.kind.is_optional:
            self._settle({}, "")
            await self._clock.sleep(self._resync_s)
            self._api.forget_versions()
            return True
        if not self._version:
            self._settle(*await self._list(served))
        until_s = self._clock.monotonic() + self._resync_s
        is_alive = False
        async with aclosing(self._api.watch(self.kind, self._version)) as events:
            async for event in events:
                is_alive = True
                self._heal()
                if event.kind is WatchEventKind.PUT:
                    self._take(served, event.object)
                elif event.kind is WatchEventKind.DELETE:
                    key = _key(event.object)
                    self._known.pop(key, None)
                    self._sink.drop(self.kind, key)
                self._advance(event.version)
                if event.kind is not WatchEventKind.BOOKMARK:
                    self._changed()
                if self._clock.monotonic() >= until_s:
                    # A list now and then mends what a defect on either side may have lost.
                    self._version = ""
                    self._api.forget_versions()
                    return True
        return is_alive

    async def _list(self, served: str) -> tuple[dict[Key, str], str]:
        """Take in a whole list, page by page, so that no more than a page of it is in memory."""
        seen: dict[Key, str] = {}
        async with aclosing(self._api.pages(self.kind)) as pages:
            async for page in pages:
                for plain in page.items:
                    key = _key(plain)
                    seen[key] = _version(plain)
                    self._take(served, plain)
                if page.is_last:
                    return seen, page.version
        raise PeerUnavailable(f"API server: the list of {self.kind.plural} has no last page")

    def _settle(self, seen: dict[Key, str], version: str) -> None:
        """Drop what the list lacks, and be as far as the list is."""
        for key in self._known.keys() - seen.keys():
            self._sink.drop(self.kind, key)
        self._known = seen
        self._is_synced = True
        self._heal()
        self._advance(version)
        self._changed()

    def _heal(self) -> None:
        if self._trouble:
            self._trouble = ""
            get_logger().info("informer.healed", kind=self.kind.name)

    def _take(self, served: str, plain: Plain) -> None:
        key, version = _key(plain), _version(plain)
        is_news = self._known.get(key) != version
        self._known[key] = version
        try:
            self._sink.put(self.kind, served, plain)
        except Exception as err:  # noqa: BLE001 - boundary: one object of a list or watch; the others are taken in, whatever is wrong with it
            self._malformed()
            if is_news:
                why = str(err) if isinstance(err, ContractError) else f"{type(err).__name__}: {err}"
                unforeseen = {} if isinstance(err, ContractError) else {"exc_info": err}
                get_logger().warning("object.malformed", kind=self.kind.name, namespace=key[0], name=key[1], error=why, **unforeseen)

    def _advance(self, version: str) -> None:
        self._version = version
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _metadata(plain: Plain) -> Plain:
    metadata = plain.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _key(plain: Plain) -> Key:
    metadata = _metadata(plain)
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _version(plain: Plain) -> str:
    return str(_metadata(plain).get("resourceVersion") or "")
