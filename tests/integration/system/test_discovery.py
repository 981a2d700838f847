"""Discovery as a real process: the entry follows the tree, without a restart, through bad trees and
a lost store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from topobus.bus.bus import Bus
from topobus.bus.streams.state import ChangeKind
from topobus.formats.messages.catalogue import MACHINE
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress

pytestmark = pytest.mark.integration

NODE = "demo-node"
# The promise to a supervisor: SIGTERM ends the process within so many seconds.
STOP_LIMIT_S = 60.0
WAIT_S = 30.0
NVME = PciAddress.parse("0000:01:00.0")


@asynccontextmanager
async def discovery(url: str, root: Path, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the service on a tree; its log lines are in stdout.

    `settings` are more variables of its environment.
    """
    environment = {
        **os.environ,
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_ALL__NATS__URL": url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(root),
        "TOPOBUS_ALL__HARDWARE__RESCAN_S": "0.1",
        "TOPOBUS_ALL__LOG__FORMAT": "json",
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.discovery.main",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextmanager
def standing_still(process: asyncio.subprocess.Process) -> Iterator[None]:
    """Stop the service while the tree changes.

    A change is many files, and a writer that loses the processor between two of them leaves half a
    change in the tree for as long as it takes: discovery would be right to publish it.
    """
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def logged(process: asyncio.subprocess.Process, event: str) -> str:
    """Read the log up to a line with this event."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        while line := (await process.stdout.readline()).decode():
            if f'"{event}"' in line:
                return line
    pytest.fail(f"the log ended without {event}")


async def machine_when(bus: Bus, holds: Callable[[Machine], bool]) -> Machine:
    """Wait until the entry says so."""
    async with asyncio.timeout(WAIT_S), aclosing(bus.watch(MACHINE, node=NODE)) as changes:
        async for change in changes:
            if change.kind is ChangeKind.PUT and change.value is not None and holds(change.value):
                return change.value
    raise AssertionError("the watch ended")


@pytest.fixture
def laptop(tmp_path: Path) -> RecordedMachine:
    """A small recorded machine."""
    return build("laptop", tmp_path / "laptop")


async def test_discovery_entry_follows_when_a_cpu_and_a_device_go_and_come_back(
    nats_server: NatsServer, bus: Bus, laptop: RecordedMachine
) -> None:
    """CPU offline and back, device gone and back: each change is one new generation, the log says
    what changed, and nothing restarts.
    """
    async with discovery(nats_server.url, laptop.root) as process:
        first = await machine_when(bus, lambda machine: len(machine.online_cpus) == 16)

        with standing_still(process):
            laptop.set_cpu_online(3, is_online=False)
        fewer = await machine_when(bus, lambda machine: 3 not in machine.online_cpus)
        with standing_still(process):
            laptop.set_cpu_online(3, is_online=True)
        whole = await machine_when(
            bus, lambda machine: machine.generation > fewer.generation and 3 in machine.online_cpus
        )
        with standing_still(process):
            laptop.remove_pci(str(NVME))
        without = await machine_when(
            bus, lambda machine: NVME not in {pci_device.address for pci_device in machine.pci_devices}
        )
        with standing_still(process):
            laptop.restore_pci(str(NVME))
        again = await machine_when(bus, lambda machine: machine.generation > without.generation)

        assert [machine.generation for machine in (first, fewer, whole, without, again)] == [1, 2, 3, 4, 5]
        assert again.pci_devices == first.pci_devices
        assert "cpus-offline 3" in await logged(process, "machine.changed")


async def test_discovery_goes_on_counting_when_started_again(
    nats_server: NatsServer, bus: Bus, laptop: RecordedMachine
) -> None:
    """A new process on an unchanged machine writes nothing.

    On a changed one it writes the next generation.
    """
    async with discovery(nats_server.url, laptop.root):
        await machine_when(bus, lambda machine: True)
    before = await bus.get(MACHINE, node=NODE)
    async with discovery(nats_server.url, laptop.root) as process:
        await logged(process, "machine.unchanged")
        same = await bus.get(MACHINE, node=NODE)

        with standing_still(process):
            laptop.set_cpu_online(15, is_online=False)
        changed = await machine_when(bus, lambda machine: 15 not in machine.online_cpus)

    assert before is not None
    assert same is not None
    assert (same.revision, changed.generation) == (before.revision, 2)


async def test_discovery_keeps_the_last_machine_when_the_tree_becomes_unreadable(
    nats_server: NatsServer, bus: Bus, laptop: RecordedMachine
) -> None:
    """A tree that vanishes is logged once and changes nothing.

    When it is back, discovery goes on.
    """
    async with discovery(nats_server.url, laptop.root) as process:
        await machine_when(bus, lambda machine: True)
        away = laptop.root.with_name("away")
        laptop.root.rename(away)
        line = await logged(process, "machine.unreadable")
        kept = await bus.get(MACHINE, node=NODE)

        away.rename(laptop.root)
        await logged(process, "machine.readable-again")
        laptop.set_cpu_online(2, is_online=False)
        after = await machine_when(bus, lambda machine: 2 not in machine.online_cpus)

    assert "last good machine stays" in line
    assert kept is not None
    assert (kept.value.generation, len(kept.value.online_cpus), after.generation) == (1, 16, 2)


async def test_discovery_publishes_again_when_the_entry_is_lost(
    nats_server: NatsServer, bus: Bus, laptop: RecordedMachine
) -> None:
    """An entry that somebody deleted comes back by itself, with the same generation: the machine is
    the same.
    """
    async with discovery(nats_server.url, laptop.root):
        first = await machine_when(bus, lambda machine: True)
        await bus.delete(MACHINE, node=NODE)

        again = await machine_when(bus, lambda machine: True)

    assert again == first


async def test_discovery_explains_when_the_root_is_no_machine(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """A root without a machine: a warning that names the setting, no entry, and the process stays
    to look again.
    """
    async with discovery(nats_server.url, tmp_path) as process:
        line = await logged(process, "machine.unreadable")

        assert "hardware.root" in line
        assert await bus.get(MACHINE, node=NODE) is None
        assert process.returncode is None
