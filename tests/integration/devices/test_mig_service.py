"""MIG instances made for claims through the whole gpu service: inventory with counters, prepare and
unprepare over the bus, health of one instance, what a restart finds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pynvml
import pytest

from support.device_bench import NODE, PROFILES, DeviceBench, states
from support.fake_mig import H100_80, add_capabilities, as_somebody, make_instance, mig_gpu
from support.fake_nvml import FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.devicekit.settings import PartitionSettings
from topobus.formats.messages.catalogue import PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gpu.mig.nvml_mig import read_mig, read_profiles
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


class _MigService:
    """The service's bench, the library, and a gateway that asks."""

    def __init__(self, bench: DeviceBench, library: FakeNvml, gateway: Bus) -> None:
        self.bench, self.library, self.gateway = bench, library, gateway
        self.address = bench.recorded.pci("h100")[0]
        self.parent = f"gpu-{self.address.replace(':', '-').replace('.', '-')}"

    def name(self, place: str) -> str:
        return f"{self.parent}-mig-{place}"

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Start the service, and end it."""
        async with self.bench.service(NvidiaDriver(), timeout_s=60.0, partitions=PartitionSettings(on_demand=True)):
            yield

    async def prepare(self, place: str) -> Prepared | Refusal:
        """Ask as the gateway does, again while work goes on."""
        while True:
            request = PrepareRequest(op_id="", owner=OWNER, devices=(self.name(place),))
            reply = await self.gateway.ask(PREPARE, request, timeout_s=60, node=NODE, device_class="gpu")
            if not isinstance(reply.result, Accepted):
                return reply.result
            await next_look()

    async def unprepare(self, place: str) -> Refusal | None:
        request = UnprepareRequest(op_id="", owner=OWNER, devices=(self.name(place),))
        return (await self.gateway.ask(UNPREPARE, request, timeout_s=60, node=NODE, device_class="gpu")).refusal

    def places(self) -> list[tuple[int | None, int | None]]:
        """Ask NVML what there is."""
        with as_somebody(self.library.folder):
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self.address)
            return [
                (made.profile, made.start) for made in read_mig(pynvml, handle, read_profiles(pynvml, handle)).instances
            ]


@asynccontextmanager
async def _mig_service(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[_MigService]:
    recorded = build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    first, second = recorded.pci("h100")
    add_capabilities(recorded.root, 0)
    with fake_nvml(
        tmp_path / "lib", mig_gpu(H100_80, first), FakeGpu(address=second, name="NVIDIA L4", minor=1)
    ) as library:
        bench = DeviceBench(bus, nats_server.url, recorded)
        bench.hardware = HardwareSettings(root=str(recorded.root), rescan_s=0.2, library_path=str(library.folder))
        await bench.publish_machine()
        async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway:
            yield _MigService(bench, library, gateway)


async def test_instance_lives_as_long_as_its_claim(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    """Offered with counters beside an L4, made by prepare, kept over a restart as its owner's,
    struck by its own Xid alone, and gone after unprepare.
    """
    async with _mig_service(bus, nats_server, tmp_path) as gpus, AsyncExitStack() as life:
        await life.enter_async_context(gpus.life())
        offered = await gpus.bench.inventory(lambda it: len(it.devices) == 26)
        prepared = await gpus.prepare("2g-20gb-2")
        struck = await gpus.prepare("1g-10gb-6")
        gpus.library.raise_xid(gpus.address, 109, 13, 0)
        sick = await gpus.bench.inventory(lambda it: states(it)[gpus.name("1g-10gb-6")] is HealthState.UNHEALTHY)
        made = gpus.places()
        await life.aclose()
        await life.enter_async_context(gpus.life())
        await gpus.bench.hints_once_up()
        again = await gpus.prepare("2g-20gb-2")
        kept = gpus.places()
        refused = [await gpus.unprepare("2g-20gb-2"), await gpus.unprepare("1g-10gb-6")]
        left = gpus.places()

    assert [counter_set.name for counter_set in offered.counter_sets] == [gpus.parent]
    assert offered.warnings == ()
    assert isinstance(prepared, Prepared)
    assert isinstance(struck, Prepared)
    assert made == kept == [(14, 2), (19, 6)]
    assert isinstance(again, Prepared)
    assert prepared.edits == again.edits
    assert [name for name, state in states(sick).items() if state is not HealthState.HEALTHY] == [
        gpus.name("1g-10gb-6")
    ]
    assert (refused, left) == ([None, None], [])


async def test_place_is_sick_while_somebody_else_has_it(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    """An instance made beside the service: what does not fit is Unhealthy with that reason, and
    Healthy again when it is gone.
    """
    async with _mig_service(bus, nats_server, tmp_path) as gpus, gpus.life():
        await gpus.bench.inventory(lambda it: len(it.devices) == 26)
        gi = make_instance(gpus.library.folder, gpus.address, H100_80, "1g.10gb", 6)
        sick = await gpus.bench.inventory(lambda it: states(it)[gpus.name("7g-80gb-0")] is HealthState.UNHEALTHY)
        refused = await gpus.prepare("7g-80gb-0")
        with as_somebody(gpus.library.folder):
            instance = pynvml.nvmlDeviceGetGpuInstanceById(pynvml.nvmlDeviceGetHandleByPciBusId(gpus.address), gi)
            pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
            pynvml.nvmlGpuInstanceDestroy(instance)
        well = await gpus.bench.inventory(lambda it: set(states(it).values()) == {HealthState.HEALTHY})

    (whole,) = [device for device in sick.devices if device.name == gpus.name("7g-80gb-0")]
    assert whole.health.worst is not None
    assert (whole.health.worst.reason, whole.health.worst.evidence["value"]) == ("mig-occupied", str(gi))
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "device-unhealthy"
    assert len(well.devices) == 26


async def test_instance_in_use_keeps_its_place_from_the_next_one(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """A program outlives its pod: the device is Unhealthy `dirty` and nobody gets it.

    When the program has ended, the instance goes by itself and the device is Healthy.
    """
    async with _mig_service(bus, nats_server, tmp_path) as gpus, gpus.life():
        await gpus.bench.inventory(lambda it: len(it.devices) == 26)
        await gpus.prepare("1g-10gb-0")
        gpus.library.set(gpus.address, processes=((4711, 1 << 30, 7, 0),))
        refused = await gpus.unprepare("1g-10gb-0")
        dirty = await gpus.bench.inventory(lambda it: states(it)[gpus.name("1g-10gb-0")] is HealthState.UNHEALTHY)
        gpus.library.set(gpus.address, processes=())
        await gpus.bench.inventory(lambda it: states(it)[gpus.name("1g-10gb-0")] is HealthState.HEALTHY)
        left = gpus.places()

    assert isinstance(refused, Refusal)
    assert "4711" in refused.reasons[0].message
    (device,) = [device for device in dirty.devices if device.name == gpus.name("1g-10gb-0")]
    assert device.health.worst is not None
    assert device.health.worst.reason == "dirty"
    assert left == []
