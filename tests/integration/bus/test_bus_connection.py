"""The supervised connection against a real server: every way in which a naked nats-py client goes
deaf or dies (B1 to B6, B12, B14).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from integration.values import inventory, release, released
from topobus.bus.bus import AmbiguousWrite, Bus
from topobus.bus.connection.connection import Connection
from topobus.formats.messages.catalogue import INVENTORY, RELEASE
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_LIMIT_S = 30.0


def _connection(bus: Bus) -> Connection:
    return bus._connection


async def _until_lost(bus: Bus, *, limit_s: float = _LIMIT_S) -> None:
    """Wait until the bus knows that its client is gone."""
    changed = asyncio.Event()
    forget = _connection(bus).on_change(changed.set)
    try:
        async with asyncio.timeout(limit_s):
            while bus.is_connected:
                changed.clear()
                await changed.wait()
    finally:
        forget()


async def _until_up(bus: Bus) -> None:
    async with asyncio.timeout(_LIMIT_S):
        await bus.wait_connected()


async def _answer(bus: Bus) -> None:
    async def handle(_request: object) -> object:
        return released()

    await bus.answer(RELEASE, handle, node="n1")  # type: ignore[arg-type]  # a handler for any request


@pytest.mark.virtual_time
async def test_bus_talks_again_when_the_server_froze_for_longer_than_the_canary(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """B1: a server that is frozen and thawed leaves no deaf client: the canary notices, a new
    client asks and answers.
    """
    await _answer(own_bus)
    own_nats_server.pause()
    # The canary needs 6 s; without it nats-py's own pings would notice after 15.
    await _until_lost(own_bus, limit_s=10)
    own_nats_server.resume()
    await _until_up(own_bus)

    assert await own_bus.ask(RELEASE, release(), node="n1") == released()


async def test_barrier_leaves_the_client_alive_when_it_was_given_up(own_nats_server: NatsServer, own_bus: Bus) -> None:
    """B1: giving a barrier up, and its echo coming late, must not kill the read loop as a timed-out
    flush of nats-py does.
    """
    generation = _connection(own_bus).generation
    own_nats_server.pause()
    with pytest.raises(TimeoutError):
        await _connection(own_bus).barrier(timeout_s=0.2)
    own_nats_server.resume()

    await _connection(own_bus).barrier(timeout_s=_LIMIT_S)
    assert _connection(own_bus).generation == generation


async def test_answer_is_heard_when_another_client_asks_at_once(nats_server: NatsServer, bus: Bus) -> None:
    """B2: when `answer` has returned, the server knows the subscription: no asker on another
    connection hears "nobody there".
    """
    async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as asker:
        for number in range(200):

            async def handle(_request: object) -> object:
                return released()

            node = f"n{number}"
            await bus.answer(RELEASE, handle, node=node)  # type: ignore[arg-type]  # a handler for any request

            assert await asker.ask(RELEASE, release(), node=node) == released()


async def test_bus_comes_back_when_the_server_refused_its_user_for_a_while(nats_binary: Path, tmp_path: Path) -> None:
    """B3: an -ERR (here: our user is gone) closes a nats-py client for good.

    Ours is replaced until the server takes us again.
    """
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    users = 'authorization {{ users: [ {{user: "{name}", password: "s3cret"}} ] }}'
    async with NatsServer(binary=nats_binary, config=users.format(name="topobus")) as server:
        settings = NatsSettings(url=server.url, user="topobus", password_file=str(password))
        async with Bus.session(settings, name="test") as bus:
            await bus.provision()
            server.reload(users.format(name="somebody-else"))
            await _until_lost(bus)
            server.reload(users.format(name="topobus"))
            await _until_up(bus)

            assert await bus.put(INVENTORY, inventory(1), node="n1", device_class="gpu") == 1


async def test_publish_refuses_and_stays_connected_when_headers_make_the_message_too_large(nats_binary: Path) -> None:
    """B4: the server counts headers into max_payload and hangs up.

    We count them too and refuse before sending.
    """
    async with (
        NatsServer(binary=nats_binary, config="max_payload: 65536") as server,
        Bus.session(NatsSettings(url=server.url), name="test") as bus,
    ):
        connection = _connection(bus)
        generation = connection.generation

        with pytest.raises(ContractError, match="max_payload"):
            await connection.publish("x", b"x" * 65_500, headers={"key": "y" * 100})
        await connection.publish("x", b"x" * 65_300, headers={"key": "y" * 100})
        await connection.barrier()
        assert connection.generation == generation


async def test_put_refuses_and_stays_connected_when_the_value_is_larger_than_the_bucket_takes(bus: Bus) -> None:
    """A value beyond the catalogue's limit, compressed too, is a ContractError here, not a lost
    connection.

    One just below it is written as it is.
    """
    with pytest.raises(ContractError, match="bucket takes"):
        await bus.put(
            INVENTORY, inventory(1, padding_bytes=3 * INVENTORY.max_value_bytes), node="n1", device_class="gpu"
        )

    assert (
        await bus.put(
            INVENTORY, inventory(1, padding_bytes=INVENTORY.max_value_bytes - 300), node="n1", device_class="gpu"
        )
        == 1
    )


async def test_ask_is_never_made_later_when_it_failed_during_an_outage(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """B5: an ask that failed while the server was away fails at once and is not replayed after the
    reconnect.
    """
    handled: list[object] = []

    async def handle(request: object) -> object:
        handled.append(request)
        return released()

    await own_bus.answer(RELEASE, handle, node="n1")  # type: ignore[arg-type]  # a handler for any request
    await own_nats_server.stop()
    await _until_lost(own_bus)
    with pytest.raises(PeerUnavailable, match="not connected"):
        await own_bus.ask(RELEASE, release("lost"), node="n1")
    await own_nats_server.start()
    await _until_up(own_bus)

    await own_bus.ask(RELEASE, release("later"), node="n1")
    assert handled == [release("later")]


async def test_ask_fails_at_once_when_the_connection_is_lost_while_it_waits(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """Whoever waits for an answer learns within moments that the connection is gone, not after its
    whole timeout.
    """
    is_asked = asyncio.Event()

    async def handle(_request: object) -> object:
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    await own_bus.answer(RELEASE, handle, node="n1")  # type: ignore[arg-type]  # a handler for any request
    asking = asyncio.create_task(own_bus.ask(RELEASE, release(), node="n1", timeout_s=600))
    await asyncio.wait_for(is_asked.wait(), _LIMIT_S)
    await own_nats_server.kill()

    with pytest.raises(PeerUnavailable, match="went away"):
        await asyncio.wait_for(asking, _LIMIT_S)


async def test_connect_waits_when_the_server_starts_later(nats_binary: Path) -> None:
    """B6: a service may start before NATS.

    Connecting waits, says what it waits for, and then works.
    """
    port = free_port()
    readiness = Readiness()
    connecting = asyncio.create_task(
        Bus.connect(NatsSettings(url=f"nats://127.0.0.1:{port}"), name="test", readiness=readiness)
    )
    with suppress(TimeoutError):
        # Long enough for several refused connects; waiting is what is tested.
        await asyncio.wait_for(asyncio.shield(connecting), 1.0)
    report = readiness.report()["bus"]
    async with NatsServer(binary=nats_binary, port=port):
        bus = await asyncio.wait_for(connecting, _LIMIT_S)
        await bus.close()

    assert "waiting for NATS" in report
    assert str(port) in report


async def test_write_is_ambiguous_when_the_server_freezes(own_nats_server: NatsServer) -> None:
    """A write that was sent and not confirmed is neither done nor undone, and is called so."""
    async with Bus.session(NatsSettings(url=own_nats_server.url), name="provisioner") as patient:
        await patient.provision()
    async with Bus.session(NatsSettings(url=own_nats_server.url, timeout_s=0.5), name="test") as bus:
        own_nats_server.pause()
        with pytest.raises(AmbiguousWrite):
            await bus.compare_and_set(INVENTORY, inventory(1), 0, node="n1", device_class="gpu")
        own_nats_server.resume()


async def test_readiness_fails_when_the_server_denies_a_subject(nats_binary: Path, tmp_path: Path) -> None:
    """B12: a denied subscription raises nothing in nats-py.

    Ours makes the process not ready and names the subject.
    """
    password = tmp_path / "password"
    password.write_text("s3cret")
    config = """authorization { users: [ {user: "u", password: "s3cret", permissions: {publish: ">", subscribe: ["_INBOX.>"]}} ] }"""  # noqa: E501
    readiness = Readiness()
    async with NatsServer(binary=nats_binary, config=config) as server:
        settings = NatsSettings(url=server.url, user="u", password_file=str(password))
        bus = await Bus.connect(settings, name="test", readiness=readiness)
        try:
            assert readiness.is_ready
            await _answer(bus)

            assert not readiness.is_ready
            assert RELEASE.subject(node="n1") in readiness.report()["bus-permissions"]
        finally:
            await bus.close()


async def test_errors_are_counted_when_the_client_reports_them_aside(nats_binary: Path, tmp_path: Path) -> None:
    """B14: what nats-py only tells its error callback shows in the metrics."""
    password = tmp_path / "password"
    password.write_text("s3cret")
    config = """authorization { users: [ {user: "u", password: "s3cret", permissions: {publish: ["_INBOX.>"], subscribe: ">"}} ] }"""  # noqa: E501
    registry = CollectorRegistry()
    async with NatsServer(binary=nats_binary, config=config) as server:
        settings = NatsSettings(url=server.url, user="u", password_file=str(password))
        bus = await Bus.connect(settings, name="test", registry=registry)
        try:
            await _connection(bus).publish("denied")
            await _connection(bus).barrier()
        finally:
            await bus.close()

    assert registry.get_sample_value("topobus_bus_errors_total", {"kind": "Error"}) == 1.0


async def test_connect_fails_when_a_password_file_is_missing(nats_server: NatsServer, tmp_path: Path) -> None:
    """B14: an unreadable password file is the operator's mistake and said at once, not retried as
    if the network were down.
    """
    with pytest.raises(ConfigError, match="password_file"):
        await asyncio.wait_for(
            Bus.connect(NatsSettings(url=nats_server.url, user="u", password_file=str(tmp_path / "none")), name="test"),
            _LIMIT_S,
        )


@pytest.mark.parametrize("url", ["http://localhost", "nats://", "nats://host:port", ""])
async def test_connect_fails_when_the_url_is_none(url: str) -> None:
    """A URL that cannot be one is refused with the key's name, before any waiting."""
    with pytest.raises(ConfigError, match=r"nats\.url"):
        await Bus.connect(NatsSettings(url=url), name="test")
