"""Logins that change while a service runs, on a real server: newer credentials are taken before the older ones are left, and what has expired or was revoked is out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from docpages.samples import sample
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from support.account_nats import LIMIT_S, AccountNats
from support.gateway_rig import WatchedReadiness
from topobus.cli.application import run
from topobus.contracts.catalogue import ADOPT, PREPARE
from topobus.contracts.device_classes import DEVICE_SERVICES
from topobus.contracts.nats_accounts import Account, Shape, accounts
from topobus.contracts.nats_keys import parse_credentials
from topobus.contracts.nouns import Ask
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.runtime.operator_keys import SERVER_FILE, OperatorFolder, credentials_file
from topobus.runtime.user_keys import split_login
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_ZONES = {"": "core", **dict.fromkeys(DEVICE_SERVICES, "vendor")}
# Long enough for a busy machine to change over, short enough to wait for.
_VALID_S = 8


class Operated:
    """A server with an operator's users, whose files a test changes."""

    def __init__(self, server: NatsServer, folder: Path, described: tuple[Account, ...]) -> None:
        self.server = server
        self.folder = folder
        self._described = described
        self.nats = AccountNats(server, described, _ZONES, operator=folder)

    def files(self) -> OperatorFolder:
        """Give the operator's files, now."""
        return OperatorFolder(self.folder, self._described, now=int(time.time()))

    def reload(self) -> None:
        """Let the server read what the operator says."""
        self.server.reload((self.folder / SERVER_FILE).read_text())


@asynccontextmanager
async def _operated(binary: Path, folder: Path) -> AsyncIterator[Operated]:
    described = accounts(Shape.CENTRAL)
    OperatorFolder(folder, described, now=int(time.time())).make()
    async with NatsServer(binary=binary, config=(folder / SERVER_FILE).read_text()) as server:
        yield Operated(server, folder, described)


class Asking:
    """A gateway that asks another service all the time: a question that fails ends the test."""

    def __init__(self, gateway: Bus, answerer: Bus, ask: Ask[Any, Any] = PREPARE) -> None:
        self._gateway = gateway
        self._answerer = answerer
        self._ask = ask
        known_parts = {"node": "n1", "device_class": "gpu"}
        self._parts = {part: known_parts[part] for part in ask.parts}
        self.answered = 0
        self.handled: list[str] = []

    async def answer(self) -> None:
        """Answer; a device service by the right that comes with each request."""

        async def handle(request: object) -> object:
            self.handled.append(type(request).__name__)
            return sample(self._ask.reply)

        await self._answerer.answer(self._ask, handle, **self._parts)

    async def ask_until(self, is_enough: Callable[[], bool]) -> None:
        """Ask one after the other; the first that is refused or lost ends the test."""
        request = sample(self._ask.request)
        async with asyncio.timeout(LIMIT_S):
            while not is_enough():
                await self._gateway.ask(self._ask, request, timeout_s=LIMIT_S, **self._parts)
                self.answered += 1


@asynccontextmanager
async def _asking(nats: AccountNats) -> AsyncIterator[tuple[Asking, Bus, Bus]]:
    async with nats.bus("gateway") as gateway, nats.bus("gpu") as gpu:
        asking = Asking(gateway, gpu)
        await asking.answer()
        yield asking, gateway, gpu


def _generation(bus: Bus) -> int:
    return bus._connection.generation


@pytest.mark.parametrize(("shape", "nodes"), [(Shape.CENTRAL, ("n1", "n2")), (Shape.LEAF, ("n1",)), (Shape.HUB, ("n1", "n2"))])
async def test_everybody_logs_in_when_an_operator_signed(nats_binary: Path, tmp_path: Path, shape: Shape, nodes: tuple[str, ...]) -> None:
    """Each principal of each shape comes in by its credentials, and hears itself."""
    described = accounts(shape, nodes=nodes)
    OperatorFolder(tmp_path / "operator", described, now=int(time.time())).make()
    async with NatsServer(binary=nats_binary, config=(tmp_path / "operator" / SERVER_FILE).read_text()) as server:
        nats = AccountNats(server, described, _ZONES, operator=tmp_path / "operator")
        for name, user in nats.users.items():
            async with nats.client(name) as client:
                # A node's leaf has no inbox of its own: that it was let in is all.
                if user.principal != "leaf":
                    await client.barrier()
                assert client.denials == []


async def test_no_ask_fails_when_credentials_are_renewed_until_the_first_expire(nats_binary: Path, tmp_path: Path) -> None:
    """Asker and answerer change over several times while questions go on, beyond the end of what they came with: each one is answered, and handled once."""
    async with _operated(nats_binary, tmp_path / "operator") as operated, _asking(operated.nats) as (asking, gateway, gpu):
        operated.files().rotate(["gateway", "gpu"], valid_s=_VALID_S)
        expired_at = time.time() + _VALID_S + 1
        await asking.ask_until(lambda: min(_generation(gateway), _generation(gpu)) == 2)
        operated.files().rotate(["gateway", "gpu"], valid_s=600)
        await asking.ask_until(lambda: min(_generation(gateway), _generation(gpu)) == 3)
        await asking.ask_until(lambda: time.time() > expired_at)

        assert len(asking.handled) == asking.answered > 0
        assert (_generation(gateway), _generation(gpu)) == (3, 3)
        assert [bus.is_connected for bus in (gateway, gpu)] == [True, True]


