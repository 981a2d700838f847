"""What the one Kubernetes client promises to both of its users: who we are, whom we speak to, replaced files, pauses, and answers that are none."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.tls_front import Authority, Certificate, tls_front
from topobus.controller.config import ClusterSettings as ControllerCluster
from topobus.controller.store import api
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.domain.errors import ConfigError, ContractError, PeerUnavailable
from topobus.gateway.cluster import objects as gateway
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.config import ClusterSettings as GatewayCluster
from topobus.testing.apiserver import ApiServerSimulator

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


def kubeconfig(folder: Path, url: str, user: dict[str, Any], **cluster: Any) -> Path:
    """Write a kubeconfig in place of the one that is there."""
    path = folder / "kubeconfig"
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    fresh.rename(path)
    return path


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
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n{text}".encode())
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
async def test_requests_say_as_whom_we_act_when_the_user_acts_as_somebody_else(tmp_path: Path, open_it: Callable[[Path], Opened]) -> None:
    """`as` with its uid, groups and extras goes with every request: left out, we would act with our own rights, which may be more."""
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
async def test_server_is_known_by_the_name_that_the_kubeconfig_gives(tmp_path: Path, open_it: Callable[[Path], Opened], name: str) -> None:
    """With tls-server-name the certificate must be for that name and not for the address; for any other name nothing is sent."""
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
async def test_calls_go_on_when_the_client_certificate_was_replaced(tmp_path: Path, open_it: Callable[[Path], Opened]) -> None:
    """A certificate that the server no longer takes is read again: the call that met it succeeds, nobody restarts anything."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as server:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        port = int(server.url.rpartition(":")[2])
        async with tls_front(port, new.issue("server"), clients=new) as front:
            url, trusted = f"https://127.0.0.1:{front}", {"certificate-authority": str(new.own.certificate)}
            read, close = open_it(kubeconfig(tmp_path, url, {"token": "secret", **in_data(old.issue("client"))}, **trusted))
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
        assert await read(NODE)
        count = len(server.requests)
        server.refuse("GET", "nodes", code=429, retry_after_s=30)
        with pytest.raises(PeerUnavailable):
            await read(NODE)
        early = asyncio.create_task(read(NODE))
        # Time for a request that nothing holds back: another one beside it comes and goes.
        other, close_other = of_gateway(kubeconfig(tmp_path, server.url, {"token": "secret"}))
        assert await other(NODE)
        asked = [request.code for request in server.requests[count:]]
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        await close()
        await close_other()

    assert asked == [429, 200]


@both
@pytest.mark.parametrize("text", ["[" * 100_000, "7", "null-", '{"metadata":'])
async def test_answer_that_is_none_is_trouble_with_the_server(tmp_path: Path, open_it: Callable[[Path], Opened], text: str) -> None:
    """What cannot be read, however deep it is, ends the call and nothing else."""
    async with recording(text) as (url, _):
        read, close = open_it(kubeconfig(tmp_path, url, {"token": "t"}))
        with pytest.raises(PeerUnavailable):
            await read(NODE)
        await close()


@both
@pytest.mark.parametrize("name", ["..", ".", "a/b", "%2e%2e"])
async def test_name_that_leads_somewhere_else_is_never_asked_for(tmp_path: Path, open_it: Callable[[Path], Opened], name: str) -> None:
    """A name from an object is no path: one that no object can have is refused before anything of it is sent."""
    async with recording("{}") as (url, heads):
        read, close = open_it(kubeconfig(tmp_path, url, {"token": "t"}))
        with pytest.raises(ContractError, match="wanted a name that can stand in a path"):
            await read(name)
        await close()

    assert [head for head in heads if not head.startswith("GET /api/v1 ")] == []


@both
async def test_kubeconfig_is_refused_by_name_when_it_wants_a_proxy_of_its_own(tmp_path: Path, open_it: Callable[[Path], Opened]) -> None:
    """What we do not do is never left out in silence, whichever service reads the file."""
    with pytest.raises(ConfigError, match="has a proxy-url"):
        open_it(kubeconfig(tmp_path, "https://127.0.0.1:1", {"token": "t"}, **{"proxy-url": "http://proxy"}))
