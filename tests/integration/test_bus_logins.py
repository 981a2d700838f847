"""Logins that change while a service runs, on a real server: newer credentials are taken before the older ones are left, and what has expired or was revoked is out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from docpages.samples import sample
from prometheus_client import CollectorRegistry

from support.account_nats import LIMIT_S, AccountNats
from support.gateway_rig import WatchedReadiness
from topobus.contracts.catalogue import DEVICE_SERVICES, PREPARE
from topobus.contracts.messages import PrepareRequest
from topobus.contracts.nats_accounts import Account, Shape, accounts
from topobus.contracts.nats_keys import parse_credentials
from topobus.runtime.bus import Bus
from topobus.runtime.operator_keys import SERVER_FILE, OperatorFolder, credentials_file
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
    """A gateway that asks a device service all the time; a question that fails is noted."""

    def __init__(self, gateway: Bus, gpu: Bus) -> None:
        self._gateway = gateway
        self._gpu = gpu
        self.answered = 0
        self.handled: list[str] = []

    async def answer(self) -> None:
        """Answer as the gpu service does, by the right that comes with each request."""

        async def handle(request: PrepareRequest) -> object:
            self.handled.append(type(request).__name__)
            return sample(PREPARE.reply)

        await self._gpu.answer(PREPARE, handle, node="n1", device_class="gpu")  # type: ignore[arg-type]  # any answer of the right kind

    async def ask_until(self, is_enough: Callable[[], bool]) -> None:
        """Ask one after the other; the first that is refused or lost ends the test."""
        request = sample(PREPARE.request)
        async with asyncio.timeout(LIMIT_S):
            while not is_enough():
                await self._gateway.ask(PREPARE, request, node="n1", device_class="gpu", timeout_s=LIMIT_S)
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
            assert registry.get_sample_value("topobus_bus_credentials_expire_seconds") == expires_at
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
