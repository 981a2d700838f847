"""The console beside a real cluster: it logs somebody in, draws the node that is there, and shows a
claim that waits with the reason that the cluster gives.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.cluster import Cluster, until
from support.console_pages import Shown, ask, stream
from support.installation import Installation
from support.running import service

CLASS = os.environ.get("TOPOBUS_CLUSTER_CLASS", "gpu")
PASSWORD = "correct-horse-battery"


async def test_console_shows_a_waiting_claim_of_the_cluster_after_a_login(
    cluster: Cluster, installation: Installation, tmp_path: Path
) -> None:
    """A claim for devices of a class that nobody has waits, and its pod says why, for both.

    Without the password nothing is told.
    """
    if not installation.nats_url:
        pytest.skip(
            "NOT CHECKED ON A CLUSTER: this installation's NATS is not reached from here (TOPOBUS_CLUSTER_NATS_URL)"
        )
    await until("slices", lambda: cluster.devices(CLASS), bool)
    claim = await cluster.make_claim("nobody")
    pod = await cluster.make_pod(claim=claim)
    password = tmp_path / "password"
    password.write_text(PASSWORD, encoding="utf-8")
    settings = {
        "TOPOBUS_CONSOLE__PAGE__PORT": "0",
        "TOPOBUS_CONSOLE__PAGE__PASSWORD_FILE": str(password),
        "TOPOBUS_CONSOLE__CLUSTER__MODE": "kubeconfig",
        "TOPOBUS_CONSOLE__CLUSTER__KUBECONFIG": os.environ["KUBECONFIG"],
    }
    async with service("console", installation.nats_url, settings) as running:
        port = urlsplit((await running.logged("console.listening"))["url"]).port or 0
        refused, _, _ = await ask(port, "/api/stream")
        _, headers, _ = await ask(
            port, "/login", method="POST", body=f"password={PASSWORD}", Origin=f"http://127.0.0.1:{port}"
        )
        cookie = headers["set-cookie"].partition(";")[0]
        async with stream(port, Cookie=cookie) as events:
            page = Shown(events)
            keys = (f"resourceclaim/default/{claim}", f"pod/default/{pod}")
            await page.until(
                lambda page: (
                    all(page.topic("waiting").get(key, {}).get("message") for key in keys)
                    and cluster.node in page.topic("nodes")
                )
            )
        status, _, drawing = await ask(port, f"/api/nodes/{cluster.node}", Cookie=cookie)

    waiting = page.topic("waiting")
    assert refused == 401
    assert waiting[keys[0]]["reason"] == waiting[keys[1]]["reason"] != "not looked at yet"
    assert waiting[keys[0]]["users"] == [f"pod default/{pod}"]
    assert (status, CLASS in drawing) == (200, True)
