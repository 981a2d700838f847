"""Recorded faults of real drivers, each repaired by a rule of its own: all of them at once, on one
node, and each ends as its rule says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from lab.device_faults import FAULTS, PlacedFault, build_faulty, place_faults
from support.controllers import SETTINGS, controller
from support.kernel_writes import KernelWrites
from support.looks import LIMIT_S, next_look
from support.node_plane import NODE
from support.real_topology import topology_service
from support.repair_cases import PERSON, SIMULATED, RepairCase
from support.sick_devices import device_service
from topobus.bus.bus import Bus
from topobus.devicekit.driver import DeviceDriver
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import DECISION, INVENTORY, MACHINE, OPERATE, REPAIR
from topobus.formats.messages.messages import DecisionEvent, RepairState
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.operation_messages import Operated, OperateRequest
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.repair import Repair, RepairEnd, RepairPolicy, Step

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

# The controller's pauses pass so many times as fast as ours, so that 20 repairs take seconds.
_HASTE = 20.0
# All of a rule's limits have passed by then.
_LATER_S = 7200.0


class _Haste(SystemClock):
    """A clock that a test may put forward, with short pauses."""

    ahead_s = 0.0

    def now(self) -> datetime:
        """Give the time."""
        return super().now() + timedelta(seconds=self.ahead_s)

    async def sleep(self, seconds: float) -> None:
        """Sleep a part of it."""
        await super().sleep(seconds / _HASTE)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Wait a part of it."""
        return super().timeout(seconds if seconds is None else seconds / _HASTE)


@dataclass(kw_only=True)
class _Patient:
    """A device with its fault."""

    case: RepairCase
    placed: PlacedFault
    resets: int = 0
    is_left: bool = False
    """The test does nothing more with it."""

    @property
    def name(self) -> str:
        """The one device that the fault affects."""
        (name,) = self.placed.names
        return name

    def reset(self, _: str) -> None:
        """Do what the hardware does when the kernel resets it."""
        self.resets += 1
        if self.resets == self.case.healed_by:
            self.placed.heal()


@dataclass
class _Ward:
    """A node with sick devices, and what becomes of them."""

    bus: Bus
    url: str
    patients: dict[str, _Patient]
    """By device."""
    clock: _Haste = field(default_factory=_Haste)
    ends: dict[str, list[RepairEnd]] = field(default_factory=dict)
    """By device."""
    put_ahead_at: int = 0
    """The document's revision when the clock was put ahead: the controller has not seen that yet
    while it is the newest."""

    async def look(self) -> bool:
        """Do what happens to devices that are withheld, and let time pass where nothing but a limit
        ends a repair. Say whether all repairs have ended.
        """
        for device in await self.devices():
            patient = self.patients.get(device.name)
            if patient is not None and device.maintenance is not None and patient.case.waits:
                await self._act(patient)
        entry = await self.bus.get(REPAIR, fleet=CLUSTER)
        document = entry.value if entry is not None else RepairState()
        decisions = [received.value for received in await self.bus.last(DECISION, limit=1000, node=NODE)]
        self.ends = {name: _ends(decisions, name) for name in self.patients}
        under_way = {repair.device: repair for repair in document.under_way}
        have_begun = all(name in under_way or self.ends[name] for name in self.patients)
        is_settled = not document.events and entry is not None and entry.revision > self.put_ahead_at
        if is_settled and under_way and have_begun and all(map(self._is_hopeless, under_way.values())):
            self.clock.ahead_s += _LATER_S
            self.put_ahead_at = entry.revision
        return all(self.ends.values()) and not under_way and not document.events

    async def has_healthy(self, device_class: str) -> bool:
        """Say whether the devices of a class that will be sick are published, and healthy."""
        healthy = {device.name for device in await self.devices() if device.health.state is HealthState.HEALTHY}
        return all(
            name in healthy
            for name, patient in self.patients.items()
            if patient.placed.fault.device_class == device_class
        )

    async def devices(self) -> list[Device]:
        """List the devices as they are published."""
        entries = [await self.bus.get(INVENTORY, node=NODE, device_class=name) for name in ("gpu", "nic", "fpga")]
        return [device for entry in entries if entry is not None for device in entry.value.devices]

    async def _act(self, patient: _Patient) -> None:
        """Take a fault back, or work on the device as a person."""
        if patient.is_left:
            return
        patient.is_left = True
        if patient.case.end is RepairEnd.REPAIRED:
            patient.placed.heal()
            return
        operation = DeviceOperation(
            device_class=patient.placed.fault.device_class,
            device=patient.name,
            verb=DeviceVerb.EXCLUDE,
            why="fan",
            who=PERSON,
        )
        async with Bus.session(NatsSettings(url=self.url), name="topobus-cli") as cli:
            reply = await cli.ask(
                OPERATE, OperateRequest(op_id=f"{PERSON}-{patient.name}", operation=operation), node=NODE
            )
        assert isinstance(reply.result, Operated), reply

    def _is_hopeless(self, repair: Repair) -> bool:
        case = self.patients[repair.device].case
        return repair.what == Step.WAIT_HEALTHY and case.resets_it and repair.trial != case.healed_by


