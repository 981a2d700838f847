"""A bench with a pair of GPUs, on a shared bus and on one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.device_bench import PROFILES, DeviceBench
from topobus.bus.bus import Bus
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer


@pytest.fixture
def bench(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> DeviceBench:
    """Give a bench with two GPUs and a NIC under one switch."""
    return DeviceBench(bus, nats_server.url, build(PROFILES / "h100-pair.toml", tmp_path / "machine"))


@pytest.fixture
def own_bench(own_bus: Bus, own_nats_server: NatsServer, tmp_path: Path) -> DeviceBench:
    """The same on a server whose store can be lost."""
    return DeviceBench(own_bus, own_nats_server.url, build(PROFILES / "h100-pair.toml", tmp_path / "machine"))


@pytest.fixture
def gpus(bench: DeviceBench) -> tuple[str, str]:
    """Give the names of the bench's GPUs."""
    first, second = (f"gpu-{address.replace(':', '-').replace('.', '-')}" for address in bench.recorded.pci("h100"))
    return first, second
