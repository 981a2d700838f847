"""The contract suite of hands finds the drivers that break it: a suite that passes everything
protects nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.devicekit.driver import DeviceDriver, Discovery, LongWork, PrepareContext
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.folder_driver import CARDS, FolderDriver, make_card
from topobus.testing.drivers.hands_contract import HandsContract, _Bench
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, ContainerName, Sandbox

_PROFILE = Path(__file__).parent.parent.parent / "data" / "profiles" / "h100-pair.toml"


class _ActsFirst(FolderDriver):
    """Sets the MTU before it says so."""

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        (tree.path(CARDS) / device.name / "mtu").write_text("9000", encoding="utf-8")
        return super().attach(tree, device, context, sandbox, record)


class _ForgetsMtu(FolderDriver):
    """Brings the card home as it is, and says that all is undone."""

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        mtu = record.step("mtu")
        super().detach(tree, device, sandbox, record)
        if mtu is not None:
            (tree.path(CARDS) / device.name / "mtu").write_text("9000", encoding="utf-8")


class _TrustsDone(FolderDriver):
    """Undoes only what is marked done: what was cut off between the act and the mark stays."""

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        for step in record.steps:
            if not step.is_done:
                record.undone(step.name)
        super().detach(tree, device, sandbox, record)


class _NeedsSandbox(FolderDriver):
    """Cannot detach when nobody tells it the sandbox."""

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        assert sandbox is not None
        super().detach(tree, device, sandbox, record)


class _LeavesImage(FolderDriver):
    """Does not restore what it programmed, and says that it did."""

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        for record in context.records.values():
            for step in record.steps:
                record.undone(step.name)


class _SweepsNothing(FolderDriver):
    """Calls a device clean that is not."""

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        return None


class _ChecksNothing(FolderDriver):
    """Takes any configuration."""

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        return None


class _NamesOthers(FolderDriver):
    """Wants devices attached that nobody asked it about."""

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        return ["nic-card-0", "nic-card-1"]


class _LooksAgain(FolderDriver):
    """Takes a device that a pod has for gone."""

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | LongWork | Refusal:
        missing = [device.name for device in devices if not (tree.path(CARDS) / device.name).is_dir()]
        if missing:
            return Refusal(reasons=(Reason(code="device-gone", message=f"{missing} are gone"),))
        return super().prepare(tree, devices, context)


class _KeepsCount(FolderDriver):
    """Notes each container on the card, which nobody takes away again."""

    def adjust(
        self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName
    ) -> ContainerEdits | Refusal:
        (tree.path(CARDS) / device.name / "users").write_text(container.name, encoding="utf-8")
        return super().adjust(tree, device, context, container)


class _Halves(FolderDriver):
    """Offers a card as two halves that write who has them into one file of the card."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        names = ("nic-card-0-half-0", "nic-card-0-half-1")
        return Discovery(
            devices=[
                Device(name=name, device_class="nic", driver=self.name, partition_of="nic-card-0") for name in names
            ]
        )

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits]:
        session = tree.path(CARDS) / "nic-card-0" / "session"
        for device in devices:
            record = context.records[device.name]
            record.intend("session", {"was": session.read_text(encoding="utf-8"), "own": context.owner.name})
            session.write_text(session.read_text(encoding="utf-8") + f"{context.owner.name} ", encoding="utf-8")
            record.done("session")
        return {device.name: ContainerEdits(env={"CARD": "0"}) for device in devices}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        session = tree.path(CARDS) / "nic-card-0" / "session"
        for device in devices:
            if (step := context.records[device.name].step("session")) is not None:
                session.write_text(self.without(session.read_text(encoding="utf-8"), step), encoding="utf-8")
                context.records[device.name].undone("session")

    def without(self, text: str, step: Step) -> str:
        """Give what the card's file has when an owner has gone."""
        return text.replace(f"{step.before['own']} ", "")


