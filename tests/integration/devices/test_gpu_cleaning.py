"""A GPU that a tenant left dirty, through the whole gpu service: the real driver on a libnvidia-ml
of a profile, inventory, events and the next tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.device_bench import NODE, PROFILES, DeviceBench, has_state
from support.fake_nvml import GIB, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.gpu_processes import add_process
from topobus.bus.bus import Bus
from topobus.devicekit.settings import CleaningSettings
from topobus.formats.messages.catalogue import PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import HardwareSettings
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, needs_gcc]

OWNER = Owner(kind=OwnerKind.CLAIM, name="training", uid="u1")
NEXT = Owner(kind=OwnerKind.CLAIM, name="next", uid="u2")


class _Gpus:
    """The service's bench, the library, and a gateway that asks."""

    def __init__(self, bench: DeviceBench, library: FakeNvml, gateway: Bus) -> None:
        self.bench, self.library, self.gateway = bench, library, gateway
        self.first, self.second = bench.recorded.pci("h100")

    @property
    def name(self) -> str:
        """Name the first GPU as a device."""
        return f"gpu-{self.first.replace(':', '-').replace('.', '-')}"

    async def prepare(self, owner: Owner) -> object:
        """Ask for the first GPU."""
        request = PrepareRequest(op_id="", owner=owner, devices=(self.name,))
        return (await self.gateway.ask(PREPARE, request, timeout_s=60, node=NODE, device_class="gpu")).result

    async def unprepare(self, owner: Owner) -> Refusal | None:
        """Give it back."""
        request = UnprepareRequest(op_id="", owner=owner, devices=(self.name,))
        return (await self.gateway.ask(UNPREPARE, request, timeout_s=60, node=NODE, device_class="gpu")).refusal


@asynccontextmanager
async def _gpus(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[_Gpus]:
    recorded = build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    addresses = recorded.pci("h100")
    with fake_nvml(
        tmp_path / "lib", *(FakeGpu(address=address, minor=minor) for minor, address in enumerate(addresses))
    ) as library:
        bench = DeviceBench(bus, nats_server.url, recorded)
        bench.hardware = HardwareSettings(root=str(recorded.root), rescan_s=0.2, library_path=str(library.folder))
        driver = NvidiaDriver()
        driver.configure(GpuServices(leftovers=LeftoverSettings(wait_s=0.05)))
        await bench.publish_machine()
        async with (
            Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway,
            bench.service(driver, timeout_s=60.0, cleaning=CleaningSettings(answer_after_s=60.0)),
        ):
            gpus = _Gpus(bench, library, gateway)
            await bench.inventory(has_state(HealthState.HEALTHY, gpus.name))
            yield gpus


async def test_gpu_is_refused_to_the_next_tenant_until_the_last_ones_process_is_gone(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Unhealthy `dirty` with pod and pid in event and evidence.

    The next tenant is refused with that reason; when the process has ended it is Healthy again.
    """
    async with _gpus(bus, nats_server, tmp_path) as gpus:
        first = await gpus.prepare(OWNER)
        add_process(gpus.bench.recorded.root, 4711, pod="trainer-0")
        gpus.library.set(gpus.first, processes=((4711, 10 * GIB),), used_bytes=11 * GIB)
        await gpus.unprepare(OWNER)
        event = await gpus.bench.event(lambda event: event.health.state is HealthState.UNHEALTHY)
        sick = await gpus.bench.inventory(has_state(HealthState.UNHEALTHY, gpus.name))
        refused = await gpus.prepare(NEXT)
        gpus.library.set(gpus.first, processes=(), used_bytes=0)
        await gpus.bench.inventory(has_state(HealthState.HEALTHY, gpus.name))
        again = await gpus.prepare(NEXT)

    worst = event.health.worst
    assert isinstance(first, Prepared)
    assert worst is not None
    assert (event.device, worst.reason) == (gpus.name, "dirty")
    assert "claim default/training left it dirty" in worst.message
    assert "process 4711 (python3) of pod trainer-0 with 10240 MiB" in worst.message
    assert {key: worst.evidence[key] for key in ("owner", "pids", "pods")} == {
        "owner": OWNER.key,
        "pids": "4711",
        "pods": "trainer-0",
    }
    assert sum(device.health.state is HealthState.HEALTHY for device in sick.devices) == len(sick.devices) - 1
    assert isinstance(refused, Refusal)
    assert "process 4711" in refused.reasons[0].message
    assert isinstance(again, Prepared)


async def test_gpu_that_is_clean_never_leaves_the_list(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    """A tenant that leaves nothing costs nobody anything: the next one has the GPU at once, and no
    event is sent.
    """
    async with _gpus(bus, nats_server, tmp_path) as gpus:
        for owner in (OWNER, NEXT):
            assert isinstance(await gpus.prepare(owner), Prepared)
            assert await gpus.unprepare(owner) is None
        events = await gpus.bench.events(gpus.name)

    assert [event.health.state for event in events] == [HealthState.HEALTHY]
    assert not list(gpus.bench.journal.glob("*.json"))
