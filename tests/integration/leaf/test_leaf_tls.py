"""The link between a node's server and the hub by TLS: what crosses, who is refused, and how
certificate and authority change while both run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg

from docpages.nats_files import render_hub
from support.leaf_pair import NODE, LeafPair, ShapedServer, leaf_pair, version_of
from support.looks import next_look, until
from topobus.bus.bus import Bus
from topobus.bus.login.certificates import add_authority, certify, drop_old_authorities
from topobus.bus.streams.uplink import Acknowledged, NotWritten
from topobus.cli.application import run
from topobus.formats.messages.catalogue import MACHINE
from topobus.formats.messages.codec import encode
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import free_port
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

# Ends only a test that waits for what never comes.
_LIMIT_S = 60.0
_ANSWER_S = 2.0
# What a hub says, by its version, of a leaf that it has let in.
_LINKED = ("JetStream using domains", "JetStream Not Extended")
_LOOK_EVERY_S = 0.05
_DEPLOYED = Path(__file__).resolve().parents[3] / "deploy" / "nats"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of the hub's certificate, and that of its authority."""
    tls, authority = tmp_path / "hub-tls", tmp_path / "authority"
    certify(tls, ("127.0.0.1",), authority=authority, now=datetime.now(UTC))
    return tls, authority


@asynccontextmanager
async def _buses(pair: LeafPair, tls: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """Connect to the hub, by TLS as its controller, and to the leaf as its relay.

    Each makes the streams of its server.
    """
    secure = NatsSettings(
        url=pair.hub.url.replace("nats://", "tls://"), tls_ca_file=str(tls / "ca.crt"), timeout_s=_LIMIT_S
    )
    plain = NatsSettings(url=pair.leaf.url, provisioner="topology", timeout_s=_LIMIT_S)
    async with Bus.session(secure, name="controller") as hub, Bus.session(plain, name="relay") as leaf:
        await hub.provision()
        await leaf.provision()
        yield hub, leaf


async def _write(leaf: Bus, generation: int, expected: int) -> int:
    """Write this node's machine at the hub as a relay does, once the link is up.

    Gives its sequence there.
    """
    data = encode(Machine(node=NODE, generation=generation, numa_nodes=(), cpus=()))
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await leaf.uplink().write(MACHINE, data, expected, written_by="", node=NODE)
        except (PeerUnavailable, TimeoutError):
            # Nothing tells the leaf's clients when its link is up, and an answer may be lost with
            # it: a relay says it again, too.
            await next_look()
            continue
        if isinstance(answer, NotWritten):
            # One whose answer was lost with the link has arrived.
            return await leaf.uplink().sequence_at_hub(MACHINE, node=NODE)
        assert isinstance(answer, Acknowledged)
        return answer.sequence


async def _until_heard(listener: Bus, speaker: Bus, subject: str) -> None:
    """Wait until what somebody says at another member of the cluster arrives."""
    heard = asyncio.Event()

    async def hear(_: Msg) -> None:
        heard.set()

    await listener._connection.subscribe(subject, hear)
    async with asyncio.timeout(_LIMIT_S):
        while not heard.is_set():
            # Nothing tells when the other member knows of the subscription.
            await speaker._connection.publish(subject)
            await next_look()


async def _log_has(server: ShapedServer, *wanted: str, times: int = 1) -> None:
    await until(lambda: any(server.read_log().count(text) >= times for text in wanted))


async def _greeting(pair: LeafPair) -> dict[str, object]:
    """Give what the hub says first to whoever connects as a leaf."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.link.port)
    try:
        line = await reader.readline()
    finally:
        writer.close()
    return msgspec.json.decode(line.removeprefix(b"INFO "), type=dict[str, object])


async def _reload(server: ShapedServer, *, times: int) -> None:
    os.kill(server.pid, signal.SIGHUP)
    await _log_has(server, "Reloaded server configuration", times=times)


async def test_link_is_encrypted_when_both_are_told_a_folder(nats_binary: Path, folders: tuple[Path, Path]) -> None:
    """What the relay says crosses, and the hub's listener takes nobody without TLS."""
    tls, _ = folders
    async with asyncio.timeout(_LIMIT_S), leaf_pair(nats_binary, hub_tls=str(tls), leaf_tls=str(tls)) as pair:
        async with _buses(pair, tls) as (hub, leaf):
            await _write(leaf, 1, 0)
            stored = await hub.get(MACHINE, node=NODE)
        greeting = await _greeting(pair)
        log = pair.hub.read_log()

    assert any(text in log for text in _LINKED)
    assert stored is not None
    assert stored.value.generation == 1
    assert greeting["tls_required"] is True


@pytest.mark.parametrize(
    ("names", "is_other", "says"),
    [
        (("127.0.0.1",), True, ("unknown authority",)),
        (("hub.example.org",), False, ("doesn't contain any IP SANs", "is valid for", "not 127.0.0.1")),
    ],
    ids=["other-authority", "other-name"],
)
async def test_leaf_sends_nothing_when_the_hub_is_not_who_it_should_be(
    nats_binary: Path, tmp_path: Path, names: tuple[str, ...], is_other: bool, says: tuple[str, ...]
) -> None:
    """A hub with a certificate of another authority, or for another name, is not talked to.

    The leaf's log says why.
    """
    now = datetime.now(UTC)
    certify(tmp_path / "hub-tls", names, authority=tmp_path / "authority", now=now)
    trusted = tmp_path / "hub-tls"
    if is_other:
        trusted = tmp_path / "other-tls"
        certify(trusted, names, authority=tmp_path / "other", now=now)
    async with leaf_pair(nats_binary, hub_tls=str(tmp_path / "hub-tls"), leaf_tls=str(trusted)) as pair:
        await _log_has(pair.leaf, *says)
        log = pair.hub.read_log()

    assert not any(text in log for text in _LINKED)


async def test_leaf_sends_nothing_when_the_hub_has_no_tls(nats_binary: Path, folders: tuple[Path, Path]) -> None:
    """A hub, or somebody before it, that offers no TLS is not talked to in clear."""
    tls, _ = folders
    async with leaf_pair(nats_binary, leaf_tls=str(tls)) as pair:
        await _log_has(pair.leaf, "TLS handshake error", "TLS Handshake Failure", "TLS leafnode handshake error")
        log = pair.hub.read_log()

    assert not any(text in log for text in _LINKED)


async def test_members_of_a_hub_join_by_tls_when_each_shows_the_other_a_certificate(
    nats_binary: Path, folders: tuple[Path, Path]
) -> None:
    """Three servers make one cluster over encrypted routes, with certificates that serve as those
    of clients, too.
    """
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a hub of three is 2.10 or later")
    tls, _ = folders
    ports: dict[str, int] = {}
    while len(set(ports.values())) < 3:
        ports = {name: free_port() for name in ("m0", "m1", "m2")}
    text = render_hub(version_of(nats_binary), members=tuple(ports), tls=str(tls)).replace(
        '"0.0.0.0:7422"', '"127.0.0.1:-1"'
    )
    for name, port in ports.items():
        text = text.replace(f"nats://{name}:6222", f"nats://127.0.0.1:{port}")
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(
                ShapedServer(
                    binary=nats_binary,
                    text=text.replace('"0.0.0.0:6222"', f'"127.0.0.1:{port}"'),
                    environment={"TOPOBUS_HUB_NAME": name},
                )
            )
            for name, port in ports.items()
        ]
        first, *others = [
            await stack.enter_async_context(
                Bus.session(
                    NatsSettings(url=member.url.replace("nats://", "tls://"), tls_ca_file=str(tls / "ca.crt")),
                    name="topobus-cli",
                )
            )
            for member in members
        ]
        for number, other in enumerate(others):
            await _until_heard(first, other, f"topobus.test.{number}")
        # A listener in clear would not answer a handshake.
        trusting = ssl.create_default_context(cafile=tls / "ca.crt")
        _, writer = await asyncio.open_connection("127.0.0.1", ports["m0"], ssl=trusting)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("shape", "oldest"), [("leaf", (2, 10)), ("leaf", (2, 14)), ("hub", (2, 10)), ("hub", (2, 12)), ("hub", (2, 14))]
)
async def test_rendered_file_is_taken_when_users_and_certificate_are_made_as_the_manual_says(
    nats_binary: Path, tmp_path: Path, folders: tuple[Path, Path], shape: str, oldest: tuple[int, int]
) -> None:
    """The files of deploy/nats with TLS are a configuration of the servers that they are for."""
    if version_of(nats_binary) < oldest:
        pytest.skip(f"this server is older than {oldest}")
    assert (
        await asyncio.to_thread(
            run,
            [
                "keys",
                "make",
                str(tmp_path / "users"),
                "--shape",
                shape,
                "--node",
                "n1",
                "--server-file",
                str(tmp_path / "users.conf"),
            ],
        )
        == 0
    )
    text = (
        (_DEPLOYED / f"{shape}-tls-{oldest[0]}.{oldest[1]}.conf")
        .read_text()
        .replace("/etc/topobus/nats-tls", str(folders[0]))
    )
    (tmp_path / "nats.conf").write_text(text)
    names = {
        "TOPOBUS_LEAF_DOMAIN": "node-n1",
        "TOPOBUS_LEAF_HUB_URL": "tls://leaf-n1:p@hub:7422",
        "TOPOBUS_HUB_NAME": "hub",
    }
    checked = await asyncio.create_subprocess_exec(
        nats_binary, "-t", "-c", str(tmp_path / "nats.conf"), env=names, stderr=asyncio.subprocess.PIPE
    )
    _, said = await checked.communicate()

    assert checked.returncode == 0, said.decode()


