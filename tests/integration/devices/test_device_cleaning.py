"""What everybody sees of a device while it is cleaned, when it is dirty, and when its journal
cannot be read: inventory and health over a real bus.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.device_bench import LIMIT_S, NODE, DeviceBench, has_state
from support.looks import other_threads, until
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.journal.journal import Journal
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")


class _CleaningToy(ToyDriver):
    """Cleans until it is let go, and refuses as long as it is told to."""

    def __init__(self) -> None:
        super().__init__("toy", count=2)
        self.may_clean = threading.Event()
        self.dirt = ""

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Clean."""
        self.may_clean.wait()
        return Refusal(reasons=(Reason(code="dirt", message=self.dirt),)) if self.dirt else None


@asynccontextmanager
async def _gateway(bench: DeviceBench) -> AsyncIterator[Bus]:
    async with Bus.session(NatsSettings(url=bench.url), name="gateway") as bus:
        yield bus


async def _use(gateway: Bus) -> None:
    """Come and go."""
    prepared = await gateway.ask(
        PREPARE, PrepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-0",)), node=NODE, device_class="gpu"
    )
    assert isinstance(prepared.result, Prepared)
    left = await gateway.ask(
        UNPREPARE, UnprepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-0",)), node=NODE, device_class="gpu"
    )
    assert left.refusal is None


async def test_device_is_cleaning_then_healthy_when_its_last_owner_left(bench: DeviceBench) -> None:
    """When unprepare is answered everybody already sees `cleaning`.

    The next owner is told to ask again; once clean it is Healthy at once.
    """
    driver = _CleaningToy()
    await bench.publish_machine()
    async with _gateway(bench) as gateway, bench.service(driver, health=HealthSettings(poll_s=0.05)):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        await _use(gateway)
        seen = await bench.inventory(has_state(HealthState.UNKNOWN, "gpu-toy-0"))
        waiting = await gateway.ask(
            PREPARE, PrepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-0",)), node=NODE, device_class="gpu"
        )
        driver.may_clean.set()
        healthy = await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))

    device = seen.device("gpu-toy-0")
    assert device is not None
    assert [(condition.reason, condition.evidence["owner"]) for condition in device.health.conditions] == [
        ("cleaning", OWNER.key)
    ]
    assert isinstance(waiting.result, Accepted)
    assert healthy.generation == seen.generation + 1


async def test_device_is_dirty_with_its_owner_when_it_cannot_be_cleaned(bench: DeviceBench) -> None:
    """The health event names who left it and why, the metric counts it; its neighbour stays Healthy.

    Tried again it succeeds, and the device recovers.
    """
    driver = _CleaningToy()
    driver.dirt = "process 4711 still has 10 GiB"
    driver.may_clean.set()
    await bench.publish_machine()
    async with _gateway(bench) as gateway, bench.service(driver):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        await _use(gateway)
        event = await bench.event(lambda event: event.health.state is HealthState.UNHEALTHY)
        sick = await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-toy-0"))
        labels = {"class": "gpu", "state": "unhealthy", "reason": "dirty"}
        await until(lambda: bench.metrics.get_sample_value("topobus_device_inventory_devices", labels) == 1)
        driver.dirt = ""
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))

    worst = event.health.worst
    assert worst is not None
    assert (event.device, worst.reason) == ("gpu-toy-0", "dirty")
    assert "claim default/claim left it dirty" in worst.message
    assert "process 4711" in worst.message
    assert has_state(HealthState.HEALTHY, "gpu-toy-1")(sick)


async def test_device_is_unhealthy_and_its_neighbour_goes_on_when_its_journal_is_unreadable(bench: DeviceBench) -> None:
    """One bad file takes out one device, and names itself."""
    driver = _CleaningToy()
    bench.journal.mkdir()
    (bench.journal / "gpu-toy-0.json").write_text("not what you want", encoding="utf-8")
    await bench.publish_machine()
    async with bench.service(driver):
        inventory = await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-toy-0"))

    device = inventory.device("gpu-toy-0")
    assert device is not None
    assert device.health.worst is not None
    assert device.health.worst.reason == "journal-unreadable"
    assert str(bench.journal / "gpu-toy-0.json") in device.health.worst.message
    assert has_state(HealthState.HEALTHY, "gpu-toy-1")(inventory)


async def test_service_waits_and_says_so_when_another_process_has_the_journal(bench: DeviceBench) -> None:
    """Two services would undo each other's work, so the second one answers only when the first has
    ended.
    """
    readiness = Readiness()
    other = Journal(bench.journal)
    bench.journal.mkdir()
    other.load()
    await bench.publish_machine()
    async with bench.service(_CleaningToy(), readiness=readiness):
        async with asyncio.timeout(LIMIT_S):
            while "journal" not in readiness.report():
                await other_threads()
        waiting = readiness.report()["journal"]
        other.close()
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))

    assert "another process has it" in waiting
    assert readiness.report()["journal"] == "ready"
