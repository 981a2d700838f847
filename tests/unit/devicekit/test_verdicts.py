"""What verdicts of others make of a device's health: in all orders, by how far each source is
trusted, and until somebody takes them back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from topobus.devicekit.maintenance.verdicts import (
    REPORTED,
    VERDICTS_KEPT,
    checked,
    is_about,
    observations,
    with_forgiven,
    with_verdict,
)
from topobus.engine.health.health_machine import HealthSettings, is_same_to_readers, next_health, silence
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.values.device import Device
from topobus.values.health import DeviceHealth, Dimension, HealthState, Observation
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.timestamps import rfc3339
from topobus.values.verdict import KeptVerdict, Verdict, VerdictState

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = HealthSettings(sources={"dcgm": "evidence", "node-condition": "evidence", "scout": "advice"})
PCI = PciAddress.parse("0000:18:00.0")
GPU = Device(name="gpu-0000-18-00-0", device_class="gpu", driver="nvidia", pci=PCI, uuid="GPU-1")
PART = Device(
    name="gpu-0000-18-00-0-mig-1",
    device_class="gpu",
    pci=PCI,
    uuid="MIG-1",
    parent=GPU.name,
    attributes={"parentUUID": "GPU-1"},
)
OWN_FAULT = Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="row-remap-failed")
UNHEALTHY, DEGRADED, HEALTHY = VerdictState.UNHEALTHY, VerdictState.DEGRADED, VerdictState.HEALTHY


def verdict(
    source: str = "dcgm", state: VerdictState = UNHEALTHY, *, at: datetime = START, device: str = "", code: str = ""
) -> Verdict:
    """A verdict about the memory, as it is kept."""
    return Verdict(
        source=source, state=state, device=device, dimension=Dimension.MEMORY, observed_at=rfc3339(at), code=code
    )


def kept(*verdicts: Verdict) -> tuple[KeptVerdict, ...]:
    """What is kept after these, in this order."""
    result: tuple[KeptVerdict, ...] = ()
    for each in verdicts:
        after = with_verdict(result, each)
        assert not isinstance(after, Refusal)
        result = after
    return result


@dataclass(frozen=True)
class World:
    """A device, what its driver sees, and what others said of it."""

    verdicts: tuple[KeptVerdict, ...] = ()
    health: DeviceHealth | None = None
    driver: tuple[Observation, ...] = ()
    holders: frozenset[str] = frozenset()
    """The answer that is expected: who holds something against the device."""
    was_held: bool = field(default=False)

    def look(self, now: datetime) -> World:
        """The device service looks."""
        seen = (*self.driver, *observations(GPU, self.verdicts, SETTINGS.sources))
        return replace(self, health=next_health(self.health, seen, now=now, settings=SETTINGS))

    def after(self, event: str, now: datetime) -> World:
        """Something happens, and the device service looks."""
        holders = self.holders
        world = self
        match event.split():
            case ["driver", "sees"]:
                world, holders = replace(self, driver=(OWN_FAULT,)), holders | {"driver"}
            case ["driver", "sees-no-more"]:
                world, holders = replace(self, driver=()), holders - {"driver"}
            case [source, "unhealthy"]:
                world, holders = self._with(verdict(source, at=now)), holders | {source}
            case [source, "healthy"]:
                world, holders = self._with(verdict(source, HEALTHY, at=now)), holders - {source}
            case ["forgive"]:
                world, holders = replace(self, verdicts=with_forgiven(self.verdicts, GPU)), holders & {"driver"}
            case _:
                # The service starts again, with what it stored.
                stored = msgspec.json.encode((self.verdicts, self.health or DeviceHealth()))
                verdicts, health = msgspec.json.decode(stored, type=tuple[tuple[KeptVerdict, ...], DeviceHealth])
                world = replace(self, verdicts=verdicts, health=health)
        was_held = self.was_held or bool(holders)
        return replace(world, holders=holders, was_held=was_held).look(now)

    def _with(self, new: Verdict) -> World:
        after = with_verdict(self.verdicts, new)
        assert not isinstance(after, Refusal)
        return replace(self, verdicts=after)


EVENTS = (
    "driver sees",
    "driver sees-no-more",
    "dcgm unhealthy",
    "dcgm healthy",
    "node-condition/Deadlock unhealthy",
    "forgive",
    "restart",
)


def test_device_is_free_when_no_holder_is_left_in_all_orders() -> None:
    """Of the driver, two sources, an operator who forgives, and a restart: after each step of each
    of the 5,040 orders the device is Unhealthy exactly while somebody holds something against it.
    Ten days of silence free nothing, and without a holder the hold has passed by then.
    """
    for order in itertools.permutations(EVENTS):
        world = World()
        for second, event in enumerate(order):
            world = world.after(event, START + timedelta(seconds=second))
            free = HealthState.RECOVERING if world.was_held else HealthState.HEALTHY
            assert world.health is not None
            assert world.health.state is (HealthState.UNHEALTHY if world.holders else free), (order, event)
        later = world.look(START + timedelta(days=10))
        assert later.health is not None
        assert later.health.state is (HealthState.UNHEALTHY if world.holders else HealthState.HEALTHY), order


@pytest.mark.parametrize(
    ("driver", "said", "state"),
    [
        ((), verdict("scout"), HealthState.DEGRADED),
        ((OWN_FAULT,), verdict("scout"), HealthState.UNHEALTHY),
        ((OWN_FAULT,), verdict("dcgm", DEGRADED), HealthState.UNHEALTHY),
        ((OWN_FAULT,), verdict("dcgm", HEALTHY), HealthState.UNHEALTHY),
        ((), verdict("dcgm", DEGRADED), HealthState.DEGRADED),
        ((), verdict("dcgm"), HealthState.UNHEALTHY),
        ((), verdict("gone"), HealthState.HEALTHY),
        ((silence("driver-hung", "no answer"),), verdict("dcgm"), HealthState.UNHEALTHY),
        ((silence("driver-hung", "no answer"),), verdict("dcgm", HEALTHY), HealthState.UNKNOWN),
    ],
    ids=[
        "advice of unhealthy is degraded at most",
        "advice does not soften what the driver sees",
        "milder evidence does not soften what the driver sees",
        "healthy does not free what the driver sees",
        "evidence of degraded",
        "evidence of unhealthy",
        "a source that the settings do not list any more",
        "evidence while the driver is silent",
        "healthy while the driver is silent",
    ],
)
def test_state_follows_evidence_and_trust(driver: Sequence[Observation], said: Verdict, state: HealthState) -> None:
    """The worst of driver and sources, as far as each source is trusted."""
    seen = (*driver, *observations(GPU, kept(said), SETTINGS.sources))

    assert next_health(None, seen, now=START, settings=SETTINGS).state is state


def test_sticky_fault_stays_when_a_source_says_unhealthy_and_healthy() -> None:
    """What the driver saw at one look alone is sticky also under a verdict of the same dimension."""
    sticky = msgspec.structs.replace(OWN_FAULT, is_sticky=True)
    said = observations(GPU, kept(verdict()), SETTINGS.sources)
    health = next_health(None, (sticky, *said), now=START, settings=SETTINGS)
    for day in (1, 2):
        health = next_health(health, (), now=START + timedelta(days=day), settings=SETTINGS)

    (condition,) = health.conditions
    assert (condition.reason, condition.state, condition.is_sticky) == (OWN_FAULT.reason, HealthState.UNHEALTHY, True)


def test_condition_names_source_and_code_when_a_verdict_counts() -> None:
    """Subscribers see who says it; another code is news, the same verdict again is none."""
    first = next_health(
        None, observations(GPU, kept(verdict(code="XID-79")), SETTINGS.sources), now=START, settings=SETTINGS
    )
    again, other = (
        next_health(
            first,
            observations(GPU, kept(verdict(code=code, at=START + timedelta(hours=1))), SETTINGS.sources),
            now=START + timedelta(hours=1),
            settings=SETTINGS,
        )
        for code in ("XID-79", "XID-95")
    )

    (condition,) = first.conditions
    assert (condition.reason, condition.source, condition.message) == (REPORTED, "dcgm", "dcgm: XID-79")
    assert condition.evidence == {"code": "XID-79", "said": "unhealthy", "source": "dcgm", "trust": "evidence"}
    assert again == first
    assert not is_same_to_readers(first, other)
    assert other.conditions[0].since == condition.since


def test_newest_verdict_is_kept_in_all_orders_of_arrival() -> None:
    """The time at which the source saw it decides; of two of one time the worse one counts."""
    hour = START + timedelta(hours=1)
    said = (verdict(), verdict(state=HEALTHY, at=hour), verdict(state=DEGRADED, at=hour), verdict("scout"))

    assert {kept(*order) for order in itertools.permutations(said)} == {kept(said[2], said[3])}


def test_forgiven_verdict_counts_again_when_the_source_says_it_anew() -> None:
    """Repeated with the same time it stays forgiven; for another device it always counted."""
    other = msgspec.structs.replace(GPU, name="gpu-1")
    forgiven = with_forgiven(kept(verdict()), GPU)
    repeated = with_verdict(forgiven, verdict())
    newer = with_verdict(forgiven, verdict(at=START + timedelta(seconds=1)))
    assert not isinstance(repeated, Refusal)
    assert not isinstance(newer, Refusal)

    counted = [
        [len(observations(device, each, SETTINGS.sources)) for device in (GPU, other)] for each in (repeated, newer)
    ]
    assert counted == [[0, 1], [1, 1]]
    assert with_forgiven(repeated, GPU) == forgiven


@pytest.mark.parametrize(
    ("listed", "named", "target"),
    [
        ((GPU, PART), "", ""),
        ((), "", ""),
        ((GPU, PART), GPU.name, GPU.name),
        ((PART,), GPU.name, GPU.name),
        ((PART,), "00000000:18:00.0", GPU.name),
        ((PART,), "GPU-1", GPU.name),
        ((GPU,), "18:00.0", GPU.name),
        ((GPU,), "GPU-1", GPU.name),
        ((PART,), "MIG-1", PART.name),
    ],
)
def test_verdict_has_one_name_whichever_name_is_used(listed: tuple[Device, ...], named: str, target: str) -> None:
    """So that what was said of an address can be taken back by a UUID; a card's counts for parts."""
    said = checked(verdict(device=named), listed, SETTINGS.sources, device_class="gpu", now=START)

    assert isinstance(said, Verdict)
    assert said.device == target
    assert all(is_about(said, device) for device in listed)


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (verdict("npd"), "source-unlisted", "health.sources of the gpu service lists dcgm, node-condition, scout"),
        (verdict("DCGM"), "verdict-malformed", "source is 'DCGM', wanted a name such as dcgm"),
        (verdict("dcgm/"), "verdict-malformed", "source is 'dcgm/'"),
        (verdict(device="gpu-7"), "device-unknown", "no device with name, PCI address or UUID 'gpu-7'"),
        (verdict(code="x" * 65), "verdict-malformed", "code has 65 bytes"),
        (verdict(code="a\nb"), "verdict-malformed", "wanted one printable line of at most 64"),
        (verdict(at=START + timedelta(minutes=2)), "verdict-malformed", "set the clocks"),
        (Verdict(source="dcgm", state=UNHEALTHY, observed_at="noon"), "verdict-malformed", "'noon', wanted RFC 3339"),
        (
            Verdict(source="dcgm", state=UNHEALTHY, observed_at="2026-01-02T03:04:05"),
            "verdict-malformed",
            "wanted RFC 3339",
        ),
    ],
)
def test_verdict_is_refused_with_the_reason(said: Verdict, code: str, words: str) -> None:
    """Who sends it learns which word or which setting is wrong."""
    refused = checked(said, (GPU,), SETTINGS.sources, device_class="gpu", now=START)

    assert isinstance(refused, Refusal)
    (reason,) = refused.reasons
    assert reason.code == code
    assert words in reason.message


