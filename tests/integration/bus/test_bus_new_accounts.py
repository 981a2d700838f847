"""Accounts that are new to a nats-server that runs: a device class of somebody's own, and a node at
a hub.

It gives them what they import at its second SIGHUP.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import nats
import nats.errors
import pytest
from msgspec import structs

from support.key_secrets import NAMESPACE, PodFiles, objects_of, server_with_rights
from support.kustomize import built, named
from support.looks import until
from topobus.bus.bus import Bus
from topobus.cli.application import run
from topobus.formats.messages.catalogue import INVENTORY, PREPARE
from topobus.formats.messages.messages import PrepareReply, PrepareRequest
from topobus.keys.cluster_certificates import make_certificate, server_names
from topobus.keys.cluster_secrets import make_users
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_PAUSE_S = 0.05
_REQUEST = PrepareRequest(
    op_id="", owner=Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u"), devices=("npu-0",)
)
_REFUSAL = Refusal(reasons=(Reason(code="driver-failed", message="from the new class"),))


async def _provision_at_last(bus: Bus) -> None:
    """Do as a service that came between the two signals: what the server leaves unanswered then is
    asked again by the service that is started anew.
    """
    while True:
        with suppress(PeerUnavailable):
            return await bus.provision()


async def test_added_class_is_served_when_the_script_of_the_manifest_has_told_the_server(
    nats_binary: Path, tmp_path: Path
) -> None:
    """Its service has its streams, is read and is asked by a gateway that was connected before,
    without a restart of anything.
    """
    async with server_with_rights() as server:
        pods = PodFiles(server, tmp_path / "pods")
        async with objects_of(server, tmp_path) as objects:
            await make_users(objects)
            await make_certificate(objects, server_names(NAMESPACE), now=datetime.now(UTC))
        pods.sync()
        nats_server, environment = pods.server_of_this_machine(nats_binary)
        script = named(built("kubernetes"), "ConfigMap", "nats-scripts")["data"]["reload.sh"]
        url = f"tls://127.0.0.1:{nats_server.port}"
        async with (
            asyncio.timeout(_LIMIT_S),
            nats_server,
            _running(script, environment),
            Bus.session(pods.settings(url, "controller"), name="controller") as controller,
            Bus.session(pods.settings(url, "gateway"), name="gateway") as gateway,
        ):
            # The script's first two: an ask that is on its way while a server reads its
            # accounts anew stays without an answer.
            await _until_read(nats_server, 2)
            await controller.provision()
            async with objects_of(server, tmp_path) as objects:
                await make_users(objects, classes=("npu",))
            pods.sync()
            settings = structs.replace(pods.settings(url, "npu"), zone="vendor", timeout_s=5.0)
            async with Bus.session(settings, name="npu") as npu:
                await _provision_at_last(npu)
                await npu.put(
                    INVENTORY, Inventory(node="n1", device_class="npu", generation=1), node="n1", device_class="npu"
                )
                await npu.answer(PREPARE, _refuse, node="n1", device_class="npu")
                entry = await gateway.get(INVENTORY, node="n1", device_class="npu")
                reply = await gateway.ask(PREPARE, _REQUEST, node="n1", device_class="npu")

    assert entry is not None
    assert reply.result == _REFUSAL


async def test_added_node_reaches_the_hub_after_the_second_signal(nats_binary: Path, tmp_path: Path) -> None:
    """As docs/how-to/choose-a-nats-shape.md says: users with the node, SIGHUP, and once more."""
    folder, server_file = tmp_path / "users", tmp_path / "users.conf"

    async def make_keys(*more: str) -> None:
        words = ["keys", "make", str(folder), "--server-file", str(server_file), *more]
        assert await asyncio.to_thread(run, words) == 0

    await make_keys("--shape", "hub", "--node", "w1")
    async with NatsServer(binary=nats_binary, config=server_file.read_text()) as hub, asyncio.timeout(_LIMIT_S):
        settings = NatsSettings(
            url=hub.url, user="controller", password_file=str(folder / "controller/password"), zone="core"
        )
        async with Bus.session(settings, name="controller") as controller:
            await controller.provision()
        await make_keys("--node", "w2")
        for number in (1, 2):
            hub.reload(server_file.read_text())
            await _until_read(hub, number)

        answer = await _stored_ledger(hub, "w2", (folder / "leaf-w2/password").read_text().strip())

    # The bucket's own word; without the import nobody listens at the subject.
    assert "404" in answer


async def _refuse(_request: PrepareRequest) -> PrepareReply:
    return PrepareReply(result=_REFUSAL)


@asynccontextmanager
async def _running(script: str, environment: dict[str, str]) -> AsyncIterator[None]:
    """Run the script of the container `reload`."""
    shell = shutil.which("sh") or "sh"
    process = await asyncio.create_subprocess_exec(shell, "-c", script, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def _until_read(server: NatsServer, times: int) -> None:
    await until(lambda: server.read_log().count("Reloaded server configuration") >= times)


async def _stored_ledger(hub: NatsServer, node: str, password: str) -> str:
    """Ask the hub for the node's ledger as its relay does; the status of the answer."""
    client = await nats.connect(hub.url, user=f"leaf-{node}", password=password, inbox_prefix=b"_INBOX.relay")
    try:
        answer = await client.request(f"topobus.v1.up.{node}.stored.ledger", b"", timeout=_LIMIT_S)
    finally:
        await client.close()
    return (answer.headers or {}).get("Status", "none")
