"""Faults of real functions, repaired by rules: what the kernel has seen is withheld, reset or
waited for, and ends in the declared state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest_asyncio

from topobus.bus.bus import Bus
from topobus.bus.streams.events import Start
from topobus.formats.messages.catalogue import DECISION
from topobus.process.config import NatsSettings
from topobus.values.maintenance import DeviceVerb
from topobus.values.repair import RepairEnd
from vm.kernel import driver, sh, state
from vm.monitor import Monitor
from vm.node import NAME, PATIENCE_S, URL, Node

_CARD, _CARD_AT, _VIRTIO = "nic-0000-63-00-0", "0000:63:00.0", "nic-0000-01-00-0"
_WAIT = ("maintain", "wait-healthy", "return")
_RESET = ("maintain", "wait-idle", "reset", "wait-healthy", "return")
_RULES = [
    {"name": "link", "device_class": "nic", "reasons": ["carrier-lost"], "steps": _RESET, "hold_s": 1},
    {"name": "error", "device_class": "nic", "reasons": ["aer-nonfatal"], "steps": _WAIT, "hold_s": 1},
    {"name": "gone", "device_class": "nic", "reasons": ["fell-off-bus"], "steps": _WAIT, "within_s": 5},
]


@pytest_asyncio.fixture(scope="module", autouse=True)
async def repairing(service: Node) -> AsyncIterator[None]:
    """A topology, and a controller with the rules."""
    sh("ip addr flush dev ens31; ip link set ens31 up")
    await service.device(_CARD)
    await service.start("topology")
    await service.start(
        "controller",
        TOPOBUS_CONTROLLER__REPAIR__RULES=json.dumps(_RULES),
        TOPOBUS_CONTROLLER__REPAIR__PER_HOUR="100",
    )
    yield
    service.kill("controller")
    service.kill("topology")


async def decided(device: str, what: str) -> list[str]:
    """Wait until this was decided about a device; all that was since its newest repair began."""
    seen: list[str] = []
    async with Bus.session(NatsSettings(url=URL), name="topobus-cli") as cli, asyncio.timeout(PATIENCE_S):
        async for received in cli.follow(DECISION, start=Start.ALL, node=NAME):
            event = received.value
            if event.repair is not None and event.repair.device == device:
                seen = [*([] if event.repair.what == "begun" else seen), event.repair.what]
            elif event.operation is not None and event.operation.device == device and not event.is_begun:
                seen.append(event.operation.verb.value)
            if seen and seen[-1] == what:
                return seen
    raise AssertionError


async def test_card_is_reset_once_and_returned_when_its_cable_is_back(nic: Node, monitor: Monitor) -> None:
    """The reset alone does not help: the card stays withheld until its link is up."""
    monitor.link("nic3", is_up=False)
    await decided(_CARD, "wait-healthy")
    withheld = await nic.device(_CARD, "unhealthy", "carrier-lost")
    monitor.link("nic3", is_up=True)
    done = await decided(_CARD, RepairEnd.REPAIRED)
    returned = await nic.device(_CARD)

    assert withheld.maintenance is not None
    assert done == ["begun", "maintain", "wait-idle", "reset", "wait-healthy", "return", "repaired"]
    assert returned.maintenance is None
    assert (driver(_CARD_AT), "UP" in state("ens31")["link"][0]["flags"]) == ("igb", True)


async def test_function_is_withheld_while_it_reports_errors_and_returned_when_they_end(
    nic: Node, monitor: Monitor
) -> None:
    """Each error is a sign until the next look; they go on until the function is withheld."""
    begun = asyncio.create_task(decided(_VIRTIO, "wait-healthy"))
    while not begun.done():
        monitor.fail("nic9", "COMP_TIME")
        await asyncio.wait({begun}, timeout=1)
    done = await decided(_VIRTIO, RepairEnd.REPAIRED)
    returned = await nic.device(_VIRTIO)

    assert done == ["begun", "maintain", "wait-healthy", "return", "repaired"]
    assert returned.maintenance is None


async def test_person_is_called_when_a_card_was_taken_out(nic: Node, monitor: Monitor) -> None:
    """It is given up once; the card that comes into its slot stays withheld until a person returns
    it.
    """
    monitor.unplug("nic3")
    done = await decided(_CARD, RepairEnd.GAVE_UP)
    monitor.plug("igb,bus=down31,id=nic3,mac=52:54:00:00:03:00,netdev=net3")
    sh("until ip link show ens31; do sleep 0.2; done; ip link set ens31 up")
    back = await nic.device(_CARD)
    await nic.operate(DeviceVerb.RETURN, _CARD)
    returned = await nic.device(_CARD)

    assert done == ["begun", "maintain", "wait-healthy", "gave-up"]
    assert back.maintenance is not None
    assert returned.maintenance is None
