"""The contract of a driver as a test suite: subclass `DriverContract`, define how to make the
driver and its machine, and run pytest.

    class TestAcme(DriverContract):
        def make_driver(self) -> DeviceDriver:
            return AcmeDriver()

        def record(self, into: Path) -> RecordedMachine:
            return build("profile.toml", into)

Every promise that the device service relies on has a test here. A driver that passes runs in the
service. One that does not would harm its users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import DeviceDriver, LongWork, PrepareContext
from topobus.devicekit.host.device_readings import is_exported
from topobus.formats.messages.device_classes import class_complaint
from topobus.simulation.machines import RecordedMachine
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import HealthState, Observation
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine
from topobus.values.names import is_dns_label
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["DriverContract", "files_below"]

_NODE = "contract-node"
_OWNER = Owner(kind=OwnerKind.CLAIM, name="contract", uid="contract-uid")


class DriverContract:
    """The suite.

    Override `make_driver` and `record`. Override `vanish` only when the hardware is lost in another
    way than by the removal of a PCI function (or a CPU).
    """

    def make_driver(self) -> DeviceDriver:
        """Make a new driver, as its entry point does."""
        raise NotImplementedError("make_driver: return a new instance of your driver")

    def record(self, into: Path) -> RecordedMachine:
        """Write a machine with at least two healthy devices of this driver below `into` (one will
        do when there cannot be two).
        """
        raise NotImplementedError("record: build a recorded machine that holds your devices")

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Remove a device, as the hardware would."""
        if device.pci is not None:
            recorded.remove_pci(str(device.pci))
        elif device.cpu is not None:
            recorded.set_cpu_online(device.cpu, False)  # noqa: FBT003 - the machine's own verb
        else:
            raise NotImplementedError("vanish: implement how a device of this driver disappears")

    @pytest.fixture
    def driver(self) -> DeviceDriver:
        """Give a new driver."""
        return self.make_driver()

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls, tmp_path_factory: pytest.TempPathFactory) -> RecordedMachine:
        """Give the recorded machine, one for all tests that leave it as it is."""
        return cls().record(tmp_path_factory.mktemp("recorded") / "machine")

    @pytest.fixture
    def doomed(self, tmp_path: Path) -> RecordedMachine:
        """Return a recorded machine of one test's own, to remove devices from."""
        return self.record(tmp_path / "machine")

    @pytest.fixture
    def tree(self, recorded: RecordedMachine) -> Tree:
        """Give the machine's tree."""
        return Tree(HardwareSettings(root=str(recorded.root)))

    @pytest.fixture(scope="class")
    @classmethod
    def machine(cls, recorded: RecordedMachine) -> Machine:
        """Give the machine as discovery reads it: a frozen value, read once."""
        return read_machine(Tree(HardwareSettings(root=str(recorded.root))), _NODE)

    @pytest.fixture
    def devices(self, driver: DeviceDriver, tree: Tree, machine: Machine) -> tuple[Device, ...]:
        """Return the devices that the driver finds."""
        return tuple(driver.discover(tree, machine).devices)

    def test_driver_is_one_when_the_service_loads_it(self, driver: DeviceDriver) -> None:
        """A driver has all methods of the protocol, a DNS label for its name, and a class that some
        service runs.
        """
        assert isinstance(driver, DeviceDriver), f"{driver!r} lacks a method of DeviceDriver"
        assert is_dns_label(driver.name), f"name {driver.name!r} is no DNS label"
        assert is_dns_label(driver.device_class), f"device_class {driver.device_class!r} is no DNS label"
        complaint = class_complaint(driver.device_class)
        assert not complaint, f"{complaint}: no service would load driver {driver.name}"

    def test_discover_gives_usable_devices_when_they_are_there(
        self, driver: DeviceDriver, devices: tuple[Device, ...]
    ) -> None:
        """Devices are found, their names are unique DNS labels, and their class is the driver's, which
        each name begins with.
        """
        names = [device.name for device in devices]

        assert names, "the recorded machine holds no device of this driver"
        assert [name for name in names if not is_dns_label(name)] == [], "names that are no DNS labels"
        assert len(set(names)) == len(names), f"names that occur twice: {sorted(names)}"
        assert {device.device_class for device in devices} == {driver.device_class}
        assert _misnamed(driver, names) == [], f"names that do not begin with '{driver.device_class}-', or have '--'"

    def test_discover_names_counter_sets_by_the_class_when_there_are_some(
        self, driver: DeviceDriver, tree: Tree, machine: Machine
    ) -> None:
        """Counter sets are named by the class too, because one pool has those of all classes."""
        names = [counter_set.name for counter_set in driver.discover(tree, machine).counter_sets]

        assert _misnamed(driver, names) == [], f"names that do not begin with '{driver.device_class}-', or have '--'"

    def test_discover_answers_the_same_when_asked_again(
        self, driver: DeviceDriver, tree: Tree, machine: Machine, devices: tuple[Device, ...]
    ) -> None:
        """The same tree gives the same devices: from the same driver, and from one of another
        process.
        """
        assert _sorted(driver.discover(tree, machine).devices) == _sorted(devices), (
            "the second answer of one driver differs"
        )
        assert _sorted(self.make_driver().discover(tree, machine).devices) == _sorted(devices), (
            "a new driver answers otherwise: names must be stable"
        )

    def test_discover_answers_the_same_when_the_machine_lists_its_parts_otherwise(
        self, driver: DeviceDriver, tree: Tree, machine: Machine, devices: tuple[Device, ...]
    ) -> None:
        """Names come from the place or identity of a device, never from the order of discovery."""
        reversed_machine = msgspec.structs.replace(
            machine, pci_devices=machine.pci_devices[::-1], cpus=machine.cpus[::-1]
        )

        assert _sorted(driver.discover(tree, reversed_machine).devices) == _sorted(devices)

    def test_discover_keeps_names_when_another_device_vanishes(
        self, driver: DeviceDriver, doomed: RecordedMachine
    ) -> None:
        """A neighbour's absence does not change a device's name."""
        tree = Tree(HardwareSettings(root=str(doomed.root)))
        first, *others = _sorted(driver.discover(tree, read_machine(tree, _NODE)).devices)
        self.vanish(doomed, first)

        left = {device.name for device in driver.discover(tree, read_machine(tree, _NODE)).devices}

        gone_with_it = {device.name for device in others if device.parent != first.name} - left
        assert not gone_with_it, f"{', '.join(sorted(gone_with_it))} went with {first.name}: name it in their `parent`"
        assert left == {device.name for device in others if device.parent != first.name}

    def test_discover_places_devices_as_the_machine_does_when_they_have_a_place(
        self, machine: Machine, devices: tuple[Device, ...]
    ) -> None:
        """NUMA node, root complex, path and switch are the machine's own.

        An unknown NUMA node stays unknown.
        """
        functions = {pci_device.address: pci_device for pci_device in machine.pci_devices}
        cpus = {cpu.id: cpu for cpu in machine.cpus}
        for device in devices:
            if device.pci is not None:
                function = functions[device.pci]
                numa_node = function.numa_node
                assert (device.pcie_root, device.pcie_path, device.pcie_switch) == (
                    function.root,
                    function.path,
                    function.switch,
                ), device.name
            elif device.cpu is not None:
                numa_node = cpus[device.cpu].numa_node
            else:
                continue
            assert device.numa_nodes == (None if numa_node is None else NodeSet(numa_node)), f"{device.name}: NUMA node"

    def test_driver_reads_inside_the_tree_when_it_looks(
        self, driver: DeviceDriver, tree: Tree, machine: Machine
    ) -> None:
        """No method opens a file of the real machine, only files of the recorded tree."""
        with _opened_files() as opened:
            _use_all(driver, tree, machine)

        outside = [
            path
            for path in opened
            if path.startswith(("/sys/", "/proc/", "/dev/")) and not path.startswith(f"{tree.root}/")
        ]
        assert outside == [], "absolute paths were read; use the Tree"

    def test_discover_finds_nothing_when_the_tree_is_empty(self, driver: DeviceDriver, tmp_path: Path) -> None:
        """A machine without this hardware is an ordinary one: no devices, no error."""
        empty = tmp_path / "empty"
        empty.mkdir()

        assert (
            tuple(
                driver.discover(
                    Tree(HardwareSettings(root=str(empty))), Machine(node=_NODE, numa_nodes=(), cpus=())
                ).devices
            )
            == ()
        )

    def test_observe_speaks_of_its_devices_only_when_it_looks(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Observations carry only the names of the given devices, and a healthy machine has no sick
        device.
        """
        seen = driver.observe(tree, devices[:1])

        assert set(seen) <= {devices[0].name}
        assert [
            observation.reason
            for observation in _all(driver.observe(tree, devices))
            if observation.state is HealthState.UNHEALTHY
        ] == []

    def test_prepare_gives_edits_of_each_device_when_asked(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Each requested device has an entry with at least one edit (CDI refuses a device without),
        and no other device has one.
        """
        edits = _prepared(driver, tree, devices)

        assert {device.name for device in devices} == set(edits) - {""}
        assert [name for name, edit in edits.items() if name and edit.is_empty] == [], "devices without any edit"

    def test_prepare_answers_the_same_when_asked_again(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Prepare is idempotent, also for a driver that was restarted in between."""
        first = _prepared(driver, tree, devices)

        assert _prepared(driver, tree, devices) == first
        assert _prepared(self.make_driver(), tree, devices) == first

    def test_prepare_uses_each_variable_once_when_devices_share_a_container(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """No two devices set one variable, because kubelet and CDI silently keep only one of the
        two.
        """
        edits = _prepared(driver, tree, devices)
        keys = [key for edit in edits.values() for key in edit.env]

        assert sorted(keys) == sorted(set(keys))

    def test_prepare_gives_paths_of_the_host_when_the_tree_is_recorded(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Container paths are absolute and never name the folder of a recorded tree."""
        edits = _prepared(driver, tree, devices)
        paths = [node.path for edit in edits.values() for node in edit.device_nodes]
        paths += [mount.container_path for edit in edits.values() for mount in edit.mounts]

        assert [path for path in paths if not path.startswith("/") or path.startswith(str(tree.root))] == []

    def test_prepare_changes_nothing_when_the_driver_says_that_it_only_reads(
        self, driver: DeviceDriver, doomed: RecordedMachine
    ) -> None:
        """Such devices are prepared before they have an owner: no file is written, and there is
        nothing in the record to undo.
        """
        if not driver.capabilities.only_reads:
            pytest.skip("the driver does not declare that it only reads (only_reads)")
        tree = Tree(HardwareSettings(root=str(doomed.root)))
        devices = [
            device for device in driver.discover(tree, read_machine(tree, _NODE)).devices if driver.only_reads([device])
        ]
        records = {device.name: DeviceRecord() for device in devices}
        kubelet = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="contract", uid="contract-uid")
        before = _writes(doomed.root)

        answer = driver.prepare(tree, devices, PrepareContext(owner=kubelet, records=records))

        assert not isinstance(answer, LongWork), "what changes nothing takes no long work"
        assert [name for name, record in records.items() if record.steps] == [], "devices whose record has a change"
        assert _writes(doomed.root) == before, "prepare has written a file"

    def test_measure_gives_each_number_of_a_device_once_when_the_driver_measures(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Of devices that it found, finite, in one line each at /metrics."""
        if not driver.capabilities.measures:
            pytest.skip("the driver does not measure (measure)")
        seen = driver.measure(tree, devices)

        assert set(seen) <= {device.name for device in devices}
        assert [reading for readings in seen.values() for reading in readings if not is_exported(reading)] == []
        pairs = [(name, reading.quantity, reading.part) for name, readings in seen.items() for reading in readings]
        assert sorted(pairs) == sorted(set(pairs))

    def test_unprepare_is_fine_when_repeated_or_never_prepared(
        self, driver: DeviceDriver, tree: Tree, devices: tuple[Device, ...]
    ) -> None:
        """Undoing twice, or what was never done, is no error."""
        driver.unprepare(tree, devices, _context(devices))
        _prepared(driver, tree, devices)
        driver.unprepare(tree, devices, _context(devices))
        driver.unprepare(tree, devices, _context(devices))

        assert _prepared(driver, tree, devices), "prepare works again after unprepare"

    def test_driver_copes_when_a_device_vanishes(self, driver: DeviceDriver, doomed: RecordedMachine) -> None:
        """When a device is gone, observe and unprepare report it without failing, prepare refuses,
        and discover (also with an older machine) continues.
        """
        tree = Tree(HardwareSettings(root=str(doomed.root)))
        machine = read_machine(tree, _NODE)
        devices = driver.discover(tree, machine).devices
        gone = _sorted(devices)[0]
        driver.observe(tree, devices)
        self.vanish(doomed, gone)

        driver.discover(tree, machine)
        seen = driver.observe(tree, devices)
        driver.unprepare(tree, [gone], _context([gone]))

        assert any(observation.state is HealthState.UNHEALTHY for observation in seen.get(gone.name, ())), (
            "observe does not report that the device is gone"
        )
        assert _refuses(driver, tree, gone), "prepare must refuse a device that is gone"

    @pytest.mark.parametrize("harm", ["unreadable", "garbage", "empty"])
    def test_driver_raises_nothing_but_hardware_errors_when_a_file_is_bad(
        self, harm: str, driver: DeviceDriver, recorded: RecordedMachine, tree: Tree, machine: Machine
    ) -> None:
        """For each kind of file that the driver reads: when it cannot be read or holds nonsense,
        the answer is devices, observations or HardwareError.
        """
        with _opened_files() as opened:
            _use_all(driver, tree, machine)
        # One file of each name is enough for all of that name: the same code reads the files of a
        # card's neighbours.
        kinds = {
            Path(path).name: Path(path)
            for path in reversed(opened)
            if path.startswith(f"{recorded.root}/") and Path(path).is_file()
        }
        failures: dict[str, str] = {}
        for name, path in sorted(kinds.items()):
            content = path.read_bytes()
            _harm(path, harm)
            try:
                _use_all(self.make_driver(), tree, machine)
            except HardwareError:
                pass
            except Exception as err:  # noqa: BLE001 - boundary: any error of a driver under test is the finding
                failures[name] = repr(err)
            finally:
                path.unlink()
                path.write_bytes(content)

        assert failures == {}, "files whose harm made the driver fail with something else than HardwareError"


def files_below(root: Path) -> Iterator[os.DirEntry[str]]:
    """Give all files and links of a tree, in any order.

    Cost: a recorded machine has ten thousand files, and a suite looks at all of them hundreds of
    times, so each folder is listed once and no file is asked what it is.
    """
    folders = [str(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry


def _context(devices: Sequence[Device]) -> PrepareContext:
    """Return a service's context for these devices: a record of each."""
    return PrepareContext(owner=_OWNER, records={device.name: DeviceRecord() for device in devices})


def _use_all(driver: DeviceDriver, tree: Tree, machine: Machine) -> None:
    """Call every method once, as the service does."""
    devices = driver.discover(tree, machine).devices
    driver.observe(tree, devices)
    driver.prepare(tree, devices, _context(devices))
    driver.unprepare(tree, devices, _context(devices))


def _writes(root: Path) -> dict[str, tuple[int, int]]:
    """Return for each file its length and the time of its last write."""
    looked = ((entry.path, entry.stat(follow_symlinks=False)) for entry in files_below(root))
    return {path: (status.st_mtime_ns, status.st_size) for path, status in looked}


def _prepared(driver: DeviceDriver, tree: Tree, devices: Sequence[Device]) -> Mapping[str, ContainerEdits]:
    answer = driver.prepare(tree, devices, _context(devices))
    if isinstance(answer, LongWork):
        answer = answer.work()
    assert not isinstance(answer, Refusal), f"prepare refuses healthy devices: {answer}"
    return answer


def _refuses(driver: DeviceDriver, tree: Tree, device: Device) -> bool:
    try:
        return isinstance(driver.prepare(tree, [device], _context([device])), Refusal)
    except HardwareError:
        return True


def _misnamed(driver: DeviceDriver, names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(f"{driver.device_class}-") or "--" in name]


def _sorted(devices: Sequence[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: device.name)


def _all(seen: Mapping[str, Sequence[Observation]]) -> list[Observation]:
    return [observation for observations in seen.values() for observation in observations]


def _harm(path: Path, harm: str) -> None:
    if harm == "unreadable":
        # A link to itself cannot be followed, not even by root, whom file permissions do not stop.
        path.unlink()
        path.symlink_to(path.name)
    else:
        path.write_bytes(b"\xff\xfe not what you want \x00\n" if harm == "garbage" else b"")


_watchers: list[list[str]] = []
_hooks: list[bool] = []


@contextmanager
def _opened_files() -> Iterator[list[str]]:
    """Collect every path that Python opens or lists meanwhile."""
    if not _hooks:
        # An audit hook cannot be removed: the process has one, which does nothing without watchers.
        sys.addaudithook(_audit)
        _hooks.append(True)
    opened: list[str] = []
    _watchers.append(opened)
    try:
        yield opened
    finally:
        _watchers.remove(opened)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watchers and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | Path):
        for watcher in _watchers:
            watcher.append(str(arguments[0]))
