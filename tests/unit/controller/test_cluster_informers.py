"""Informers against an API server over HTTP: pages, versions, lost history, silence, and objects
that nobody can read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from topobus.controller.config import ClusterSettings, ControllerSettings, check
from topobus.controller.store.api import CLASSES, NODES, TAINT_RULES
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.kubernetes.answers import Plain
from topobus.kubernetes.informers import Informer, Key
from topobus.kubernetes.reading import CLAIMS, Kind
from topobus.process.clock import SystemClock
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable


class Copy:
    """A copy that remembers what came."""

    def __init__(self) -> None:
        self.objects: dict[Key, tuple[str, Plain]] = {}
        self.puts = 0
        self._news = asyncio.Event()

    def put(self, kind: str, version: str, plain: Plain) -> None:
        """Take in an object; one that is labelled odd cannot be read."""
        self.puts += 1
        metadata = plain["metadata"]
        if (metadata.get("labels") or {}).get("odd"):
            raise ContractError("odd")
        self.objects[metadata.get("namespace") or "", metadata["name"]] = (version, plain)

    def drop(self, kind: str, key: Key) -> None:
        """Forget an object."""
        self.objects.pop(key, None)

    def changed(self) -> None:
        """Wake whoever waits."""
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the copy is as it should be."""
        async with asyncio.timeout(60):
            while not holds():
                self._news.clear()
                await self._news.wait()

    @property
    def names(self) -> list[str]:
        """Name what there is."""
        return sorted(name for _, name in self.objects)


@asynccontextmanager
async def following(
    url: str, folder: Path, kind: Kind = NODES, *, page: int = 500, resync_s: float = 600.0
) -> AsyncIterator[tuple[Copy, Informer, list[str]]]:
    """Run an informer.

    Gives its copy, itself, and a list that grows with every malformed object.
    """
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "s",
                "clusters": [{"name": "s", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "s", "user": {}}],
                "contexts": [{"name": "s", "context": {"cluster": "s", "user": "s"}}],
            }
        ),
        encoding="utf-8",
    )
    api = KubernetesApi.open(ClusterSettings(kubeconfig=str(config), page=page, call_s=5.0))
    copy, odd = Copy(), list[str]()
    informer = Informer(
        api,
        kind,
        copy,
        clock=SystemClock(),
        resync_s=resync_s,
        retry_s=0.02,
        changed=copy.changed,
        refused=lambda err: odd.append(str(err)),
    )
    task = asyncio.create_task(informer.run())
    try:
        yield copy, informer, odd
    finally:
        task.cancel()
        await asyncio.wait({task})
        await api.close()


def node(name: str, **labels: str) -> dict[str, Any]:
    """One node."""
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}}


async def test_list_comes_page_by_page_and_changes_follow(tmp_path: Path) -> None:
    """Five nodes in pages of two, then one more, one less, one changed, each by the watch alone."""
    async with ApiServerSimulator(bookmark_s=0.2) as server:
        for index in range(5):
            server.put(node(f"n{index}"))
        async with following(server.url, tmp_path, page=2) as (copy, informer, _):
            await copy.until(lambda: informer.is_whole)
            lists = [
                request
                for request in server.requests
                if request.path.endswith("/nodes") and "watch" not in request.query
            ]
            server.put(node("n5"))
            server.remove("Node", "n0")
            server.put(node("n1", zone="a"))
            await copy.until(
                lambda: (
                    copy.names == ["n1", "n2", "n3", "n4", "n5"] and "labels" in copy.objects["", "n1"][1]["metadata"]
                )
            )
            again = [
                request
                for request in server.requests
                if request.path.endswith("/nodes") and "watch" not in request.query
            ]

    assert [api_request.query["limit"] for api_request in lists] == ["2", "2", "2"]
    assert len(again) == len(lists)