class _RestoresWhatWas(_Halves):
    """Puts the card's file back as it was: the other half's owner has changed it since."""

    def without(self, text: str, step: Step) -> str:
        return str(step.before["was"])


class _Suite(HandsContract):
    """The suite, its tests called one by one."""

    config: Sequence[Mapping[str, Any]] = ({"mtu": "9000", "image": "fast"},)
    bad_config = ({"mtu": "70000"},)

    def __init__(self, driver: type[FolderDriver]) -> None:
        self._driver = driver

    def make_driver(self) -> DeviceDriver:
        return self._driver()

    def record(self, into: Path) -> RecordedMachine:
        recorded = build(_PROFILE, into)
        (make_card(recorded.root, "nic-card-0") / "session").write_text("", encoding="utf-8")
        return recorded

    def soil(self, recorded: RecordedMachine, device: Device) -> None:
        (recorded.root / CARDS / device.name / "dirt").write_text("coffee", encoding="utf-8")


_CASES: list[tuple[type[FolderDriver], Callable[[_Suite, _Bench], None]]] = [
    (_ActsFirst, _Suite.test_driver_writes_before_it_acts_when_it_attaches),
    (_ForgetsMtu, _Suite.test_device_is_as_before_when_it_was_attached_and_detached),
    (_TrustsDone, _Suite.test_device_is_as_before_when_attach_is_killed_at_any_step),
    (_NeedsSandbox, _Suite.test_device_is_as_before_when_detach_is_killed_at_any_step),
    (_NeedsSandbox, _Suite.test_detach_is_fine_when_repeated_or_never_attached),
    (_LooksAgain, _Suite.test_prepare_answers_the_same_when_the_device_is_attached),
    (_LeavesImage, _Suite.test_device_is_as_before_when_prepare_is_killed_at_any_step),
    (_LeavesImage, _Suite.test_device_is_as_before_when_unprepare_is_killed_at_any_step),
    (_SweepsNothing, _Suite.test_device_is_clean_when_clean_is_killed_at_any_step),
    (_ChecksNothing, _Suite.test_check_refuses_and_changes_nothing_when_the_configuration_is_bad),
    (_KeepsCount, _Suite.test_adjust_says_the_same_and_changes_nothing_when_a_container_is_made),
    (_NamesOthers, _Suite.test_to_attach_names_its_devices_when_asked),
    (_LeavesImage, _Suite.test_device_is_as_before_when_it_was_prepared_and_unprepared),
]


@pytest.mark.parametrize(
    ("driver", "test"),
    _CASES,
    ids=[f"{driver.__name__.strip('_')}-{number}" for number, (driver, _) in enumerate(_CASES)],
)
def test_suite_fails_when_a_driver_breaks_the_contract(
    driver: type[FolderDriver], test: Callable[[_Suite, _Bench], None], tmp_path: Path
) -> None:
    """Each broken driver fails the test that stands for the broken promise, and the good one passes
    it.
    """
    good, bad = _Suite(FolderDriver), _Suite(driver)
    test(good, _Bench(good, good.record(tmp_path / "good" / "machine"), tmp_path / "good" / "journal"))

    with pytest.raises(AssertionError):
        test(bad, _Bench(bad, bad.record(tmp_path / "bad" / "machine"), tmp_path / "bad" / "journal"))


def test_suite_fails_when_a_driver_puts_back_what_the_parts_of_a_card_share(tmp_path: Path) -> None:
    """Two owners come and go: a driver that takes its own word away leaves the card as it was, one
    that restores does not.
    """
    for driver, fails in ((_Halves, False), (_RestoresWhatWas, True)):
        suite = _Suite(driver)
        bench = _Bench(
            suite, suite.record(tmp_path / driver.__name__ / "machine"), tmp_path / driver.__name__ / "journal"
        )
        with (
            pytest.raises(AssertionError, match="nic-card-0/session was b'', is b'contract-nic-card-0-half-0 '")
            if fails
            else nullcontext()
        ):
            suite.test_card_is_as_before_when_two_owners_had_parts_of_it(bench)