def test_verdict_gets_the_present_time_when_it_has_none() -> None:
    """And one of another zone is kept in UTC, so that texts sort as moments do."""
    bare = Verdict(source="dcgm", state=UNHEALTHY)
    zoned = msgspec.structs.replace(bare, observed_at="2026-01-02T05:04:05+02:00")

    said = [checked(each, (GPU,), SETTINGS.sources, device_class="gpu", now=START) for each in (bare, zoned)]

    assert said == [msgspec.structs.replace(bare, observed_at=rfc3339(START))] * 2


def test_oldest_healthy_makes_room_when_too_many_are_kept() -> None:
    """One that withholds something is never dropped for another: the new one is refused."""
    sick = [verdict(device=f"gpu-{number:03}") for number in range(VERDICTS_KEPT - 1)]
    healthy = verdict(state=HEALTHY, device="gpu-well")
    full = kept(*sick, healthy)
    with_room = with_verdict(full, verdict(device="gpu-new"))
    assert not isinstance(with_room, Refusal)
    refused = with_verdict(with_room, verdict(device="gpu-one-more"))

    assert len(full) == len(with_room) == VERDICTS_KEPT
    assert healthy not in {each.verdict for each in with_room}
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "verdicts-full"
    # The service's own value of it fits into its bucket with room for an operator's words.
    assert len(msgspec.json.encode(with_room)) < 256 * 1024


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(DriverView(devices=(), away={GPU.name: GPU}), id="in a pod's sandbox"),
        pytest.param(DriverView(), id="before its driver's first look"),
        pytest.param(DriverView(silence=silence("driver-hung", "no answer")), id="while its driver hangs"),
    ],
)
def test_verdict_counts_and_ends_while_the_driver_cannot_see_the_device(view: DriverView) -> None:
    """What the driver saw last stays as it was; the source's own condition moves."""
    own = next_health(None, (OWN_FAULT,), now=START, settings=SETTINGS)
    device = msgspec.structs.replace(GPU, health=own)
    shown: list[dict[str, HealthState]] = []
    for day, said in enumerate((verdict(), verdict(state=HEALTHY), verdict(state=HEALTHY))):
        merged = advance_inventory(
            MergedInventory(devices=(device,)),
            {"nvidia": view},
            device_class="gpu",
            machine=Machine(
                node="n1", numa_nodes=(), cpus=(), pci_devices=(PciDevice(address=PCI, vendor=0x10DE, device=0x2330),)
            ),
            held=(GPU.name,),
            now=START + timedelta(days=day),
            settings=SETTINGS,
            reported=lambda device, said=said: observations(device, kept(said), SETTINGS.sources),
        )
        (device,) = merged.devices
        shown.append(
            {
                condition.source or "driver": condition.state
                for condition in device.health.conditions
                if condition.dimension is Dimension.MEMORY
            }
        )

    assert shown == [
        {"driver": HealthState.UNHEALTHY, "dcgm": HealthState.UNHEALTHY},
        {"driver": HealthState.UNHEALTHY, "dcgm": HealthState.RECOVERING},
        {"driver": HealthState.UNHEALTHY},
    ]
