"""What the one Kubernetes client promises to both of its users: who we are, whom we speak to,
replaced files, pauses, and answers that are none.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.kubeconfigs import kubeconfig
from support.tls_front import Authority, Certificate, tls_front
from topobus.controller.config import ClusterSettings as ControllerCluster
from topobus.controller.store import api
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.gateway.cluster import objects as gateway
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.config import ClusterSettings as GatewayCluster
from topobus.kubernetes import client
from topobus.kubernetes.access import AccessSettings
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable

pytestmark = pytest.mark.integration

NODE = "n1"
Opened = tuple[Callable[[str], Awaitable[object]], Callable[[], Awaitable[None]]]
"""Reads a node by name; closes the connections."""


def of_gateway(path: Path) -> Opened:
    """The gateway's way to an API server."""
    opened = KubernetesCluster.open(GatewayCluster(mode="kubeconfig", kubeconfig=str(path), retry_s=0.01, call_s=5.0))
    return (lambda name: opened.get(gateway.NODES, name)), opened.close


def of_controller(path: Path) -> Opened:
    """The controller's way to an API server."""
    opened = KubernetesApi.open(ControllerCluster(kubeconfig=str(path), call_s=5.0))
    return (lambda name: opened.get(api.NODES, "", name)), opened.close


both = pytest.mark.parametrize("open_it", [of_gateway, of_controller], ids=["gateway", "controller"])


