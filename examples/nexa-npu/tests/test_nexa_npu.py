"""The Nexa driver keeps the contract of a driver with hands, and publishes what its own files
have.
"""

from __future__ import annotations

from pathlib import Path

from topobus_nexa_npu import NexaDriver

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.drivers.hands_contract import HandsContract
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

WHOLE = "npu-0000-16-00-0"
HALVES = (f"{WHOLE}-half-0", f"{WHOLE}-half-1")


def record(into: Path) -> RecordedMachine:
    """Build the recorded machine of this package."""
    return build(Path(__file__).parent.parent / "machine.toml", into)


def discovered(recorded: RecordedMachine) -> tuple[Tree, dict[str, Device]]:
    """Find its devices, by name."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    return tree, {device.name: device for device in NexaDriver().discover(tree, read_machine(tree, "n1")).devices}


class TestNexaContract(HandsContract):
    """All that the service relies on, for the whole card: its verbs do
    all that a half's do, twice.
    """

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return NexaDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the machine."""
        return record(into)

    def soil(self, recorded: RecordedMachine, device: Device) -> None:
        """Leave memory behind, in both halves."""
        for half in (0, 1):
            recorded.write(f"{recorded.folder(str(device.pci))}/nexa/used_mib{half}", "512")


def test_whole_card_and_a_half_exclude_each_other(tmp_path: Path) -> None:
    """Two halves go together; the card goes with none of them, and has the memory of both."""
    tree, devices = discovered(record(tmp_path / "machine"))
    card = [devices[name] for name in (WHOLE, *HALVES)]
    counters = {
        each.name: each.counters["cores"] for each in NexaDriver().discover(tree, read_machine(tree, "n1")).counter_sets
    }
    cores = [device.consumes[0].amount for device in card]

    assert len(devices) == 6
    assert cores[1] + cores[2] == counters[WHOLE] < cores[0] + cores[1]
    assert [device.capacity["memory"] >> 30 for device in card] == [32, 16, 16]
    assert [device.partition_of for device in card] == ["", WHOLE, WHOLE]


def test_half_has_its_own_node_and_the_card_both(tmp_path: Path) -> None:
    """A pod with a half never sees the other one's."""
    tree, devices = discovered(record(tmp_path / "machine"))
    context = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))

    edits = NexaDriver().prepare(tree, [devices[name] for name in (WHOLE, *HALVES)], context)

    assert not isinstance(edits, Refusal)
    nodes = {name: [node.path.rpartition("-")[2] for node in edits[name].device_nodes] for name in edits}
    assert nodes == {WHOLE: ["0", "1"], HALVES[0]: ["0"], HALVES[1]: ["1"]}


def test_card_and_both_halves_are_sick_when_the_card_says_so(tmp_path: Path) -> None:
    """They are one piece of silicon; the other card is well."""
    recorded = record(tmp_path / "machine")
    tree, devices = discovered(recorded)
    recorded.write(f"{recorded.folder(str(devices[WHOLE].pci))}/nexa/fault", "parity in core 7")

    seen = NexaDriver().observe(tree, list(devices.values()))

    sick = {
        name: [(each.reason, each.state) for each in observations]
        for name, observations in seen.items()
        if observations
    }
    assert sick == {name: [("card-fault", HealthState.UNHEALTHY)] for name in (WHOLE, *HALVES)}


class Stubborn(Tree):
    """A machine whose kernel driver takes what is written and does nothing with it."""

    def path(self, path: str) -> Path:
        """Return a file that is never read."""
        return super().path("dev/unread")


def test_half_is_nobodys_when_it_keeps_memory_of_its_last_user(tmp_path: Path) -> None:
    """Refused with the amount, and the intent stays in the record: the next attempt finds it."""
    recorded = record(tmp_path / "machine")
    _, devices = discovered(recorded)
    recorded.write(f"{recorded.folder(str(devices[WHOLE].pci))}/nexa/used_mib1", "512")
    left = DeviceRecord()

    answer = NexaDriver().clean(Stubborn(HardwareSettings(root=str(recorded.root))), devices[HALVES[1]], left)

    assert isinstance(answer, Refusal)
    assert [(reason.code, dict(reason.facts)) for reason in answer.reasons] == [("memory-left", {"mib": 512})]
    assert [step.name for step in left.steps] == ["wipe"]