async def _until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await look():
            await next_look()


def _ends(decisions: list[DecisionEvent], device: str) -> list[RepairEnd]:
    return [
        event.repair.end
        for event in decisions
        if event.repair is not None and event.repair.device == device and event.repair.end is not None
    ]


@asynccontextmanager
async def _ward(bus: Bus, url: str, folder: Path) -> AsyncIterator[_Ward]:
    """Run the device services and topology of a node on which all faults have struck."""
    machine = build_faulty(folder / "machine")
    hardware = HardwareSettings(root=str(machine.root), rescan_s=0.2)
    drivers: list[list[DeviceDriver]] = [
        [NvidiaDriver(), AmdDriver(), IntelDriver()],
        [PciNetdevDriver()],
        [IntelDflDriver(), XilinxDriver()],
    ]
    tree = Tree(hardware)
    node = structs.replace(read_machine(tree, NODE), generation=1)
    devices = [device for each in drivers for driver in each for device in type(driver)().discover(tree, node).devices]
    faults = {(fault.code, fault.driver): fault for fault in FAULTS}
    placed = place_faults(machine, devices, [faults[case.code, case.driver] for case in SIMULATED])
    patients = {each.names[0]: _Patient(case=case, placed=each) for case, each in zip(SIMULATED, placed, strict=True)}
    await bus.put(MACHINE, node, node=NODE)
    async with AsyncExitStack() as stack:
        kernel = stack.enter_context(KernelWrites(machine.root))
        for patient in patients.values():
            if patient.case.resets_it:
                function = machine.folder(str(patient.placed.devices[0].pci))
                kernel.obey(f"{function}/reset", patient.reset)
        topology_bus = await stack.enter_async_context(Bus.session(NatsSettings(url=url), name="topology"))
        await stack.enter_async_context(topology_service(topology_bus, node))
        health = HealthSettings(poll_s=0.1, hold_s=0.2)
        ward = _Ward(bus, url, patients)
        for each in drivers:
            device_class = each[0].device_class
            await stack.enter_async_context(device_service(url, hardware, each, health, folder / device_class))
            # One after the other: msgspec may crash where two threads decode a type for the first time.
            await _until(partial(ward.has_healthy, device_class))
        for patient in patients.values():
            patient.placed.strike()
        yield ward


async def test_each_fault_ends_as_its_rule_says_when_all_strike_one_node(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """What a reset or time heals is offered again; what they do not heal stays withheld, for a
    person who is called once; what a person takes over is left to that person.
    """
    classes = {fault.driver: fault.device_class for fault in FAULTS}
    rules = tuple(case.rule(classes[case.driver]) for case in SIMULATED)
    policy = RepairPolicy(rules=rules, at_once=len(rules), at_once_per_node=len(rules), per_hour=100)
    async with _ward(bus, nats_server.url, tmp_path) as ward:
        async with controller(nats_server.url, structs.replace(SETTINGS, repair=policy), clock=ward.clock):
            await _until(ward.look)
        devices = {device.name: device for device in await ward.devices()}

    withheld = {name: device.maintenance.who for name, device in devices.items() if device.maintenance is not None}
    assert {
        patient.case.code: (ward.ends[name], patient.resets, withheld.get(name, ""), devices[name].is_fit)
        for name, patient in ward.patients.items()
    } == {case.code: ([case.end], case.resets, case.withheld_by, case.end is RepairEnd.REPAIRED) for case in SIMULATED}
    assert withheld.keys() <= ward.patients.keys()