async def test_copy_is_whole_again_when_history_was_lost(tmp_path: Path) -> None:
    """After 410 a list says what there is: what went meanwhile is dropped, what came is there."""
    async with ApiServerSimulator(bookmark_s=5) as server:
        server.put(node("a"))
        server.put(node("b"))
        async with following(server.url, tmp_path) as (copy, informer, _):
            await copy.until(lambda: informer.is_whole)
            await server.stop()
            server.remove("Node", "a")
            server.put(node("c"))
            server.compact()
            await server.start()
            await copy.until(lambda: copy.names == ["b", "c"])


async def test_watch_goes_on_from_a_bookmark_when_it_is_cut_off(tmp_path: Path) -> None:
    """Bookmarks carry a quiet kind past history that others made: no list is needed after a cut."""
    async with ApiServerSimulator(bookmark_s=0.05) as server:
        server.put(node("a"))
        async with following(server.url, tmp_path) as (copy, informer, _):
            await copy.until(lambda: informer.is_whole)
            last = int(server.put({"kind": "Namespace", "metadata": {"name": "busy"}})["metadata"]["resourceVersion"])
            assert await informer.reached(last, 5)
            server.compact()
            server.close_watches()
            server.put(node("b"))
            await copy.until(lambda: copy.names == ["a", "b"])
            lists = [
                request
                for request in server.requests
                if request.path.endswith("/nodes") and "watch" not in request.query
            ]

    assert len(lists) == 1


async def test_copy_says_how_far_it_has_come(tmp_path: Path) -> None:
    """A version is reached when everything before it is in the copy.

    One that never comes is not.
    """
    async with ApiServerSimulator(bookmark_s=60) as server, following(server.url, tmp_path) as (copy, informer, _):
        await copy.until(lambda: informer.is_whole)
        version = int(server.put(node("a"))["metadata"]["resourceVersion"])

        assert await informer.reached(version, 5)
        assert ("", "a") in copy.objects
        assert not await informer.reached(version + 1, 0.01)


async def test_resync_lists_again_though_nothing_was_lost(tmp_path: Path) -> None:
    """Now and then the copy is compared with a whole list."""
    async with ApiServerSimulator(bookmark_s=0.02) as server:
        server.put(node("a"))
        async with following(server.url, tmp_path, resync_s=0.05) as (copy, informer, _):
            await copy.until(lambda: informer.is_whole)
            await server.until(
                lambda: (
                    len(
                        [
                            request
                            for request in server.requests
                            if request.path.endswith("/nodes") and "watch" not in request.query
                        ]
                    )
                    >= 3
                ),
                what="lists again",
            )

    assert copy.names == ["a"]


async def test_malformed_object_is_counted_and_takes_nobody_down(tmp_path: Path) -> None:
    """What the copy refuses is left out; what comes after it is not."""
    async with ApiServerSimulator() as server:
        server.put(node("a", odd="1"))
        server.put(node("b"))
        async with following(server.url, tmp_path) as (copy, informer, odd):
            await copy.until(lambda: informer.is_whole)
            server.put(node("c", odd="1"))
            server.put(node("d"))
            await copy.until(lambda: copy.names == ["b", "d"])

    assert len(odd) == 2


@pytest.mark.parametrize("code", [403, 429, 500, 503])
async def test_informer_waits_and_goes_on_when_the_server_refuses(tmp_path: Path, code: int) -> None:
    """A missing right, throttling and trouble are told as trouble and tried again."""
    async with ApiServerSimulator() as server:
        server.put(node("a"))
        server.refuse("GET", "nodes", code=code, reason="Forbidden" if code == 403 else "InternalError", times=2)
        async with following(server.url, tmp_path) as (copy, informer, _):
            await copy.until(lambda: bool(informer.trouble))
            assert str(code) in informer.trouble
            await copy.until(lambda: informer.is_whole and not informer.trouble)

    assert copy.names == ["a"]


async def test_kind_that_the_server_lacks_is_empty_when_it_may_be_missing(tmp_path: Path) -> None:
    """DeviceTaintRules came late: a server without them has none, and nobody waits for a list."""
    rules = Kind(
        name="DeviceTaintRule", plural="devicetaintrules", group="resource.k8s.io", versions=("v7",), is_optional=True
    )
    async with ApiServerSimulator() as server, following(server.url, tmp_path, rules) as (copy, informer, _):
        await copy.until(lambda: informer.is_whole)

    assert copy.names == []


