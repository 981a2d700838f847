"""The console where claims and pods are at a cluster's API server: what waits is shown with the
reason, by rights that only read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from support.cluster_home import claim, pod
from support.console_pages import Shown, stream
from support.running import service
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes-console" / "console.yaml"
USER = "system:serviceaccount:topobus:topobus-console"


@asynccontextmanager
async def cluster_console(server: ApiServerSimulator, nats_url: str, folder: Path) -> AsyncIterator[int]:
    """Run a console that reads an API server with the rights of the overlay; gives its port."""
    for api_object in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")):
        if api_object["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
            server.put(api_object, namespace="topobus")
    kubeconfig = server.write_kubeconfig(folder / "kubeconfig", user=USER)
    settings = {
        "TOPOBUS_CONSOLE__PAGE__PORT": "0",
        "TOPOBUS_CONSOLE__CLUSTER__MODE": "kubeconfig",
        "TOPOBUS_CONSOLE__CLUSTER__KUBECONFIG": str(kubeconfig),
        "TOPOBUS_CONSOLE__CLUSTER__RETRY_S": "0.05",
    }
    async with service("console", nats_url, settings) as running:
        line = await running.logged("console.listening")
        yield urlsplit(line["url"]).port or 0


async def test_console_shows_what_waits_in_a_cluster_with_the_reason(nats_server: NatsServer, tmp_path: Path) -> None:
    """A pod behind the gate and its claim wait for the reason that the controller wrote.

    A pod that runs never is; with the gate open and the claim allocated both are gone.
    """
    conditions = [
        {"type": "topobus.dev/Allocated", "status": "False", "reason": "NoDevices", "message": "n1: all in use"}
    ]
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        server.put({**pod("runs"), "spec": {"containers": [{"name": "main", "image": "x"}], "nodeName": "n1"}})
        server.put(claim("big", count=9))
        server.put({**pod("p", "big"), "status": {"conditions": conditions}})
        async with cluster_console(server, nats_server.url, tmp_path) as port, stream(port) as events:
            page = Shown(events)
            await page.until(
                lambda page: (
                    all(entry["is_told"] or entry["users"] for entry in page.topic("waiting").values())
                    and len(page.topic("waiting")) == 2
                )
            )
            seen = dict(page.topic("waiting"))
            server.put({**pod("p", "big", gates=()), "status": {"conditions": conditions}})
            server.bind("p", "n1")
            server.put({**claim("big", count=9), "status": {"allocation": {"devices": {"results": []}}}})
            await page.until(lambda page: not page.topic("waiting"))
            unused = server.rights_unused(USER)
        refused = [
            f"{request.method} {request.path}"
            for request in server.requests
            if request.code == 403 or request.method != "GET"
        ]

    assert {key: (entry["reason"], entry["message"]) for key, entry in seen.items()} == {
        "pod/default/p": ("NoDevices", "n1: all in use"),
        "resourceclaim/default/big": ("NoDevices", "n1: all in use"),
    }
    assert seen["resourceclaim/default/big"]["users"] == ["pod default/p"]
    assert (refused, sorted(unused)) == ([], [])


async def test_console_says_so_when_the_api_server_does_not_answer(nats_server: NatsServer, tmp_path: Path) -> None:
    """The page goes on with what it knows, and shows the API server as silent.

    A missing right is named.
    """
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        server.refuse("GET", "resourceclaims", code=403, reason="Forbidden", times=1000)
        async with cluster_console(server, nats_server.url, tmp_path) as port, stream(port) as events:
            page = Shown(events)
            await page.until(lambda page: page.topic("silent"))

    assert "resourceclaims: 403" in page.topic("silent")["API server"]["message"]
