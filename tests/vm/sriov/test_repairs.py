"""Faults of real functions, repaired by rules: what the kernel has seen is withheld, reset, bound
again, tested or waited for, and ends in the declared state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs, to_builtins

from support.asking import ask_patiently
from support.repair_cases import GUEST, PERSON, RepairCase
from topobus.bus.bus import Bus
from topobus.bus.streams.events import Start
from topobus.formats.messages.catalogue import DECISION, OPERATE, REPAIR
from topobus.formats.messages.messages import DecisionEvent
from topobus.formats.messages.operation_messages import Operated, OperateRequest
from topobus.process.config import NatsSettings
from topobus.values.device import Device, Inventory
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.repair import REPAIR_POLICY, RepairEnd
from vm.hands import Fault, resets
from vm.kernel import sh
from vm.node import NAME, PATIENCE_S, URL, Node

# A repair has a dozen steps, each after a look or an answer of an emulated service.
pytestmark = pytest.mark.timeout(600)
_CASES = {case.name: case for case in GUEST}
Note = tuple[str, str, str]
"""Rule, device, and a repair's begin, step or end, or the operation that was performed."""


@pytest_asyncio.fixture(scope="module", autouse=True)
async def repairing(service: Node) -> AsyncIterator[None]:
    """A topology; each test starts a controller with its own rules."""
    sh("ip addr flush dev ens31; ip link set ens31 up")
    await service.start("topology")
    yield
    service.kill("controller")
    service.kill("topology")


async def control(nic: Node, *cases: RepairCase) -> None:
    """Start a controller whose policy is the rules of some cases."""
    # A link that a reset has switched off and on is not missed for 15 s.
    rules = [
        structs.replace(case.rule("nic"), hold_s=20.0 if case.resets_it else 1.0, again_within_s=1.0) for case in cases
    ]
    await nic.start(
        "controller",
        TOPOBUS_CONTROLLER__REPAIR__RULES=json.dumps(to_builtins(rules)),
        TOPOBUS_CONTROLLER__REPAIR__PER_HOUR="100",
    )


class Notes:
    """All that was decided about repairs, in order."""

    def __init__(self) -> None:
        self.all: list[Note] = []
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Read decisions until cancelled."""
        async with Bus.session(NatsSettings(url=URL), name="topobus-cli") as cli:
            async for received in cli.follow(DECISION, start=Start.ALL, node=NAME):
                if note := _note(received.value):
                    async with self._changed:
                        self.all.append(note)
                        self._changed.notify_all()

    async def decided(self, case: RepairCase, what: str, *, since: int, times: int = 1) -> list[Note]:
        """Wait until this was decided by a case's rule so many times, not counting the notes before
        `since`; those after it.
        """

        def is_decided() -> bool:
            return sum((rule, each) == (case.name, what) for rule, _, each in self.all[since:]) >= times

        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(is_decided)
        return self.all[since:]


@pytest_asyncio.fixture(scope="module")
async def notes(repairing: None) -> AsyncIterator[Notes]:
    """Follow all decisions."""
    made = Notes()
    following = asyncio.create_task(made.follow())
    yield made
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


def _note(event: DecisionEvent) -> Note | None:
    if event.repair is not None:
        return event.repair.rule, event.repair.device, event.repair.what
    operation = event.operation
    if operation is None or operation.who != REPAIR_POLICY or event.is_begun:
        return None
    return operation.why.split()[1], operation.device, operation.verb.value


@asynccontextmanager
async def left_well(nic: Node, *here: Fault) -> AsyncIterator[None]:
    """Take faults back, also those of a test that failed; a person returns what is withheld, and no
    repair is left.
    """
    try:
        yield
    finally:
        for fault in here:
            if fault.is_there is None or fault.is_there():
                fault.take_back()
        for fault in here:
            await nic.device(fault.device)
        for device in (await nic.inventory("nic")).devices:
            if device.maintenance is not None:
                await nic.operate(DeviceVerb.RETURN, device.name)
        await no_repair_is_open()


async def no_repair_is_open() -> None:
    """Wait until each repair has ended, and is nobody's to return."""
    async with Bus.session(NatsSettings(url=URL), name="controller") as bus, asyncio.timeout(PATIENCE_S):
        async for change in bus.watch(REPAIR):
            if change.value is None:
                continue
            if not any(repair.end is None or repair.is_left for repair in change.value.repairs):
                break


async def cause(fault: Fault, withheld: asyncio.Task[Any]) -> None:
    """Cause a fault until its device is withheld: an error is a sign until the next look."""
    fault.cause()
    while fault.is_there is None and not withheld.done():
        await asyncio.wait({withheld}, timeout=1)
        if not withheld.done():
            fault.cause()
    await withheld


def burn_ins() -> int:
    """Count the devices that were tested."""
    place = Path("/tmp/burn-ins")
    return len(place.read_text().splitlines()) if place.exists() else 0


