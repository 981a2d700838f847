"""Secrets of the shape with a server on each node: a hub and a leaf with the manifests'
configurations live by what the Job made.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import nats
import pytest
import pytest_asyncio

from lab.servers.shaped_servers import ShapedServer, version_of
from support.key_secrets import NAMESPACE, PodFiles, secret_data
from support.kustomize import built, container_of, named, pod_of
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.bus.server_config.inboxes import connection_name
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.streams.uplink import Acknowledged, NotWritten
from topobus.cli.application import run
from topobus.formats.messages.catalogue import MACHINE
from topobus.formats.messages.codec import encode
from topobus.keys.secret_objects import LEAVES_SECRET, SERVER_SECRET, users_of
from topobus.simulation.nats_server import free_port
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_ANSWER_S = 2.0
_LOOK_EVERY_S = 0.05
_JOB = "system:serviceaccount:topobus:topobus-keys"
_NODE = "worker-1"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServerSimulator]:
    """An API server where the Job of the leaf shape has run, with its account's rights."""
    simulator = ApiServerSimulator(token="admin")
    manifests = built("kubernetes-leaf")
    for manifest in manifests:
        if manifest["kind"] in ("Role", "RoleBinding"):
            simulator.put(manifest)
    async with simulator:
        kubeconfig = simulator.write_kubeconfig(tmp_path / "kubeconfig", user=_JOB)
        job = named(manifests, "Job", "topobus-keys")["spec"]["template"]["spec"]
        arguments = [*container_of(job, "keys")["args"], "--kubeconfig", str(kubeconfig), "--json"]
        assert await asyncio.to_thread(run, arguments) == 0
        yield simulator


async def test_job_of_the_leaf_shape_makes_users_of_hub_and_nodes(server: ApiServerSimulator, tmp_path: Path) -> None:
    """With the rights of its account and no others.

    New passwords, which a person makes, reach both servers' files, each those that it has.
    """
    before = secret_data(server)
    kubeconfig = server.write_kubeconfig(tmp_path / "admin")
    assert (
        await asyncio.to_thread(
            run, ["keys", "secrets", "rotate", NAMESPACE, "--server-after", "0", "--kubeconfig", str(kubeconfig)]
        )
        == 0
    )
    after = secret_data(server)

    assert [(request.method, request.path) for request in server.requests if request.code in (401, 403)] == []
    for name, shape in ((SERVER_SECRET, Shape.HUB), (LEAVES_SECRET, Shape.LEAF)):
        users = {user.name: user.variable for account in accounts(shape) for user in account.users}
        for data in (before, after):
            lines = data[name]["users.conf"].splitlines()
            assert {
                f'{variable}: "{data[f"topobus-nats-{user}"]["password"]}"' for user, variable in users.items()
            } <= {*lines}
    changed = {
        user for user in users_of(has_leaves=True) if before[f"topobus-nats-{user}"] != after[f"topobus-nats-{user}"]
    }
    assert changed == {*users_of(has_leaves=True)}


def _shaped(
    binary: Path, files: PodFiles, map_name: str, secret: str, environment: dict[str, str], link_port: int
) -> ShapedServer:
    """Give a server with a ConfigMap's configuration, which finds the Secrets where its pod has
    them.
    """
    text: str = named(built("kubernetes-leaf"), "ConfigMap", map_name)["data"]["nats.conf"]
    if version_of(binary) < (2, 10):
        # Such a server is in no installation of this shape; users and links are the same.
        for line, instead in (
            ("sync_interval: always\n", "\n"),
            ("compression: off\n", "\n"),
            ('reconnect: "1s"', "reconnect: 1"),
        ):
            text = text.replace(line, instead)
    text = text.replace('"0.0.0.0:7422"', f'"127.0.0.1:{link_port}"').replace("include ../", "include ")
    made = ShapedServer(binary=binary, text=text, environment=environment)
    (made.folder / "nats-users").symlink_to(files.folder_of(secret))
    made.text = made.text.replace("/etc/nats-tls/", f"{files.tls}/")
    return made


async def _write(relay: Bus) -> None:
    """Say this node's machine to the hub as its relay does, once the link is up: nothing tells the
    leaf's clients when it is.
    """
    data = encode(Machine(node=_NODE, generation=7, numa_nodes=(), cpus=()))
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await relay.uplink().write(MACHINE, data, 0, written_by="", node=_NODE)
        except (PeerUnavailable, TimeoutError):
            await next_look()
            continue
        # Not written: one whose answer was late has arrived.
        assert isinstance(answer, Acknowledged | NotWritten)
        return


