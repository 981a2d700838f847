"""The publisher of the machine: what could not be published is published as soon as that is
possible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from topobus.discovery.config import DiscoverySettings
from topobus.discovery.service import _Publisher
from topobus.formats.messages.catalogue import MACHINE
from topobus.process.clock import Clock, SystemClock
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.tree import HardwareSettings
from topobus.testing.clock import ManualClock
from topobus.values.errors import PeerUnavailable
from topobus.values.pci import PciAddress

NODE = "n1"
NVME = PciAddress.parse("0000:01:00.0")


class InterruptedBus:
    """A bus that does not answer as long as the test says so."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus
        self.is_silent = False

    def __getattr__(self, name: str) -> Any:
        if self.is_silent:
            raise PeerUnavailable("NATS does not answer", next_step="wait")
        return getattr(self._bus, name)


def publisher_of(machine: RecordedMachine, bus: Any, clock: Clock) -> _Publisher:
    """A publisher whose next look at everything is due in five minutes."""
    settings = DiscoverySettings(hardware=HardwareSettings(root=str(machine.root), honours_cpuset=False))
    runtime = Runtime(
        name="discovery",
        node=NODE,
        bus=bus,
        clock=clock,
        readiness=Readiness(),
        registry=CollectorRegistry(),
    )
    return _Publisher(settings, runtime)


@pytest.mark.parametrize("is_first", [True, False], ids=["first look", "later look"])
async def test_machine_is_published_at_the_next_look_when_nats_was_silent(tmp_path: Path, is_first: bool) -> None:
    """A CPU that went while NATS was away is gone from the entry once NATS is back, not at the next
    look at everything.
    """
    machine = build("laptop", tmp_path / "machine")
    async with MemoryBus.session(MemoryNats(), name="discovery") as real:
        await real.provision()
        bus = InterruptedBus(real)
        publisher = publisher_of(machine, bus, SystemClock())
        if not is_first:
            await publisher.check()
        machine.set_cpu_online(3, is_online=False)
        bus.is_silent = True
        await publisher.check()
        bus.is_silent = False
        await publisher.check()

        entry = await real.get(MACHINE, node=NODE)

    assert entry is not None
    assert 3 not in entry.value.online_cpus


async def test_edited_file_is_seen_when_everything_is_looked_at_again(tmp_path: Path) -> None:
    """What no running kernel changes is found five minutes later: a file of a recorded machine that
    somebody writes over in place.
    """
    machine, clock = build("laptop", tmp_path / "machine"), ManualClock()

    async with MemoryBus.session(MemoryNats(), name="discovery") as bus:
        await bus.provision()
        publisher = publisher_of(machine, bus, clock)

        async def subsystem() -> list[int | None]:
            await publisher.check()
            entry = await bus.get(MACHINE, node=NODE)
            assert entry is not None
            return [each.subsystem_device for each in entry.value.pci_devices if each.address == NVME]

        first = await subsystem()
        (machine.root / "sys/bus/pci/devices" / str(NVME) / "subsystem_device").write_text("0x4242\n")
        clock.advance(299)
        before = await subsystem()
        clock.advance(2)
        after = await subsystem()

    assert (before, after) == (first, [0x4242])
    assert first != after
