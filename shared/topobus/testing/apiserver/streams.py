"""A watch of the API server simulator as a stream of lines: events, bookmarks, the mark after the
initial events, an error as its last line.

JSON lines are sent until the client disconnects or the watch's time-out ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from topobus.testing.apiserver.http import Connection
from topobus.testing.apiserver.routes import Target, version_of
from topobus.testing.apiserver.shapes import Selector
from topobus.testing.apiserver.store import Store
from topobus.testing.apiserver.values import ApiError, Object

__all__ = ["Watch"]


class Watch:
    """One watch that a client opened.

    Errors: raises ApiError for a query that cannot be answered, before anything is sent.
    """

    def __init__(self, store: Store, target: Target, query: Mapping[str, str], bookmark_s: float) -> None:
        self._store = store
        self._target = target
        self._query = query
        self._bookmark_s = bookmark_s
        # A watch of one object by its path is a watch of its name.
        fields = ",".join(
            filter(None, (query.get("fieldSelector", ""), f"metadata.name={target.name}" if target.name else ""))
        )
        self._selector = Selector(fields, query.get("labelSelector", ""), target.resource.fields)
        self._since = None if query.get("sendInitialEvents") == "true" else version_of(query)
        self._timeout_s = float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None

    async def serve(self, connection: Connection) -> None:
        """Stream until its time is over.

        Errors: raises ConnectionResetError when the client left.
        """
        stream = asyncio.create_task(self._stream(connection))
        gone = asyncio.create_task(connection.wait_closed_by_client())
        try:
            done, _ = await asyncio.wait([stream, gone], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stream, gone):
                task.cancel()
            ends = await asyncio.gather(stream, gone, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if gone in done:
            raise ConnectionResetError("the watcher left")
        await connection.end_stream()

    async def _stream(self, connection: Connection) -> None:
        has_bookmarks = self._query.get("allowWatchBookmarks") == "true"
        has_initial = self._query.get("sendInitialEvents") == "true"
        resource = self._target.resource
        loop = asyncio.get_running_loop()
        events = self._store.watch(resource, self._target.namespace, self._selector, self._since)
        next_bookmark = loop.time() + self._bookmark_s
        pending = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait(
                    [pending], timeout=max(0.0, next_bookmark - loop.time()) if has_bookmarks else None
                )
                if not done:
                    next_bookmark = loop.time() + self._bookmark_s
                    await connection.send_line(_line("BOOKMARK", self._store.bookmark(resource).object))
                    continue
                event = pending.result()
                pending = asyncio.ensure_future(anext(events))
                if event is not None:
                    await connection.send_line(_line(event.type, event.object))
                elif has_initial:
                    has_initial = False
                    mark = self._store.bookmark(resource).object
                    mark["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
                    await connection.send_line(_line("BOOKMARK", mark))
        except ApiError as err:
            await connection.send_line(_line("ERROR", err.status))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


def _line(kind: str, api_object: Object) -> Object:
    return {"type": kind, "object": api_object}