async def test_service_says_why_and_comes_back_when_its_credentials_expired(nats_binary: Path, tmp_path: Path) -> None:
    """First a warning with the date, then a stated reason instead of a dead connection; newer credentials are taken as soon as they are there."""
    readiness, registry = WatchedReadiness(), CollectorRegistry()
    async with _operated(nats_binary, tmp_path / "operator") as operated:
        operated.files().rotate(["gpu"], valid_s=_VALID_S)
        async with operated.nats.bus("gpu", readiness=readiness, registry=registry) as gpu:
            expires_at = parse_credentials(credentials_file(operated.folder, "gpu").read_text()).expires_at
            assert registry.get_sample_value("topobus_bus_credentials_expiry_timestamp_seconds") == expires_at
            await readiness.until(lambda parts: "expire at" in parts["bus"], timeout_s=LIMIT_S)
            await readiness.until(lambda parts: "expired at" in parts["bus"], timeout_s=LIMIT_S)
            assert "users/gpu/user.creds" in readiness.report()["bus"]
            assert "put newer ones there" in readiness.report()["bus"]

            operated.files().rotate(["gpu"], valid_s=600)
            async with asyncio.timeout(LIMIT_S):
                await gpu.wait_connected()

            assert readiness.report()["bus"] == "ready"


async def test_user_is_out_when_it_was_revoked(nats_binary: Path, tmp_path: Path) -> None:
    """The server ends its connection and lets it in no more; others do not notice, and newer credentials bring it back."""
    readiness = WatchedReadiness()
    async with _operated(nats_binary, tmp_path / "operator") as operated, operated.nats.bus("gateway") as gateway:
        file = credentials_file(operated.folder, "gpu")
        kept = file.read_bytes()
        async with operated.nats.bus("gpu", readiness=readiness):
            operated.files().revoke(["gpu"])
            # Whoever kept a copy.
            file.write_bytes(kept)
            operated.reload()
            await readiness.until(lambda parts: "violation" in parts["bus"].lower() or "revoked" in parts["bus"].lower(), timeout_s=LIMIT_S)
            operated.files().rotate(["gpu"])

            await readiness.until(lambda parts: parts["bus"] == "ready", timeout_s=LIMIT_S)
        assert _generation(gateway) == 1


async def _until_generation(bus: Bus, generation: int) -> None:
    """Wait until a bus has changed its client so often."""
    changed = asyncio.Event()
    forget = bus._connection.on_change(changed.set)
    try:
        async with asyncio.timeout(LIMIT_S):
            while _generation(bus) < generation:
                changed.clear()
                await changed.wait()
    finally:
        forget()


@pytest.mark.parametrize(("form", "ask", "answerer"), [("--one-account", PREPARE, "gpu"), ("--accounts", ADOPT, "topology")])
async def test_no_ask_fails_when_passwords_are_changed_with_an_overlap(
    nats_binary: Path, tmp_path: Path, form: str, ask: Ask[Any, Any], answerer: str
) -> None:
    """Asker and answerer take new passwords twice, and those of before count no more, while questions go on: each one is answered, and handled once.

    Between accounts one that is on its way when the server reads its users again may stay without an answer: the server forgets then who may answer what.
    """
    folder, server_file = tmp_path / "users", tmp_path / "users.conf"

    async def keys(*words: str) -> None:
        assert await asyncio.to_thread(run, ["keys", words[0], str(folder), *words[1:], "--server-file", str(server_file)]) == 0

    def settings(name: str) -> NatsSettings:
        return NatsSettings(url=server.url, user=name, password_file=str(folder / name / "password"))

    await keys("make", form)
    async with (
        NatsServer(binary=nats_binary, config=server_file.read_text()) as server,
        Bus.session(settings("gateway"), name="gateway") as gateway,
        Bus.session(settings(answerer), name=answerer) as other,
    ):
        asking, is_over = Asking(gateway, other, ask), asyncio.Event()
        await asking.answer()
        async with asyncio.TaskGroup() as group:
            group.create_task(asking.ask_until(is_over.is_set))
            for generation in (2, 3):
                before = split_login(answerer, (folder / answerer / "password").read_text().strip())
                await keys("rotate", "gateway", answerer, "--overlap")
                server.reload(server_file.read_text())
                await _until_generation(gateway, generation)
                await _until_generation(other, generation)
                await asyncio.wait_for(_settled(gateway, other), LIMIT_S)
                await keys("forget")
                server.reload(server_file.read_text())
                await _until_refused(server.url, *before)
            is_over.set()

        assert len(asking.handled) == asking.answered > 0
        assert (_generation(gateway), _generation(other)) == (3, 3)


async def _settled(*buses: Bus) -> None:
    """Wait until no client of before lingers: whoever forgets a password sooner cuts it off."""
    for bus in buses:
        while retiring := set(bus._connection.retirement._retiring.values()):
            await asyncio.wait(retiring)


async def _until_refused(url: str, user: str, password: str) -> None:
    """Log in until the server, which was told to read its users again, does not take this any more."""

    async def ignore(_: Exception) -> None:
        return

    async with asyncio.timeout(LIMIT_S):
        while True:
            client = Client()
            try:
                await client.connect(url, user=user, password=password, allow_reconnect=False, error_cb=ignore)
            except (nats.errors.Error, OSError):
                # The server says why, and hangs up: which of both is seen first is chance.
                return
            await client.close()
