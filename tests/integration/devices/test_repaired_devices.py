"""A repair by policy with a real device service on recorded hardware, topology and two controllers, on
a real server: the sick device is reset once and offered again.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from support.controllers import SETTINGS, controller
from support.device_bench import LIMIT_S, NODE, DeviceBench, has_state
from support.real_topology import topology_service
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.bus.streams.events import Start
from topobus.formats.messages.catalogue import DECISION
from topobus.process.config import NatsSettings
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.outcome import Refusal
from topobus.values.repair import RepairEnd, RepairNote, RepairPolicy, RepairRuleSettings

pytestmark = [pytest.mark.integration]

_GPU = "gpu-toy-0"
_FAULT = Observation(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="gpu-lost", is_sticky=True)
_RULE = RepairRuleSettings(
    name="lost",
    device_class="gpu",
    reasons=("gpu-lost",),
    steps=("drain", "wait-idle", "reset", "forgive", "wait-healthy", "return"),
    hold_s=0.5,
)


class _Card(ToyDriver):
    """A GPU whose fault a reset ends."""

    def __init__(self) -> None:
        super().__init__(count=2)
        self.resets: list[str] = []

    def reset(self, tree: Tree, device: Device) -> Refusal | None:
        """Reset."""
        self.resets.append(device.name)
        self.faults.pop(device.name, None)
        return None


async def _ended(bus: Bus) -> RepairNote:
    async with asyncio.timeout(LIMIT_S):
        async for received in bus.follow(DECISION, start=Start.ALL, node=NODE):
            if received.value.repair is not None and received.value.repair.end is not None:
                return received.value.repair
    raise AssertionError


async def test_sick_device_is_reset_once_and_offered_again_when_a_rule_says_so(bench: DeviceBench) -> None:
    """Two controllers work on it; its neighbour was never touched."""
    await bench.publish_machine()
    machine = read_machine(Tree(bench.hardware), NODE)
    settings = structs.replace(SETTINGS, repair=RepairPolicy(rules=(_RULE,)))
    card = _Card()
    async with bench.service(card), Bus.session(NatsSettings(url=bench.url), name="topology") as topology_bus:
        await bench.inventory(has_state(HealthState.HEALTHY, _GPU))
        async with (
            topology_service(topology_bus, machine),
            controller(bench.url, settings),
            controller(bench.url, settings),
        ):
            card.faults[_GPU] = (_FAULT,)
            end = await _ended(bench.bus)
            inventory = await bench.inventory(has_state(HealthState.HEALTHY, _GPU))

    assert (end.end, end.codes) == (RepairEnd.REPAIRED, ("gpu-lost",))
    assert card.resets == [_GPU]
    assert [device.is_allocatable for device in inventory.devices] == [True, True]