async def test_hub_and_leaf_work_together_with_the_secrets(
    server: ApiServerSimulator, nats_binary: Path, tmp_path: Path
) -> None:
    """The leaf comes to the hub by TLS with its Secret's password, and what its relay says is
    stored there.

    Every user is let in where its pod connects.
    """
    files = PodFiles(server, tmp_path / "pods")
    files.sync()
    ports: list[int] = []
    while len(ports) < 3:
        ports = list(dict.fromkeys((*ports, free_port())))
    hub_port, leaf_port, link_port = ports
    leaf_container = container_of(pod_of(built("kubernetes-leaf"), "DaemonSet", "topobus-node"), "nats")
    (url,) = [it["value"] for it in leaf_container["env"] if it["name"] == "TOPOBUS_LEAF_HUB_URL"]
    url = (
        url.replace("$(TOPOBUS_LEAF_PASSWORD)", files.password("leaf"))
        .replace(str(urlsplit(url).hostname), "127.0.0.1")
        .replace("7422", str(link_port))
    )
    environment = {"TOPOBUS_LEAF_DOMAIN": f"node-{_NODE}", "TOPOBUS_LEAF_HUB_URL": url}
    hub = _shaped(nats_binary, files, "nats-hub", SERVER_SECRET, {**os.environ, "TOPOBUS_HUB_NAME": "hub"}, link_port)
    leaf = _shaped(nats_binary, files, "nats-leaf", LEAVES_SECRET, {**os.environ, **environment}, link_port)
    hub.port, leaf.port = hub_port, leaf_port
    secure, plain = f"tls://127.0.0.1:{hub_port}", f"nats://127.0.0.1:{leaf_port}"
    async with asyncio.timeout(2 * _LIMIT_S), AsyncExitStack() as stack:
        await stack.enter_async_context(hub)
        await stack.enter_async_context(leaf)
        controller = await stack.enter_async_context(
            Bus.session(files.settings(secure, "controller"), name="controller")
        )
        await controller.provision()
        topology = await stack.enter_async_context(
            Bus.session(files.settings(plain, "topology", is_leaf=True), name="topology")
        )
        await topology.provision()
        for shape, address in ((Shape.HUB, secure), (Shape.LEAF, plain)):
            for user in sorted(
                user.name for account in accounts(shape) for user in account.users if user.name != "leaf"
            ):
                settings = files.settings(address, user, is_leaf=shape is Shape.LEAF)
                async with Bus.session(settings, name=connection_name(user)) as bus:
                    assert bus.is_connected
        relay = await stack.enter_async_context(Bus.session(files.settings(plain, "relay", is_leaf=True), name="relay"))
        await _write(relay)
        stored = await controller.get(MACHINE, node=_NODE)

    assert stored is not None
    assert stored.value.generation == 7


async def test_container_of_a_nodes_server_tells_it_of_new_users(nats_binary: Path, tmp_path: Path) -> None:
    """The manifest's command, run as it stands but for its folders: when the mounted file has
    changed, the server that it became takes the newer password.
    """
    port = free_port()
    ended = asyncio.Event()

    async def note() -> None:
        ended.set()

    async with (
        asyncio.timeout(_LIMIT_S),
        _leaf_container(nats_binary, tmp_path, port, "authorization { user: gpu, password: first }\n"),
    ):
        client = await nats.connect(f"nats://gpu:first@127.0.0.1:{port}", allow_reconnect=False, closed_cb=note)
        name = client._server_info["server_name"]
        _lay(tmp_path, "authorization { user: gpu, password: second }\n")
        await ended.wait()
        newer = await nats.connect(f"nats://gpu:second@127.0.0.1:{port}", allow_reconnect=False)
        await newer.close()

    assert name == "node-node1_example"


async def test_container_of_a_nodes_server_tells_it_twice_of_a_new_account(nats_binary: Path, tmp_path: Path) -> None:
    """What a new account imports is there from the second signal on
    (tests/integration/bus/test_bus_new_accounts.py), so both are sent.
    """
    account = "  {0}: {{\n    users: [{{user: {0}, password: x}}]\n  }}\n"
    files = ["accounts {\n" + "".join(map(account.format, names)) + "}\n" for names in ("A", "AB")]
    async with asyncio.timeout(_LIMIT_S), _leaf_container(nats_binary, tmp_path, free_port(), files[0]) as log:
        _lay(tmp_path, files[1])
        for _ in range(2):
            while b"Reloaded server configuration" not in await log.readline():
                pass


@asynccontextmanager
async def _leaf_container(binary: Path, folder: Path, port: int, users: str) -> AsyncIterator[asyncio.StreamReader]:
    """Run the command of a node's own server with its files in a folder.

    What it logs, from when it is ready.
    """
    container = container_of(pod_of(built("kubernetes-leaf"), "DaemonSet", "topobus-node"), "nats")
    settings = f'listen: "127.0.0.1:{port}"\nserver_name: $TOPOBUS_LEAF_DOMAIN\ninclude users.conf\n'
    (folder / "nats.conf").write_text(settings, encoding="utf-8")
    _lay(folder, users)
    moved = [
        part.replace("/etc/nats-users", str(folder)).replace("/etc/nats", str(folder)) for part in container["command"]
    ]
    command = [part.replace("exec nats-server", f"exec {binary}") for part in moved]
    environment = {**os.environ, "TOPOBUS_LEAF_NODE": "node1.example", "PERIOD_S": "0.1"}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=2**20
    )
    assert process.stderr is not None
    try:
        while b"Server is ready" not in await process.stderr.readline():
            pass
        yield process.stderr
    finally:
        # The shell's loop is of the same session, as it is of the same container.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _lay(folder: Path, users: str) -> None:
    """Put a new version of the server's users in place of the one before, at once."""
    (folder / "newer.conf").write_text(users, encoding="utf-8")
    (folder / "newer.conf").replace(folder / "users.conf")
