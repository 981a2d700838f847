"""Answers of an API server that are none: what sends no event, forgets every version, or is too
busy is asked again, and not pressed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from support.kubeconfigs import kubeconfig, opened
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import (
    NODES,
    SLICES,
    ClusterChange,
    ClusterChangeKind,
)
from topobus.gateway.config import ClusterSettings
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration

NO_EVENTS = ["[]", '"text"', "7", "null", "{", '{"type":"ADDED"}', '{"type":"ADDED","object":[]}', '{"type":7,"object":{}}',  # noqa: E501
             '{"type":"ADDED","object":{"metadata":[]}}', '{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"},"spec":[1]}}',  # noqa: E501
             '{"type":"ERROR","object":{}}', '{"type":"ADDED","object":{"metadata":null}}']  # fmt: skip


async def scripted(lists: list[str], watches: list[str]) -> tuple[asyncio.Server, str]:
    """Serve texts as they are: one a list, one a watch; the last ones again and again."""
    done = {"list": 0, "watch": 0}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = head.split(" ")[1]
            if "resourceslices" not in target:
                text = json.dumps({"resources": [{"name": "resourceslices", "verbs": ["list", "watch"]}]})
            else:
                kind = "watch" if "watch=true" in target else "list"
                texts = watches if kind == "watch" else lists
                text = texts[min(done[kind], len(texts) - 1)]
                done[kind] += 1
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n{text}".encode()
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    return listening, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def test_watch_goes_on_when_the_server_sends_what_is_no_event(tmp_path: Path) -> None:
    """A proxy's page, half a line, an object without a version: each ends that watch and not the
    gateway, and the next good change arrives.
    """
    good = json.dumps({"type": "MODIFIED", "object": {"metadata": {"name": "s", "resourceVersion": "9"}, "spec": {}}})
    listening, url = await scripted(['{"items":[],"metadata":{"resourceVersion":"5"}}'], [*NO_EVENTS, good])
    cluster = KubernetesCluster.open(
        ClusterSettings(mode="kubeconfig", kubeconfig=str(kubeconfig(tmp_path, url, {"token": "t"})), retry_s=0.001)
    )
    seen: list[ClusterChange] = []
    async with listening, asyncio.timeout(60), aclosing(cluster.watch(SLICES, fields="")) as watch:
        async for change in watch:
            seen.append(change)
            if change.kind is ClusterChangeKind.PUT:
                break
    await cluster.close()

    assert seen[-1].object.metadata["name"] == "s"


async def test_server_is_not_pressed_when_it_forgets_every_version_at_once(tmp_path: Path) -> None:
    """A list whose version is gone before the watch begins, again and again: each time the pause is
    longer, and nothing is shown twice as fast.
    """
    gone = json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})
    listening, url = await scripted(['{"items":[],"metadata":{"resourceVersion":"5"}}'], [gone])
    cluster = KubernetesCluster.open(
        ClusterSettings(mode="kubeconfig", kubeconfig=str(kubeconfig(tmp_path, url, {"token": "t"})), retry_s=5.0)
    )
    seen: list[ClusterChange] = []

    async def follow() -> None:
        async with aclosing(cluster.watch(SLICES, fields="")) as watch:
            async for change in watch:
                seen.append(change)  # noqa: PERF401  (it never ends by itself)

    async with listening:
        following = asyncio.create_task(follow())
        await asyncio.wait({following}, timeout=1.0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    await cluster.close()

    assert 1 <= len(seen) <= 2


@pytest.mark.parametrize("text", ["[]", '"text"', "null", "<html>", '{"items":7}', '{"items":[7]}', '{"items":[],"metadata":[]}', '{"items":[{"spec":7}]}'])  # fmt: skip  # noqa: E501
async def test_list_is_asked_again_when_the_answer_is_none(tmp_path: Path, text: str) -> None:
    """What cannot be read is trouble with the server, told and tried again, never a crash and never
    an empty list.
    """
    listening, url = await scripted(
        [text, '{"items":[{"metadata":{"name":"s"}}],"metadata":{"resourceVersion":"5"}}'], ["{"]
    )
    cluster = opened(kubeconfig(tmp_path, url, {"token": "t"}))
    async with listening, asyncio.timeout(60), aclosing(cluster.watch(SLICES, fields="")) as watch:
        first = await anext(watch)
    await cluster.close()

    assert [api_object.metadata["name"] for api_object in first.objects] == ["s"]


@pytest.mark.parametrize(
    ("code", "text"), [(429, "Too many requests, please try again later.\n"), (502, "<html>bad gateway</html>")]
)
async def test_server_that_is_busy_is_asked_again_when_it_says_so_in_plain_text(
    tmp_path: Path, code: int, text: str
) -> None:
    """Limits on requests, and proxies, answer before anything of Kubernetes does: code, text and
    the wanted pause are told, not that it is no JSON.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            f"HTTP/1.1 {code} Status\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nContent-Length: "
            f"{len(text)}\r\nConnection: close\r\n\r\n"
        )
        writer.write((head + text).encode())
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    cluster = opened(kubeconfig(tmp_path, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {"token": "t"}))
    async with listening:
        with pytest.raises(PeerUnavailable, match=f"answered {code}: {text.strip()}") as busy:
            await cluster.get(NODES, "n1")
    await cluster.close()

    assert busy.value.retry_after_s == 1.0