async def test_kind_that_must_be_served_says_what_is_wrong_when_it_is_not(tmp_path: Path) -> None:
    """A server without resource.k8s.io in a version that we can read is
    told by name and version.
    """
    claims = Kind(
        name="ResourceClaim",
        plural="resourceclaims",
        group="resource.k8s.io",
        versions=("v8", "v7"),
        is_namespaced=True,
    )
    async with ApiServerSimulator() as server, following(server.url, tmp_path, claims) as (copy, informer, _):
        await copy.until(lambda: bool(informer.trouble))

    assert "does not serve resourceclaims: wanted one of resource.k8s.io/v8, resource.k8s.io/v7" in informer.trouble


async def test_best_served_version_is_chosen(tmp_path: Path) -> None:
    """The first of our versions that the server has, kind by kind; asked once."""
    rules = Kind(
        name="DeviceTaintRule",
        plural="devicetaintrules",
        group="resource.k8s.io",
        versions=("v9", "v1beta2", "v1alpha3"),
    )
    async with ApiServerSimulator() as server, following(server.url, tmp_path, rules) as (copy, informer, _):
        await copy.until(lambda: informer.is_whole)
        rule = {
            "kind": "DeviceTaintRule",
            "metadata": {"name": "r"},
            "spec": {"taint": {"key": "k", "effect": "NoSchedule"}},
        }
        server.put(rule)
        await copy.until(lambda: copy.names == ["r"])

    assert copy.objects["", "r"][0] == "v1beta2"
    assert TAINT_RULES.versions[0] == CLAIMS.versions[0] == CLASSES.versions[0] == "v1"


async def test_write_of_another_is_not_overwritten(tmp_path: Path) -> None:
    """A patch that carries an older version is refused as a conflict, one with another uid as well.

    One on an object that is gone as well.
    """
    async with ApiServerSimulator() as server:
        first = server.put(node("a"))
        server.put(node("a", changed="1"))
        api = KubernetesApi.open(ClusterSettings(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig"))))
        stale = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"], "labels": {"mine": "1"}}}
        answers = [
            await api.patch(NODES, "", "a", stale),
            await api.patch(NODES, "", "a", {"metadata": {"uid": "other"}}),
            await api.patch(NODES, "", "gone", {}),
        ]
        await api.close()

    assert [getattr(answer, "is_conflict", False) for answer in answers] == [True, True, True]


async def test_silence_is_peer_unavailable(tmp_path: Path) -> None:
    """A server that is not there is no answer, and never an empty list."""
    async with ApiServerSimulator() as server:
        config = server.write_kubeconfig(tmp_path / "kubeconfig")
    api = KubernetesApi.open(ClusterSettings(kubeconfig=str(config), call_s=1.0))
    with pytest.raises(PeerUnavailable):
        await api.get(NODES, "", "a")
    await api.close()


@pytest.mark.parametrize("content", ["", "{}", "not: [yaml"])
def test_kubeconfig_that_is_none_is_the_operators_to_mend(tmp_path: Path, content: str) -> None:
    """The error names the setting and the file."""
    config = tmp_path / "kubeconfig"
    config.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cluster\.kubeconfig"):
        KubernetesApi.open(ClusterSettings(kubeconfig=str(config)))


def test_settings_of_a_cluster_are_refused_when_they_cannot_work(tmp_path: Path) -> None:
    """A file that is not there, and a cluster without its home, are told before anything is
    connected.
    """
    missing = ControllerSettings(home="cluster", cluster=ClusterSettings(kubeconfig=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="there is no file"):
        check(missing)
    with pytest.raises(ConfigError, match="home is 'stand-alone'"):
        check(ControllerSettings(cluster=ClusterSettings(page=7)))
    check(ControllerSettings(home="cluster"))
