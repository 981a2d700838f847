"""A real nats-server for each test that asks for one: an account of a shared one or one of its own, in every version that the environment names."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from topobus.domain.errors import ConfigError
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, find_nats_server
from topobus.testing.nats.accounts import NatsAccounts, cheap_folder


def _binaries() -> list[Path]:
    """List the servers to test on: TOPOBUS_NATS_SERVERS (paths, colon-separated), else the one that is found."""
    given = [Path(part) for part in os.environ.get("TOPOBUS_NATS_SERVERS", "").split(os.pathsep) if part]
    if given:
        return given
    try:
        return [find_nats_server()]
    except ConfigError:
        return []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that needs a server once per version."""
    if "nats_binary" in metafunc.fixturenames:
        binaries = _binaries()
        if not binaries:
            # No silent skip: a suite that tested nothing must not look green.
            pytest.fail("no nats-server: install the package nats-server or set TOPOBUS_NATS_SERVER", pytrace=False)
        metafunc.parametrize(
            "nats_binary", binaries, ids=[str(path) if len(binaries) > 1 else "nats" for path in binaries], scope="session"
        )


@pytest.fixture(scope="session")
def nats_accounts(nats_binary: Path) -> Iterator[NatsAccounts]:
    """The server of this worker, of which each test borrows an account."""
    with NatsAccounts(binary=nats_binary) as accounts:
        yield accounts


@pytest_asyncio.fixture
async def nats_server(nats_accounts: NatsAccounts) -> AsyncIterator[NatsServer]:
    """An empty server, as far as its clients can tell: an account that nobody had before. It cannot be stopped or configured."""
    async with nats_accounts.borrow() as server:
        yield server


@pytest_asyncio.fixture
async def own_nats_server(nats_binary: Path) -> AsyncIterator[NatsServer]:
    """A server of the test's own with an empty store, to stop, freeze, kill or look into."""
    async with NatsServer(binary=nats_binary, parent=cheap_folder()) as server:
        yield server


@pytest_asyncio.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A connected bus with all streams and buckets made."""
    async with _provisioned(nats_server) as made:
        yield made


@pytest_asyncio.fixture
async def own_bus(own_nats_server: NatsServer) -> AsyncIterator[Bus]:
    """The same on a server of the test's own."""
    async with _provisioned(own_nats_server) as made:
        yield made


@asynccontextmanager
async def _provisioned(server: NatsServer) -> AsyncIterator[Bus]:
    async with Bus.session(NatsSettings(url=server.url), name="topobus-cli") as made:
        await made.provision()
        yield made
