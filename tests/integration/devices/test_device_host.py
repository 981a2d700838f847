"""The device host against a real NATS server: inventories, health events, restarts, and drivers
that hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.device_bench import LIMIT_S, NODE, OWNER, POLL_S, TIMEOUT_S, DeviceBench, has_state, states
from support.looks import until
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.host import host, publishing
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.registry import SkippedPlugin
from topobus.engine.health.inventory_merge import MergedInventory
from topobus.formats.messages.catalogue import HINT, HINTS, INVENTORY, PREPARE, UNPREPARE
from topobus.formats.messages.messages import HintsRequest, Prepared, PrepareRequest, UnprepareRequest
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import Refusal

pytestmark = pytest.mark.integration


class _CountingDriver(ToyDriver):
    """Counts the looks at its devices."""

    def __init__(self, name: str, *, count: int) -> None:
        super().__init__(name, count=count)
        self.looks = 0
        self.loop = asyncio.get_running_loop()
        self.has_looked = asyncio.Event()

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look, and count."""
        self.looks += 1
        self.loop.call_soon_threadsafe(self.has_looked.set)
        return super().observe(tree, devices)

    async def after(self, *, looks: int) -> None:
        """Wait until so many looks more have begun."""
        wanted = self.looks + looks
        while self.looks < wanted:
            self.has_looked.clear()
            await self.has_looked.wait()


