"""The contract of a driver that changes hardware as a test suite: all of `DriverContract`, and the
promises of attaching, undoing, cleaning and long work.

    class TestAcme(HandsContract):
        config = ({"mtu": "9000"},)

        def make_driver(self) -> DeviceDriver:
            return AcmeDriver()

        def record(self, into: Path) -> RecordedMachine:
            return build("profile.toml", into)

Each verb is killed (SIGKILL) before and after each write of its journal, and then undone by a new
process, as a device service does at its start: the hardware must look as before. Tests of a verb
that a driver does not have are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledVerbs, JournaledWork
from topobus.simulation.machines import RecordedMachine
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.drivers.deaths import deaths
from topobus.testing.drivers.driver_contract import DriverContract, files_below
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import ContainerName, Sandbox

__all__ = ["HandsContract"]

_OWNER = Owner(kind=OwnerKind.CLAIM, name="contract", uid="contract-uid")


class HandsContract(DriverContract):
    """The suite. Override `make_driver` and `record`, and those of the rest that your hardware
    needs.
    """

    config: Sequence[Mapping[str, Any]] = ()
    """A claim's configuration that makes every verb do as much as it can."""
    bad_config: Sequence[Mapping[str, Any]] = ()
    """One that `check` must refuse."""

    def choose(self, devices: Sequence[Device]) -> Device:
        """Choose the device under test: the first by name.

        A subclass of your suite may choose a part of a card.
        """
        return min(devices, key=lambda device: device.name)

    def make_sandbox(self, recorded: RecordedMachine) -> Sandbox:
        """Make a pod's sandbox. Here its namespace is a folder beside the machine."""
        folder = recorded.root.parent / "sandbox"
        folder.mkdir(exist_ok=True)
        return Sandbox(id="s1", uid="p1", namespace="default", name="pod", network_namespace=str(folder))

    def remove_sandbox(self, recorded: RecordedMachine, sandbox: Sandbox) -> None:
        """Remove an empty sandbox."""
        shutil.rmtree(sandbox.network_namespace)

    def look(self, recorded: RecordedMachine) -> object:
        """Return the state of the hardware as seen from outside: equal before and after.

        Here all files of the machine.
        """
        return {
            entry.path: Path(entry.path).read_bytes()
            for entry in files_below(recorded.root)
            if entry.is_file(follow_symlinks=False)
        }

    def soil(self, recorded: RecordedMachine, device: Device) -> None:
        """Leave on a device what its user would leave, for `clean` to remove."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> _Bench:
        """Return a machine of one test's own, with its first device."""
        return _Bench(self, self.record(tmp_path / "machine"), tmp_path / "journal")

    def test_check_refuses_and_changes_nothing_when_the_configuration_is_bad(self, bench: _Bench) -> None:
        """A refusal with a reason comes before anything was changed, and
        good configuration passes.
        """
        driver = bench.driver
        if not driver.capabilities.checks or not self.bad_config:
            pytest.skip("the driver reads no configuration, or the suite has no bad one (bad_config)")
        before = self.look(bench.recorded)

        refusal = driver.check(bench.tree, [bench.device], bench.context(self.bad_config))

        assert isinstance(refusal, Refusal), "bad_config is not refused"
        assert all(reason.message for reason in refusal.reasons), "a refusal must give a reason"
        assert driver.check(bench.tree, [bench.device], bench.context(self.config)) is None, "config is refused"
        assert self.look(bench.recorded) == before, "check has changed something"

    def test_adjust_says_the_same_and_changes_nothing_when_a_container_is_made(self, bench: _Bench) -> None:
        """A container that could not start is made again: the answer is the same, of what a new
        container can get, and the hardware is as before.
        """
        driver = bench.driver
        if not driver.capabilities.adjusts:
            pytest.skip("the driver adjusts no container")
        container = ContainerName(namespace="default", pod="pod", pod_uid="p1", name="main")
        before, context = self.look(bench.recorded), bench.context(self.config)

        answers = [driver.adjust(bench.tree, bench.device, context, container) for _ in range(2)]

        assert answers[0] == answers[1], "adjust gives two different answers"
        assert isinstance(answers[0], ContainerEdits), f"adjust refuses: {answers[0]}"
        rest = msgspec.structs.replace(answers[0], env={}, mounts=(), annotations={})
        assert rest == ContainerEdits(), (
            "only variables, bind mounts and annotations can be given when a container is made"
        )
        assert not any(mount.kind for mount in answers[0].mounts), (
            "only bind mounts can be given when a container is made"
        )
        assert self.look(bench.recorded) == before, "adjust has changed something"

    def test_to_attach_names_its_devices_when_asked(self, bench: _Bench) -> None:
        """It names only the given devices, and the same each time."""
        driver = bench.attaching()
        context = bench.context(self.config)

        names = list(driver.to_attach([bench.device], context))

        assert set(names) <= {bench.device.name}
        assert list(driver.to_attach([bench.device], context)) == names

    def test_device_is_as_before_when_it_was_attached_and_detached(self, bench: _Bench) -> None:
        """Attach succeeds, its record lists what to undo, and after detach hardware and journal are
        as before.
        """
        bench.attaching()
        before = self.look(bench.recorded)

        answer = bench.attach(bench.journal)
        steps = bench.journal.attach_record(bench.device, _OWNER).steps
        bench.detach(bench.journal)

        assert not isinstance(answer, Refusal), f"attach refuses: {answer}"
        assert [step.name for step in steps if not step.is_done] == [], "steps that were begun and are not marked done"
        assert self.look(bench.recorded) == before
        assert bench.journal.entries == {}

    def test_prepare_answers_the_same_when_the_device_is_attached(self, bench: _Bench) -> None:
        """Kubelet repeats its request for pods that run: the device is not reported as gone, and
        nothing is done to it a second time.
        """
        bench.attaching()
        before = self.look(bench.recorded)
        first = bench.prepare(bench.journal)
        bench.attach(bench.journal)
        inside = self.look(bench.recorded)

        again = bench.prepare(bench.journal)

        assert again == first
        assert self.look(bench.recorded) == inside, "prepare has changed a device that a pod uses"
        bench.detach(bench.journal)
        bench.journal.close()
        bench.clean_up()
        assert self.look(bench.recorded) == before

    def test_driver_writes_before_it_acts_when_it_attaches(self, bench: _Bench) -> None:
        """Attach first records what it is about to do, before anything has changed."""
        driver = bench.attaching()
        before, looks = self.look(bench.recorded), []

        def note(_state: RecordState) -> None:
            looks.append(self.look(bench.recorded))

        record = DeviceRecord(RecordState(owner=_OWNER, sandbox=bench.sandbox), note)
        driver.attach(bench.tree, bench.device, bench.context(self.config), bench.sandbox, record)
        is_changed = self.look(bench.recorded) != before

        assert looks or not is_changed, "attach changes something and writes nothing into its record"
        assert not looks or looks[0] == before, "something had changed before the first intent was written"

    def test_detach_is_fine_when_repeated_or_never_attached(self, bench: _Bench) -> None:
        """An empty record has nothing to undo."""
        driver = bench.attaching()
        before = self.look(bench.recorded)

        for sandbox in (None, bench.sandbox):
            driver.detach(bench.tree, bench.device, sandbox, DeviceRecord(RecordState(owner=_OWNER, sandbox=sandbox)))

        assert self.look(bench.recorded) == before

    def test_device_is_as_before_when_attach_is_killed_at_any_step(self, bench: _Bench) -> None:
        """The next start undoes what was done, without the sandbox."""
        bench.attaching()
        before = self.look(bench.recorded)

        died = 0
        for died in deaths(bench.folder, bench.attach):
            bench.recover()
            # A verb killed after its last write was complete, and is left alone.
            with bench.life() as journal:
                bench.detach(journal)
            assert self.look(bench.recorded) == before, f"killed at step {died} of attach"

        assert died >= 2, "attach was killed too seldom: it writes nothing into its journal"

    def test_device_is_as_before_when_detach_is_killed_at_any_step(self, bench: _Bench) -> None:
        """What is half undone is undone."""
        bench.attaching()
        before = self.look(bench.recorded)
        with bench.life() as journal:
            bench.attach(journal)

        died = 0
        for died in deaths(bench.folder, bench.detach):
            bench.recover()
            with bench.life() as journal:
                bench.detach(journal)
                assert self.look(bench.recorded) == before, f"killed at step {died} of detach"
                bench.attach(journal)

        assert self.look(bench.recorded) == before
        assert died >= 2, "detach was killed too seldom"

    def test_device_is_as_before_when_its_sandbox_goes_while_it_is_detached(self, bench: _Bench) -> None:
        """A sandbox that is gone by the time of a second detach is no error."""
        driver = bench.attaching()
        with bench.life() as journal:
            bench.attach(journal)
            bench.detach(journal)
        self.remove_sandbox(bench.recorded, bench.sandbox)

        driver.detach(
            bench.tree, bench.device, bench.sandbox, DeviceRecord(RecordState(owner=_OWNER, sandbox=bench.sandbox))
        )

    def test_device_is_as_before_when_it_was_prepared_and_unprepared(self, bench: _Bench) -> None:
        """Nothing is killed here: what differs was left by `unprepare`, or by `clean` after it."""
        before = self.look(bench.recorded)

        with bench.life() as journal:
            bench.prepare(journal)
            steps = journal.owner_entry(bench.device.name, _OWNER).prepare.steps
        bench.clean_up()

        assert [step.name for step in steps if not step.is_done] == [], "steps of prepare that are not marked done"
        _assert_alike(before, self.look(bench.recorded), "after prepare, unprepare and clean")

    def test_card_is_as_before_when_two_owners_had_parts_of_it(self, bench: _Bench) -> None:
        """A value that parts share must not be restored to its first state: the other part's owner
        has changed it since.
        """
        pair = _parts_of_one_card(bench.discovery)
        if pair is None:
            pytest.skip("no card has two parts that fit beside each other")
        before = self.look(bench.recorded)
        owned = [
            (part, Owner(kind=OwnerKind.CLAIM, name=f"contract-{part.name}", uid=f"uid-{part.name}")) for part in pair
        ]

        with bench.life() as journal:
            for part, owner in owned:
                bench.prepare(journal, part, owner)
            for part, owner in owned:
                bench.unprepare(journal, part, owner)
            for part in pair:
                entry = journal.entries.get(part.name)
                if entry is not None and entry.is_due_for_cleaning:
                    bench.clean(journal, part)

        _assert_alike(before, self.look(bench.recorded), "after two parts of one card were used at once")

    def test_device_is_as_before_when_prepare_is_killed_at_any_step(self, bench: _Bench) -> None:
        """Unprepare undoes what was done.

        A prepare that writes nothing has nothing to be undone. Long work counts like any other.
        """
        before = self.look(bench.recorded)

        for died in deaths(bench.folder, bench.prepare):
            bench.recover()
            bench.clean_up()
            assert self.look(bench.recorded) == before, f"killed at step {died} of prepare"

    def test_device_is_as_before_when_unprepare_is_killed_at_any_step(self, bench: _Bench) -> None:
        """A second unprepare continues where the first was cut off."""
        before = self.look(bench.recorded)
        with bench.life() as journal:
            bench.prepare(journal)

        for died in deaths(bench.folder, bench.unprepare):
            bench.recover()
            with bench.life() as journal:
                bench.unprepare(journal)
            bench.clean_up()
            assert self.look(bench.recorded) == before, f"killed at step {died} of unprepare"
            with bench.life() as journal:
                bench.prepare(journal)
        bench.clean_up()

        assert self.look(bench.recorded) == before

    def test_device_is_clean_when_clean_is_killed_at_any_step(self, bench: _Bench) -> None:
        """The last user's traces are gone after any number of restarts, and a clean device stays as
        it is.
        """
        if not bench.driver.capabilities.cleans:
            pytest.skip("the driver cleans nothing")
        before = self.look(bench.recorded)
        bench.use()
        self.soil(bench.recorded, bench.device)

        for died in deaths(bench.folder, bench.clean):
            bench.clean_up()
            assert self.look(bench.recorded) == before, f"killed at step {died} of clean"
            bench.use()
            self.soil(bench.recorded, bench.device)
        bench.clean_up()

        assert self.look(bench.recorded) == before
        assert bench.journal.entries == {}