@pytest.mark.parametrize("name", _CASES)
async def test_fault_of_a_function_ends_as_its_rule_says(
    nic: Node, hands: Mapping[str, Fault], notes: Notes, name: str
) -> None:
    """What the kernel has reset, bound again or seen healed is offered again. What is not well
    stays withheld, for a person who is called once; what a person takes over is left to that
    person.
    """
    case, fault = _CASES[name], hands[_CASES[name].hands]
    await nic.device(fault.device)
    await control(nic, case)
    at, before = len(notes.all), (resets(), burn_ins(), fault.count())
    async with left_well(nic, fault):
        await cause(fault, asyncio.create_task(notes.decided(case, "maintain", since=at)))
        if case.end is RepairEnd.TAKEN_OVER:
            await take_over(fault.device)
        elif case.end is RepairEnd.REPAIRED:
            await notes.decided(case, "wait-healthy", since=at)
            fault.take_back()
        await notes.decided(case, case.end, since=at)
        await nic.inventory("nic", lambda inventory: are_as_declared(inventory, fault, case))
        if case.end is RepairEnd.REPAIRED:
            # A card and its functions come back one after the other, and each may be repaired.
            await no_repair_is_open()
        is_there = fault.is_there is not None and fault.is_there()
    said = [note for note in notes.all[at:] if note[0] == case.name]

    # One after the other, since the budget of the node is one.
    repaired = [device for _, device, what in said if what == "begun"]
    assert [(device, what) for _, device, what in said if what in ("begun", *RepairEnd)] == [
        (device, what) for device in repaired for what in ("begun", case.end)
    ]
    assert repaired
    assert len(repaired) == len(set(repaired))
    assert {device for _, device, _ in said} == set(repaired) <= set(fault.devices)
    assert is_there is (fault.is_there is not None and case.end is not RepairEnd.REPAIRED)
    assert (fault.count() > before[2]) is (fault.is_there is None)
    tested = case.tries * case.steps.count("burn-in")
    assert (resets() - before[0], burn_ins() - before[1]) == (case.resets, tested)


def are_as_declared(inventory: Inventory, fault: Fault, case: RepairCase) -> bool:
    """Say whether the first device of a fault is there, and all that are there are as declared."""
    here = [device for device in inventory.devices if device.name in fault.devices]
    return inventory.device(fault.device) in here and all(is_as_declared(device, case) for device in here)


def is_as_declared(device: Device, case: RepairCase) -> bool:
    """Say whether a device is offered, or withheld by whom it should be."""
    withheld_by = device.maintenance.who if device.maintenance is not None else ""
    return (withheld_by, device.is_fit) == (case.withheld_by, case.end is RepairEnd.REPAIRED)


async def take_over(device: str) -> None:
    """Withhold a device as a person."""
    operation = DeviceOperation(
        device_class="nic", device=device, verb=DeviceVerb.MAINTAIN, why="cable ordered", who=PERSON
    )
    async with Bus.session(NatsSettings(url=URL), name="topobus-cli") as cli:
        request = OperateRequest(op_id=f"{PERSON}-{device}", operation=operation)
        reply = await ask_patiently(cli, OPERATE, request, limit_s=PATIENCE_S, node=NAME)
    assert isinstance(reply.result, Operated), reply


async def test_repair_waits_for_the_owner_and_outlives_its_controller(
    nic: Node, hands: Mapping[str, Fault], notes: Notes
) -> None:
    """SIGKILL while it waits until the card is idle, and while it waits until it is healthy: the
    next life goes on there, and the kernel has reset the card once, after its owner had gone.
    """
    case, fault = _CASES["cable-reset-repaired"], hands["cable"]
    await nic.device(fault.device)
    owner = await nic.adopt(fault.device)
    await control(nic, case)
    at, before = len(notes.all), resets()
    async with left_well(nic, fault):
        fault.cause()
        await notes.decided(case, "wait-idle", since=at)
        await nic.restart("controller")
        held = resets()
        await nic.release(owner)
        await notes.decided(case, "wait-healthy", since=at)
        await nic.restart("controller")
        fault.take_back()
        said = await notes.decided(case, RepairEnd.REPAIRED, since=at)

    assert held == before
    assert [what for _, _, what in said] == ["begun", *case.steps, RepairEnd.REPAIRED]
    assert resets() == before + 1


async def test_faults_at_once_are_repaired_one_after_the_other(
    nic: Node, hands: Mapping[str, Fault], notes: Notes
) -> None:
    """The budget of the node is one: the second repair begins when the first has ended, though both
    cards have lost their carrier before.
    """
    case, both = _CASES["cable-wait-healthy-repaired"], [hands["cable"], hands["cable-of-virtio"]]
    by_device = {fault.device: fault for fault in both}
    for fault in both:
        await nic.device(fault.device)
    await control(nic, case)
    at = len(notes.all)
    async with left_well(nic, *both):
        for fault in both:
            fault.cause()
        for fault in both:
            await nic.device(fault.device, "unhealthy", "carrier-lost")
        for times in (1, 2):
            by_device[(await notes.decided(case, "wait-healthy", since=at, times=times))[-1][1]].take_back()
        said = await notes.decided(case, RepairEnd.REPAIRED, since=at, times=2)

    assert [what for _, _, what in said] == ["begun", *case.steps, RepairEnd.REPAIRED] * 2
    assert [len({device for _, device, _ in said[first : first + 5]}) for first in (0, 5)] == [1, 1]
    assert {device for _, device, _ in said} == by_device.keys()
