"""A real nats-server for each test that asks for one: an account of a shared one or one of its own,
in every version that the environment names.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from lab.memory_nats.memory_server import MemoryNats
from lab.servers.lent_accounts import NatsAccounts
from lab.servers.shaped_servers import cheap_folder
from topobus.bus.bus import Bus
from topobus.bus.connection import connection
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer, find_nats_server
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import ConfigError
from topobus.values.machine import Machine


def _binaries() -> list[Path]:
    """List the servers to test on: TOPOBUS_NATS_SERVERS (paths, colon-separated), else the one that
    is found.
    """
    given = [Path(part) for part in os.environ.get("TOPOBUS_NATS_SERVERS", "").split(os.pathsep) if part]
    if given:
        return given
    try:
        return [find_nats_server()]
    except ConfigError:
        return []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that needs a server once per version, or in memory (None) if it is marked so.

    The bus's contract suite does both.
    """
    if "nats_binary" not in metafunc.fixturenames:
        return
    markers = {marker.name for marker in metafunc.definition.iter_markers()}
    # Who takes the binary itself starts servers.
    starts_servers = "nats_binary" in inspect.signature(metafunc.function).parameters
    is_real_only = starts_servers or "real_server" in markers or not markers & {"both_buses", "memory_bus"}
    is_real = is_real_only or "both_buses" in markers or metafunc.config.getoption("--real-bus")
    is_in_memory = not is_real_only and ("both_buses" in markers or not is_real)
    binaries = _binaries() if is_real else []
    if is_real and not binaries:
        # No silent skip: a suite that tested nothing must not look green.
        pytest.fail("no nats-server: install the package nats-server or set TOPOBUS_NATS_SERVER", pytrace=False)
    servers = [pytest.param(path, id=str(path) if len(binaries) > 1 else "nats") for path in binaries]
    metafunc.parametrize(
        "nats_binary", [*([pytest.param(None, id="memory")] if is_in_memory else []), *servers], scope="session"
    )


@pytest.fixture(scope="session")
def nats_accounts(nats_binary: Path | None) -> Iterator[NatsAccounts]:
    """The server of this worker, of which each test borrows an account.

    A test in memory borrows none.
    """
    with NatsAccounts(binary=nats_binary) as accounts:
        yield accounts


@pytest_asyncio.fixture
async def nats_server(
    nats_binary: Path | None, nats_accounts: NatsAccounts, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NatsServer]:
    """An empty server, as far as its clients can tell: one in memory, or an account that nobody had
    before.

    It cannot be stopped or configured.
    """
    if nats_binary is None:
        yield _in_memory(monkeypatch)
        return
    async with nats_accounts.borrow() as server:
        yield server


def _in_memory(monkeypatch: pytest.MonkeyPatch) -> NatsServer:
    """Make a server in memory that every connection of this process finds at its URL.

    Nothing else can be reached while the test lasts.
    """
    server = MemoryNats()
    monkeypatch.setattr(connection, "GatedClient", server.new_client)
    return cast("NatsServer", server)


@pytest_asyncio.fixture
async def own_nats_server(nats_binary: Path | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsServer]:
    """A server of the test's own with an empty store, to stop, freeze, kill or look into."""
    if nats_binary is None:
        yield _in_memory(monkeypatch)
        return
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
    # It counts, as a service's does: what only the counters tell can be looked at.
    made = await Bus.connect(NatsSettings(url=server.url), name="topobus-cli", registry=CollectorRegistry())
    try:
        await made.provision()
        yield made
    finally:
        await made.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[Inventory]]:
    """The demo machine with what its GPU and NIC drivers find.

    Read once, for its tree has thousands of files. Another node's is
    made of it by replacing the name.
    """
    root = tmp_path_factory.mktemp("dgx")
    build("dgx", root)
    tree = Tree(HardwareSettings(root=str(root)))
    machine = read_machine(tree, "demo-node")
    inventories = []
    for device_class, driver in (("gpu", NvidiaDriver()), ("nic", PciNetdevDriver())):
        devices = sorted(driver.discover(tree, machine).devices, key=lambda device: device.name)
        inventories.append(
            Inventory(node=machine.node, device_class=device_class, generation=1, devices=tuple(devices))
        )
    shutil.rmtree(root)
    return machine, inventories


@pytest_asyncio.fixture
async def topologies() -> AsyncIterator[AsyncExitStack]:
    """Ends the topology services that a test started in its own process, before its bus."""
    async with AsyncExitStack() as stack:
        yield stack