class _Life:
    """One run of a service, as far as the journal sees it."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)

    def __enter__(self) -> Journal:
        self._journal.load()
        return self._journal

    def __exit__(self, *_error: object) -> None:
        self._journal.close()


class _Bench:
    """A driver, its first device, and the verbs as a device service calls them."""

    def __init__(self, suite: HandsContract, recorded: RecordedMachine, folder: Path) -> None:
        self._suite = suite
        self.recorded = recorded
        self.folder = folder
        self.journal = Journal(folder)
        self.driver: DeviceDriver = suite.make_driver()
        self.tree = Tree(HardwareSettings(root=str(recorded.root)))
        self.discovery = self.driver.discover(self.tree, read_machine(self.tree, "contract-node"))
        self.device = suite.choose(self.discovery.devices)
        self.sandbox = suite.make_sandbox(recorded)

    def life(self) -> _Life:
        """Begin a service's process. A second one at the same time would be refused."""
        self.journal.close()
        return _Life(self.folder)

    def context(self, config: Sequence[Mapping[str, Any]]) -> PrepareContext:
        """Return the context for a claim of this configuration."""
        return PrepareContext(owner=_OWNER, config=tuple(dict(part) for part in config))

    def attaching(self) -> DeviceDriver:
        """Give the driver, if it attaches."""
        if not self.driver.capabilities.attaches:
            pytest.skip("the driver attaches nothing")
        return self.driver

    def attach(self, journal: Journal) -> object:
        """Attach the device."""
        return JournaledVerbs(journal, self._fresh_attaching(), self.tree).attach(
            self.device, self.context(self._suite.config), self.sandbox
        )

    def detach(self, journal: Journal) -> None:
        """Detach the device."""
        JournaledVerbs(journal, self._fresh_attaching(), self.tree).detach(self.device, _OWNER, self.sandbox)

    def prepare(self, journal: Journal, device: Device | None = None, owner: Owner = _OWNER) -> Edits:
        """Prepare the device, or another one, long work to its end."""
        device = device or self.device
        driver, context = (
            self._suite.make_driver(),
            msgspec.structs.replace(self.context(self._suite.config), owner=owner),
        )
        if journal.owner_entry(device.name, owner).is_attached:
            context = msgspec.structs.replace(context, attached=frozenset({device.name}))
        kept = {device.name} if driver.capabilities.cleans else set()
        answer = JournaledVerbs(journal, driver, self.tree).prepare([device], context, kept)
        if isinstance(answer, JournaledWork):
            answer = answer.run(lambda: True)
        assert not isinstance(answer, Refusal), f"prepare refuses: {answer}"
        return answer

    def unprepare(self, journal: Journal, device: Device | None = None, owner: Owner = _OWNER) -> None:
        """Unprepare the device, or another one."""
        context = msgspec.structs.replace(self.context(()), owner=owner)
        JournaledVerbs(journal, self._suite.make_driver(), self.tree).unprepare([device or self.device], context)

    def clean(self, journal: Journal, device: Device | None = None) -> None:
        """Clean the device, or another one."""
        refusal = JournaledVerbs(journal, self._suite.make_driver(), self.tree).clean(device or self.device)
        assert refusal is None, f"clean refuses: {refusal}"

    def use(self) -> None:
        """Act as an owner who has come and gone."""
        with self.life() as journal:
            self.prepare(journal)
            self.unprepare(journal)

    def recover(self) -> None:
        """Start again: undo what is half done, as a device service does before its first answer."""
        with self.life() as journal:
            entry = journal.entries.get(self.device.name)
            for owner in entry.half_done if entry is not None else ():
                if owner.is_half_attached:
                    driver = self._fresh_attaching()
                    JournaledVerbs(journal, driver, self.tree).detach(self.device, _OWNER, None)
                if owner.is_half_prepared:
                    JournaledVerbs(journal, self._suite.make_driver(), self.tree).undo_prepare(self.device, _OWNER)
            left = journal.entries.get(self.device.name)
            assert left is None or left.half_done == (), "half-done work is left after the next start"

    def clean_up(self) -> None:
        """Release the device from its remaining owner, and clean it if needed."""
        with self.life() as journal:
            self.unprepare(journal)
            entry = journal.entries.get(self.device.name)
            if entry is not None and entry.is_due_for_cleaning:
                self.clean(journal)

    def _fresh_attaching(self) -> DeviceDriver:
        return self._suite.make_driver()


def _parts_of_one_card(discovery: Discovery) -> tuple[Device, Device] | None:
    """Find two parts of one card that may be held side by side: the first by name."""
    partitions = Partitions(discovery.devices, discovery.counter_sets)
    parts = sorted((device for device in discovery.devices if device.partition_of), key=lambda device: device.name)
    return next(
        (
            pair
            for pair in combinations(parts, 2)
            if pair[0].partition_of == pair[1].partition_of and len(partitions.together(pair)) == len(pair)
        ),
        None,
    )


def _assert_alike(before: object, after: object, when: str) -> None:
    """Fail with each file that differs, where the hardware is a mapping of files."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        differences = [f"{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names]
        assert not differences, f"the hardware is not as before {when}: {'; '.join(differences)}"
    assert after == before, f"the hardware is not as before {when}"
