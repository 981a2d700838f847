"""Both stores of objects, each with a copy that it keeps, a second writer, and a way to lose
answers: what one suite is run over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from support.cluster_home import ClusterHome
from topobus.bus.bus import AmbiguousWrite, Bus
from topobus.controller.cluster_metrics import ClusterMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.api import WATCHED
from topobus.controller.store.api_server_store import ApiServerStore
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.controller.store.nats_store import NatsStore, NatsWatch
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.informers import Informer
from topobus.process.clock import SystemClock
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import PeerUnavailable

__all__ = ["Place", "Watched", "api_server_place", "nats_place"]


class ObjectWatch(Protocol):
    """Keeps a copy of the objects in step with a store.

    Order: the objects that exist, then each change by its revision. After a gap (a connection that
    was cut, a history that the store forgot) the objects that exist are sent again, and those that
    were deleted meanwhile are dropped. An object that cannot be read is counted and logged once per
    revision, and does not affect the others.
    """

    @property
    def is_whole(self) -> bool:
        """Say whether all objects that existed have arrived.

        False again only when the store itself was lost.
        """

    @property
    def trouble(self) -> str:
        """Why the copy cannot be followed. Empty while it can."""

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the copy shows everything up to a revision.

        False when that takes longer than the time-out.
        """

    async def run(self) -> None:
        """Follow the store until cancelled."""


MakeWatch = Callable[[str, Callable[[], None], Callable[[Exception], None]], ObjectWatch]


class Deafening:
    """A bus or an API server whose answers to writes are lost, before or
    after the write was done.
    """

    def __init__(self, peer: Any, error: Exception, names: tuple[str, ...]) -> None:
        self._peer = peer
        self._error = error
        self._names = names
        self.lost = ""
        """`request` or `answer`: what of the next writes is lost."""
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        """What happens between the next write and its answer."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._peer, name)
        if name not in self._names:
            return real

        async def write(*arguments: Any, **options: Any) -> Any:
            if self.lost == "request":
                raise self._error
            done = await real(*arguments, **options)
            if self.lost == "answer":
                raise self._error
            if self.before_answer is not None:
                meanwhile, self.before_answer = self.before_answer, None
                await meanwhile()
            return done

        return write


class Watched:
    """A watch of one kind that can be stopped and continued, and what it delivered."""

    def __init__(self, kind: str, make: MakeWatch) -> None:
        self._news = asyncio.Event()
        self.refused: list[str] = []
        """What the copy did not take in."""
        self.watch = make(kind, self._news.set, lambda err: self.refused.append(str(err)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ObjectWatch]:
        """Follow for the length of a block, beginning with what there is."""
        task = asyncio.create_task(self.watch.run())
        try:
            await self.until(lambda: self.watch.is_whole)
            yield self.watch
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something is true of the copy."""
        async with asyncio.timeout(60):
            while not holds():
                self._news.clear()
                await self._news.wait()


class Place:
    """A store with its copy, a second writer of it, and a way to make it lose answers, or its
    history.
    """

    def __init__(
        self,
        store: ObjectStore,
        rival: ObjectStore,
        peer: Deafening,
        copy: StandaloneState | ApiServerState,
        make_watch: MakeWatch,
        write_raw: Callable[[ApiObject], Awaitable[object]],
        forget_history: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.rival = rival
        self.peer = peer
        self.forget_history = forget_history
        self.write_raw = write_raw
        """Writes an object whatever it is."""
        self._copy = copy
        self._make_watch = make_watch

    def copied(self, key: ObjectKey) -> Stored | None:
        """An object as the store's copy shows it."""
        return self._copy.objects.get(key)

    def watched(self, kind: str) -> Watched:
        """Make a watch that keeps the copy of a kind."""
        return Watched(kind, self._make_watch)


@asynccontextmanager
async def api_server_place(folder: Path) -> AsyncIterator[Place]:
    """A store on an API server."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        home = ClusterHome(server, "", folder)
        api, other = KubernetesApi.open(home.settings.cluster), KubernetesApi.open(home.settings.cluster)
        kinds = {kind.name.lower(): kind for kind in WATCHED}
        copy = ApiServerState()

        def make_watch(kind: str, changed: Callable[[], None], refused: Callable[[Exception], None]) -> ObjectWatch:
            clock = SystemClock()
            return Informer(
                api, kinds[kind], copy, clock=clock, resync_s=600.0, retry_s=0.02, changed=changed, refused=refused
            )

        async def write_raw(value: ApiObject) -> None:
            server.put({"kind": value.kind, "metadata": value.metadata, "spec": value.spec})

        try:
            peer: Any = Deafening(api, PeerUnavailable("no answer"), ("create", "patch", "delete"))
            metrics = ClusterMetrics(CollectorRegistry())
            store, rival = ApiServerStore(peer, copy, metrics), ApiServerStore(other, ApiServerState(), metrics)
            yield Place(store, rival, peer, copy, make_watch, write_raw, server.compact)
        finally:
            await api.close()
            await other.close()


def nats_place(bus: Bus) -> Place:
    """A store in a bucket of NATS."""
    peer: Any = Deafening(bus, AmbiguousWrite("no answer"), ("compare_and_set", "compare_and_delete"))
    copy = StandaloneState()

    def make_watch(_: str, changed: Callable[[], None], refused: Callable[[Exception], None]) -> ObjectWatch:
        return NatsWatch(
            bus, copy, SystemClock(), changed=changed, refused=refused, dropped=lambda _: None, forgotten=lambda: None
        )  # of all kinds

    async def write_raw(value: ApiObject) -> None:
        key = ObjectKey(value.kind.lower(), value.metadata["namespace"], value.metadata["name"])
        await bus.put(OBJECT, value, **key._asdict())

    return Place(NatsStore(peer, copy), NatsStore(bus, StandaloneState()), peer, copy, make_watch, write_raw)