async def test_link_comes_back_when_certificate_and_authority_change_while_both_run(
    nats_binary: Path, folders: tuple[Path, Path]
) -> None:
    """In the manual's three steps, with the link lost after each: what the relay says goes on
    arriving, and no server was started anew.
    """
    tls, authority = folders
    now = datetime.now(UTC)

    def renew() -> None:
        certify(tls, (), authority=authority, now=now, is_renewal=True)

    steps = (
        lambda: add_authority(tls, authority=authority, now=now),
        renew,
        lambda: drop_old_authorities(tls, authority=authority),
    )
    async with asyncio.timeout(2 * _LIMIT_S), leaf_pair(nats_binary, hub_tls=str(tls), leaf_tls=str(tls)) as pair:
        pids = pair.hub.pid, pair.leaf.pid
        async with _buses(pair, tls) as (hub, leaf):
            sequence = await _write(leaf, 1, 0)
            for number, step in enumerate(steps, start=1):
                await asyncio.to_thread(step)
                await _reload(pair.leaf, times=number)
                await _reload(pair.hub, times=number)
                pair.link.cut()
                pair.link.join()
                sequence = await _write(leaf, number + 1, sequence)
            stored = await hub.get(MACHINE, node=NODE)
        assert (pair.hub.pid, pair.leaf.pid) == pids

    assert stored is not None
    assert stored.value.generation == 4
