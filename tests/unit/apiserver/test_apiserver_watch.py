"""The API server simulator's watches: from a version, with initial events, bookmarks, 410,
selectors, restarts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.apiserver.routes import of_kind
from topobus.testing.apiserver.shapes import Selector
from topobus.testing.apiserver.store import Store

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def a_slice(name: str, *, node: str = "n1", driver: str = "topobus.dev") -> dict[str, Any]:
    """One empty slice."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {"driver": driver, "nodeName": node, "pool": pool},
    }


@asynccontextmanager
async def watching(
    server: ApiServerSimulator, **query: str
) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
    """Open a watch; its lines as type and object."""

    async def lines(answer: httpx2.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        async for line in answer.aiter_lines():
            event = json.loads(line)
            yield event["type"], event["object"]

    async with (
        asyncio.timeout(60),
        httpx2.AsyncClient(base_url=server.url, timeout=None, trust_env=False) as client,
        client.stream("GET", SLICES, params={"watch": "true", **query}) as answer,
    ):
        yield lines(answer)


def brief(event: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    """Type and name."""
    return event[0], event[1]["metadata"].get("name", "")


async def test_watch_tells_each_change_once_when_it_begins_at_a_list() -> None:
    """From the list's version on: added, modified and deleted, in order, with the version of the
    change.
    """
    async with ApiServerSimulator() as server:
        first = server.put(a_slice("a"))
        async with watching(server, resourceVersion=first["metadata"]["resourceVersion"]) as events:
            server.put(a_slice("b"))
            server.put({**a_slice("a"), "metadata": {"name": "a", "labels": {"x": "1"}}})
            server.remove("ResourceSlice", "a")

            seen = [await anext(events) for _ in range(3)]

    assert [brief(event) for event in seen] == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert [event[1]["metadata"]["resourceVersion"] for event in seen] == ["3", "4", "5"]


async def test_watch_loses_nothing_when_changes_come_while_it_is_read() -> None:
    """A reader that takes its time over one change still gets those that came meanwhile."""
    store = Store()
    slices = of_kind("ResourceSlice")
    events = store.watch(slices, "", Selector("", "", ()), 1)
    store.create(slices, "", a_slice("a"))
    seen = [await anext(events)]
    store.delete(slices, "", "a")

    while len(seen) < 3:
        seen.append(await asyncio.wait_for(anext(events), 5))

    assert [event.type if event else None for event in seen] == ["ADDED", None, "DELETED"]


async def test_watch_begins_with_what_there_is_when_asked_for_initial_events() -> None:
    """With initial events a bookmark marks their end; without a version there is none."""
    async with ApiServerSimulator() as server:
        server.put(a_slice("a"))
        query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
        async with watching(server, **query) as events:
            listed = [await anext(events) for _ in range(2)]
        async with watching(server) as events:
            plain = await anext(events)

    assert [brief(event) for event in listed] == [("ADDED", "a"), ("BOOKMARK", "")]
    assert listed[1][1]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert brief(plain) == ("ADDED", "a")


async def test_watch_is_ended_with_410_when_its_version_is_compacted() -> None:
    """A watch from a forgotten version gets an ERROR line and ends.

    One that is open and up to date goes on.
    """
    async with ApiServerSimulator() as server:
        first = server.put(a_slice("a"))
        version = first["metadata"]["resourceVersion"]
        async with watching(server, resourceVersion=version) as events:
            server.put(a_slice("b"))
            await anext(events)
            server.compact()
            server.put(a_slice("c"))
            goes_on = await anext(events)
        async with watching(server, resourceVersion=version) as events:
            late = [event async for event in events]

    assert brief(goes_on) == ("ADDED", "c")
    assert [(kind, body["code"], body["reason"]) for kind, body in late] == [("ERROR", 410, "Expired")]


async def test_watch_sends_bookmarks_when_asked() -> None:
    """A bookmark carries the newest version, also when only other kinds have changed."""
    async with (
        ApiServerSimulator(bookmark_s=0.02) as server,
        watching(server, resourceVersion="1", allowWatchBookmarks="true") as events,
    ):
        node = server.put({"kind": "Node", "metadata": {"name": "n1"}})
        wanted = node["metadata"]["resourceVersion"]
        received = [event async for event in until(events, wanted)]

    assert {kind for kind, _ in received} == {"BOOKMARK"}


async def until(
    events: AsyncIterator[tuple[str, dict[str, Any]]], version: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Events up to one of a version."""
    async for event in events:
        yield event
        if event[1]["metadata"]["resourceVersion"] == version:
            return


async def test_watch_shows_leaving_objects_as_deleted_when_a_selector_no_longer_holds() -> None:
    """For a watcher with a selector, an object that stops matching is gone and one that starts is
    new.
    """
    async with ApiServerSimulator() as server:
        server.put(a_slice("a"))
        async with watching(
            server, resourceVersion="2", labelSelector="x=1", fieldSelector="spec.nodeName=n1"
        ) as events:
            server.put(a_slice("other", node="n2"))
            server.put({**a_slice("a"), "metadata": {"name": "a", "labels": {"x": "1"}}})
            server.put(a_slice("a"))

            seen = [brief(await anext(events)) for _ in range(2)]

    assert seen == [("ADDED", "a"), ("DELETED", "a")]


async def test_watch_ends_in_order_when_its_time_is_over() -> None:
    """TimeoutSeconds ends the stream without an error; the client may watch on."""
    async with ApiServerSimulator() as server, watching(server, resourceVersion="1", timeoutSeconds="0.05") as events:
        assert [event async for event in events] == []


async def test_server_keeps_objects_and_address_when_started_again() -> None:
    """A restart closes watches and forgets nothing else.

    A watcher that leaves is no longer counted.
    """
    async with ApiServerSimulator() as server:
        server.put(a_slice("a"))
        url = server.url
        async with watching(server) as events:
            await anext(events)
            counted = server.open_watches
        await server.until(lambda: server.open_watches == 0, what="the watcher's end")
        await server.stop()
        await server.start()

        assert (counted, server.url) == (1, url)
        assert [resource_slice["metadata"]["name"] for resource_slice in server.objects("ResourceSlice")] == ["a"]


async def test_wipe_takes_the_nodes_slices_when_kubelet_starts() -> None:
    """All of one node, or one driver's; other nodes keep theirs."""
    async with ApiServerSimulator() as server:
        server.put(a_slice("a"))
        server.put(a_slice("b", driver="nic.example.com"))
        server.put(a_slice("c", node="n2"))

        one_driver = server.wipe_slices("n1", "nic.example.com")
        whole_node = server.wipe_slices("n1")

        assert (
            one_driver,
            whole_node,
            [resource_slice["metadata"]["name"] for resource_slice in server.objects("ResourceSlice")],
        ) == (
            1,
            1,
            ["c"],
        )