def in_data(certificate: Certificate) -> dict[str, str]:
    """A client certificate within the kubeconfig."""
    return {
        "client-certificate-data": base64.b64encode(certificate.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(certificate.key.read_bytes()).decode(),
    }


@asynccontextmanager
async def recording(node: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve a node as this text; gives the URL and the heads of all requests."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            heads.append(head)
            is_list = head.split(" ")[1].endswith("/api/v1")
            text = json.dumps({"resources": [{"name": "nodes", "verbs": ["list", "watch"]}]}) if is_list else node
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n{text}".encode()
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", heads
    finally:
        listening.close()


@both
async def test_requests_say_as_whom_we_act_when_the_user_acts_as_somebody_else(
    tmp_path: Path, open_it: Callable[[Path], Opened]
) -> None:
    """`as` with its uid, groups and extras goes with every request: left out, we would act with our
    own rights, which may be more.
    """
    user = {
        "token": "t",
        "as": "jane@example.com",
        "as-uid": "u-1",
        "as-groups": ["developers", "admins"],
        "as-user-extra": {"Example.com/scope": ["view", "dev"]},
    }
    async with recording(json.dumps({"metadata": {"name": NODE}})) as (url, heads):
        read, close = open_it(kubeconfig(tmp_path, url, user))
        assert await read(NODE)
        await close()

    assert heads
    for head in heads:
        headers = sorted(line for line in head.lower().split("\r\n") if line.startswith("impersonate-"))
        assert headers == [
            "impersonate-extra-example.com%2fscope: dev",
            "impersonate-extra-example.com%2fscope: view",
            "impersonate-group: admins",
            "impersonate-group: developers",
            "impersonate-uid: u-1",
            "impersonate-user: jane@example.com",
        ]


@both
@pytest.mark.parametrize("name", ["api.example.com", "other.example.com"])
async def test_server_is_known_by_the_name_that_the_kubeconfig_gives(
    tmp_path: Path, open_it: Callable[[Path], Opened], name: str
) -> None:
    """With tls-server-name the certificate must be for that name and not for the address.

    For any other name nothing is sent.
    """
    authority = Authority(tmp_path / "pki")
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        port = int(server.url.rpartition(":")[2])
        async with tls_front(port, authority.issue("server", addresses="DNS:api.example.com")) as front:
            trusted = {"certificate-authority": str(authority.own.certificate), "tls-server-name": name}
            read, close = open_it(kubeconfig(tmp_path, f"https://127.0.0.1:{front}", {"token": "secret"}, **trusted))
            if name == "api.example.com":
                assert await read(NODE)
            else:
                with pytest.raises(PeerUnavailable, match=r"(?i)certificate"):
                    await read(NODE)
            await close()

        assert bool(server.requests) is (name == "api.example.com")


@both
async def test_server_is_trusted_as_other_clients_do_when_its_authority_has_no_key_usage(
    tmp_path: Path, open_it: Callable[[Path], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 asks OpenSSL for the form of RFC 5280 by default, kubectl does not.

    A server of another authority is refused as ever.
    """
    default_context = ssl.create_default_context

    def of_newer_python(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = default_context(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", of_newer_python)
    authority, other = (
        Authority(tmp_path / "pki", has_key_usage=False),
        Authority(tmp_path / "other", has_key_usage=False),
    )
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        port = int(server.url.rpartition(":")[2])
        async with (
            tls_front(port, authority.issue("server")) as front,
            tls_front(port, other.issue("server")) as impostor,
        ):
            trusted = {"certificate-authority": str(authority.own.certificate)}
            read, close = open_it(kubeconfig(tmp_path, f"https://127.0.0.1:{front}", {"token": "secret"}, **trusted))
            answer = await read(NODE)
            await close()
            read, close = open_it(kubeconfig(tmp_path, f"https://127.0.0.1:{impostor}", {"token": "secret"}, **trusted))
            with pytest.raises(PeerUnavailable, match=r"(?i)certificate"):
                await read(NODE)
            await close()

    assert answer


async def test_watch_is_well_when_nothing_changes_and_the_server_sends_no_bookmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An etcd without progress notices: each watch is ended by the server in order and begun again
    where it was, nothing is read anew or lost.
    """
    monkeypatch.setattr(client, "_WATCH_S", (1, 1))
    async with ApiServerSimulator(token="secret", bookmark_s=3600.0) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        cluster = KubernetesCluster.open(
            GatewayCluster(
                mode="kubeconfig", kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")), retry_s=0.01
            )
        )
        with capture_logs() as logs:
            async with aclosing(cluster.watch(gateway.NODES, fields=f"metadata.name={NODE}")) as changes:
                kinds = [(await anext(changes)).kind]
                news = asyncio.ensure_future(anext(changes))
                await server.until(lambda: len(_watches(server)) >= 3, what="a third watch")
                server.put({"kind": "Node", "metadata": {"name": NODE, "labels": {"new": "yes"}}})
                kinds.append((await news).kind)
        await cluster.close()
        lists = [
            request
            for request in server.requests
            if request.path == "/api/v1/nodes" and request not in _watches(server)
        ]

    assert kinds == [gateway.ClusterChangeKind.SNAPSHOT, gateway.ClusterChangeKind.PUT]
    assert len(lists) == 1
    assert [entry for entry in logs if entry["log_level"] != "debug"] == []


async def test_watch_is_lost_when_the_server_is_not_there_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A connection that nobody closed says nothing, not even the watch's end: that is trouble, and
    named.
    """
    monkeypatch.setattr(client, "_WATCH_S", (1, 1))
    monkeypatch.setattr(client, "_LATE_S", 0.1)
    held: list[asyncio.StreamWriter] = []

    async def begin_and_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()

    listening = await asyncio.start_server(begin_and_die, "127.0.0.1", 0)
    path = kubeconfig(tmp_path, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {"token": "secret"})
    opened = client.KubernetesClient.open(
        AccessSettings(kubeconfig=str(path), setting="test: cluster", next_step="mend it")
    )
    with pytest.raises(PeerUnavailable, match="watch of /api/v1/nodes: ReadTimeout"):
        async for _ in opened.watch("/api/v1/nodes", "1"):
            pass
    await opened.close()
    listening.close()
    for writer in held:
        writer.close()


def _watches(server: ApiServerSimulator) -> list[Any]:
    return [request for request in server.requests if request.query.get("watch") == "true"]


@both
async def test_calls_go_on_when_the_client_certificate_was_replaced(
    tmp_path: Path, open_it: Callable[[Path], Opened]
) -> None:
    """A certificate that the server no longer takes is read again: the call that met it succeeds,
    nobody restarts anything.
    """
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        port = int(server.url.rpartition(":")[2])
        async with tls_front(port, new.issue("server"), clients=new) as front:
            url, trusted = f"https://127.0.0.1:{front}", {"certificate-authority": str(new.own.certificate)}
            read, close = open_it(
                kubeconfig(tmp_path, url, {"token": "secret", **in_data(old.issue("client"))}, **trusted)
            )
            with pytest.raises(PeerUnavailable):
                await read(NODE)
            kubeconfig(tmp_path, url, {"token": "secret", **in_data(new.issue("client"))}, **trusted)
            answer = await read(NODE)
            await close()

    assert answer


@both
async def test_server_is_left_alone_when_it_wants_a_pause(tmp_path: Path, open_it: Callable[[Path], Opened]) -> None:
    """A server that limits requests says for how long: whoever asks next waits for that."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        read, close = open_it(kubeconfig(tmp_path, server.url, {"token": "secret"}))
        other, close_other = of_gateway(kubeconfig(tmp_path, server.url, {"token": "secret"}))
        assert await read(NODE)
        assert await other(NODE)
        count = len(server.requests)
        server.refuse("GET", "nodes", code=429, retry_after_s=30)
        with pytest.raises(PeerUnavailable):
            await read(NODE)
        early = asyncio.create_task(read(NODE))
        # Time for a request that nothing holds back: another one beside it comes and goes.
        assert await other(NODE)
        asked = [request.code for request in server.requests[count:]]
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        await close()
        await close_other()

    assert asked == [429, 200]


@both
@pytest.mark.parametrize("text", ["[" * 100_000, "7", "null-", '{"metadata":'])
async def test_answer_that_is_none_is_trouble_with_the_server(
    tmp_path: Path, open_it: Callable[[Path], Opened], text: str
) -> None:
    """What cannot be read, however deep it is, ends the call and nothing else."""
    async with recording(text) as (url, _):
        read, close = open_it(kubeconfig(tmp_path, url, {"token": "t"}))
        with pytest.raises(PeerUnavailable):
            await read(NODE)
        await close()


@both
@pytest.mark.parametrize("name", ["..", ".", "a/b", "%2e%2e"])
async def test_name_that_leads_somewhere_else_is_never_asked_for(
    tmp_path: Path, open_it: Callable[[Path], Opened], name: str
) -> None:
    """A name from an object is no path: one that no object can have is refused before anything of
    it is sent.
    """
    async with recording("{}") as (url, heads):
        read, close = open_it(kubeconfig(tmp_path, url, {"token": "t"}))
        with pytest.raises(ContractError, match="wanted a name that can be part of a path"):
            await read(name)
        await close()

    assert [head for head in heads if not head.startswith("GET /api/v1 ")] == []


@both
async def test_kubeconfig_is_refused_by_name_when_it_wants_a_proxy_of_its_own(
    tmp_path: Path, open_it: Callable[[Path], Opened]
) -> None:
    """What we do not do is never left out in silence, whichever service reads the file."""
    with pytest.raises(ConfigError, match="has a proxy-url"):
        open_it(kubeconfig(tmp_path, "https://127.0.0.1:1", {"token": "t"}, **{"proxy-url": "http://proxy"}))