async def test_inventory_lists_eight_gpus_in_place_when_the_machine_is_a_dgx(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The demo machine's GPUs come in one inventory: four a NUMA node, two a switch, each under its
    root complex, healthy.
    """
    bench = DeviceBench(bus, nats_server.url, build("dgx", tmp_path / "machine"))
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        inventory = await bench.inventory(lambda each_inventory: bool(each_inventory.devices))

    assert inventory.generation == 1
    assert [
        (str(device.pci), device.numa_nodes, device.pcie_root, str(device.pcie_switch)) for device in inventory.devices
    ] == [
        ("0000:18:00.0", NodeSet(0), "pci0000:15", "0000:16:00.0"),
        ("0000:1a:00.0", NodeSet(0), "pci0000:15", "0000:16:00.0"),
        ("0000:4b:00.0", NodeSet(0), "pci0000:48", "0000:49:00.0"),
        ("0000:4d:00.0", NodeSet(0), "pci0000:48", "0000:49:00.0"),
        ("0000:9a:00.0", NodeSet(1), "pci0000:97", "0000:98:00.0"),
        ("0000:9c:00.0", NodeSet(1), "pci0000:97", "0000:98:00.0"),
        ("0000:ca:00.0", NodeSet(1), "pci0000:c7", "0000:c8:00.0"),
        ("0000:cc:00.0", NodeSet(1), "pci0000:c7", "0000:c8:00.0"),
    ]
    assert set(states(inventory).values()) == {HealthState.HEALTHY}


class _TellingReadiness(Readiness):
    """Readiness that can be waited for: a service calls itself ready a moment after its inventory
    is out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_come = asyncio.Event()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Note the word, and tell when all is ready."""
        super().set(part, is_ready, why)
        if self.is_ready:
            self.has_come.set()


async def test_service_is_not_ready_when_the_machine_is_missing(bench: DeviceBench, gpus: tuple[str, str]) -> None:
    """Without discovery's word the service publishes nothing, says what it waits for, and goes on
    as soon as the word comes.
    """
    readiness = _TellingReadiness()

    async with bench.service(NvidiaDriver(), readiness=readiness):
        answer = await bench.hints_once_up(*gpus)
        early = readiness.report()
        published_early = await bench.bus.get(INVENTORY, node=NODE, device_class="gpu")
        await bench.publish_machine()
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        async with asyncio.timeout(LIMIT_S):
            await readiness.has_come.wait()

    assert early["machine"] == "waiting for discovery to publish the machine"
    assert answer.hints is None
    assert published_early is None
    assert readiness.report() == {"inventory": "ready", "machine": "ready"}


async def test_device_is_prepared_when_its_inventory_was_read_before_the_write_was_confirmed(
    bench: DeviceBench, gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has the inventory asks for a device at once: the service knows what it offers."""
    answers: list[object] = []
    put = Bus.put

    async def unconfirmed(self: Bus, keyed: Any, value: Any, **parts: str) -> int:
        revision = await put(self, keyed, value, **parts)
        if keyed is INVENTORY and not answers:
            request = PrepareRequest(op_id="op-1", owner=OWNER, devices=gpus)
            answers.append((await bench.bus.ask(PREPARE, request, node=NODE, device_class="gpu")).result)
        return revision

    monkeypatch.setattr(Bus, "put", unconfirmed)
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        await until(lambda: bool(answers))

    assert [type(answer) for answer in answers] == [Prepared], answers


async def test_inventory_is_empty_and_says_who_looked_when_there_is_no_hardware(bench: DeviceBench) -> None:
    """No hardware is an ordinary state: an empty inventory with the names of the drivers that
    looked.
    """
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme"), ToyDriver("other")):
        inventory = await bench.inventory(lambda _: True)

    assert (inventory.devices, inventory.drivers, inventory.generation) == ((), ("acme", "other"), 1)


async def test_inventory_has_the_boot_in_which_it_was_looked_for_when_the_node_was_booted_again(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same devices are published once more after a reboot, and not after a mere restart: a
    reader learns from it that they are there again.
    """
    seen = []
    await bench.publish_machine()
    for boot in ("first", "first", "second"):
        monkeypatch.setattr(host, "read_boot_id", lambda _, boot=boot: boot)
        readiness = _TellingReadiness()
        async with bench.service(ToyDriver("acme", count=1), readiness=readiness), asyncio.timeout(LIMIT_S):
            await readiness.has_come.wait()
            inventory = await bench.inventory(lambda _: True)
        seen.append((inventory.boot_id, inventory.generation))

    assert seen == [("first", 1), ("first", 1), ("second", 2)]


async def test_host_takes_no_step_when_the_drivers_see_what_they_saw(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At last ten looks in a row bring no step, and the first fault after them is told."""
    driver, steps = _CountingDriver("calm", count=1), 0
    advance = publishing.advance_inventory

    def counted(*given: Any, **named: Any) -> MergedInventory:
        nonlocal steps
        steps += 1
        return advance(*given, **named)

    monkeypatch.setattr(publishing, "advance_inventory", counted)
    await bench.publish_machine()
    async with bench.service(driver):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-calm-0"))
        before = -1
        async with asyncio.timeout(LIMIT_S):
            while steps != before:
                before = steps
                await driver.after(looks=10)
        driver.faults = {
            "gpu-calm-0": (Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc"),)
        }
        await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-calm-0"))

    assert before > 0


async def test_driver_is_known_to_hang_when_its_own_thread_looked_last(bench: DeviceBench) -> None:
    """A driver whose thread repeats its looks by itself becomes Unknown after its time limit, and
    Healthy when it returns.
    """
    driver = _CountingDriver("calm", count=1)
    await bench.publish_machine()

    async with bench.service(driver, timeout_s=0.3):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-calm-0"))
        await driver.after(looks=20)
        driver.go.clear()
        unknown = await bench.inventory(has_state(HealthState.UNKNOWN, "gpu-calm-0"))
        driver.go.set()
        await bench.inventory(
            lambda inventory: (
                inventory.generation > unknown.generation and states(inventory) == {"gpu-calm-0": HealthState.HEALTHY}
            )
        )

    assert "did not come back within 0.3 s" in unknown.devices[0].health.conditions[0].message


async def test_hung_driver_hurts_nobody_else_when_it_hangs(bench: DeviceBench) -> None:
    """A hung driver's devices become Unknown and stay listed.

    Another driver's faults are told as ever; when it returns, its devices are back.
    """
    hung, well = ToyDriver("hung", count=1), ToyDriver("well", count=1)
    await bench.publish_machine()

    clock = ManualClock()
    async with bench.service(hung, well, clock=clock):
        await bench.inventory(
            lambda inventory: set(states(inventory).values()) == {HealthState.HEALTHY} and len(inventory.devices) == 2
        )
        hung.go.clear()
        async with clock.ticking(POLL_S):
            await asyncio.to_thread(hung.held.wait)
        await clock.asleep(POLL_S)  # the other driver has looked: the limit of no call of its own comes now
        clock.advance(TIMEOUT_S)
        unknown = await bench.inventory(has_state(HealthState.UNKNOWN, "gpu-hung-0"))
        well.faults = {
            "gpu-well-0": (Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc"),)
        }
        async with clock.ticking(POLL_S):
            both = await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-well-0"))
            hung.go.set()
            back = await bench.inventory(has_state(HealthState.HEALTHY, "gpu-hung-0"))

    assert states(unknown) == {"gpu-hung-0": HealthState.UNKNOWN, "gpu-well-0": HealthState.HEALTHY}
    assert states(both) == {"gpu-hung-0": HealthState.UNKNOWN, "gpu-well-0": HealthState.UNHEALTHY}
    assert back.warnings == ()


async def test_first_inventory_comes_when_one_driver_hangs_from_the_start(bench: DeviceBench) -> None:
    """The first inventory waits for a slow driver only as long as first_wait_s: registration never
    hangs on one vendor.
    """
    hung, well = ToyDriver("hung", count=1), ToyDriver("well", count=1)
    hung.go.clear()
    await bench.publish_machine()

    async with bench.service(hung, well):
        early = await bench.inventory(lambda _: True)
        hung.go.set()
        late = await bench.inventory(lambda inventory: len(inventory.devices) == 2)

    assert list(states(early)) == ["gpu-well-0"]
    assert list(states(late)) == ["gpu-hung-0", "gpu-well-0"]


async def test_failing_driver_is_named_in_warnings_when_it_raises(bench: DeviceBench) -> None:
    """A driver that raises makes its own devices Unknown, and the inventory says why."""
    toy = ToyDriver("acme", count=1)
    await bench.publish_machine()

    async with bench.service(toy):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-acme-0"))
        toy.error = RuntimeError("firmware said no")
        inventory = await bench.inventory(has_state(HealthState.UNKNOWN, "gpu-acme-0"))

    assert "firmware said no" in inventory.warnings[0]


async def test_skipped_plugin_is_named_in_warnings_when_it_cannot_be_loaded(bench: DeviceBench) -> None:
    """A plugin that does not load is told to everybody who reads the inventory; the others run."""
    await bench.publish_machine()

    async with bench.service(
        ToyDriver("acme", count=1), skipped=(SkippedPlugin(name="broken", value="no:Driver", why="ImportError: no"),)
    ):
        inventory = await bench.inventory(lambda _: True)

    assert inventory.warnings == ("broken: plugin is skipped: ImportError: no",)
    assert list(states(inventory)) == ["gpu-acme-0"]


async def test_prepare_and_hints_are_answered_when_asked_over_the_bus(
    bench: DeviceBench, gpus: tuple[str, str]
) -> None:
    """Prepare gives edits of each GPU and the variable for all.

    Hints follow the devices' NUMA node, and are said to whoever
    listens; unknown devices are refused.
    """
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        where = {"node": NODE, "device_class": "gpu"}
        request = PrepareRequest(op_id="op-1", owner=OWNER, devices=gpus)
        first = await bench.bus.ask(PREPARE, request, **where)
        again = await bench.bus.ask(PREPARE, request, **where)
        unknown = await bench.bus.ask(PREPARE, PrepareRequest(op_id="op-2", owner=OWNER, devices=("gpu-x",)), **where)
        async with Bus.session(NatsSettings(url=bench.url), name="gateway") as gateway:
            undone = await gateway.ask(UNPREPARE, UnprepareRequest(op_id="op-3", owner=OWNER, devices=gpus), **where)
        async with contextlib.aclosing(bench.bus.listen(HINTS, **where)) as notices:
            said = asyncio.ensure_future(anext(notices))
            # The task listens before this round trip ends.
            await bench.bus.inspect()
            hints = await bench.bus.ask(
                HINT, HintsRequest(op_id="op-4", count=2, available=gpus), timeout_s=60, **where
            )
            notice = await said

    assert isinstance(first.result, Prepared)
    assert first.result.edits[gpus[0]].device_nodes[0].path == "/dev/nvidia0"
    assert first.result.common.env["TOPOBUS_GPU_DEVICES"] == ",".join(gpus)
    assert first.result.common.env["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert again == first
    assert isinstance(unknown.result, Refusal)
    assert undone.refusal is None
    assert hints.hints == (Hint(NodeSet(0), True),)  # noqa: FBT003 - Hint's own shape
    assert (notice.op_id, notice.by, notice.lists[0].hints) == ("op-4", "device-service", hints.hints)


async def test_journal_is_free_for_the_next_life_when_a_service_ends_while_it_reads_it(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads the folder cannot be ended with its service, and takes nothing that
    nobody would give back.
    """
    bench.journal.mkdir()
    loop, load = asyncio.get_running_loop(), Journal.load
    has_begun, is_let_go, has_ended = asyncio.Event(), threading.Event(), threading.Event()

    def late_load(journal: Journal) -> None:
        loop.call_soon_threadsafe(has_begun.set)
        is_let_go.wait(LIMIT_S)
        try:
            load(journal)
        finally:
            has_ended.set()

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "load", late_load)
        async with bench.service(NvidiaDriver()), asyncio.timeout(LIMIT_S):
            await has_begun.wait()
        is_let_go.set()
        await asyncio.to_thread(has_ended.wait, LIMIT_S)
    rival = Journal(bench.journal)
    rival.load()

    assert (rival.entries, (bench.journal / "lock").exists()) == ({}, True)
    rival.close()
