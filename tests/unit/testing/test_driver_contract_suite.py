"""The contract suite finds the drivers that break it: a suite that passes everything protects
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.drivers.driver_contract import DriverContract
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal

_PROFILE = Path(__file__).parent.parent.parent / "data" / "profiles" / "h100-pair.toml"


class _CountingNames(NvidiaDriver):
    """Names devices by the order of discovery."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        devices = sorted(
            super().discover(tree, machine).devices,
            key=lambda device: machine.pci_devices.index(_function(machine, device)),
        )
        return Discovery(
            devices=[msgspec.structs.replace(device, name=f"gpu-{number}") for number, device in enumerate(devices)]
        )


class _AssumesANode(NvidiaDriver):
    """Says NUMA node 1 for all."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        devices = super().discover(tree, machine).devices
        return Discovery(devices=[msgspec.structs.replace(device, numa_nodes=NodeSet(1)) for device in devices])


class _ReadsOutside(NvidiaDriver):
    """Reads this machine's own files."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        Path("/proc/self/status").read_text(encoding="utf-8")
        return super().discover(tree, machine)


class _TrustsFiles(NvidiaDriver):
    """Fails with ValueError when a file holds nonsense."""

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        for device in devices:
            int(tree.read(f"sys/bus/pci/devices/{device.pci}/max_link_width") or 0)
        return super().observe(tree, devices)


class _ForgetsOne(NvidiaDriver):
    """Prepares all but the first."""

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        return super().prepare(tree, list(devices)[1:], context)


class _SharesVariable(NvidiaDriver):
    """Sets one variable for each device."""

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        return {device.name: ContainerEdits(env={"MY_GPU": device.name}) for device in devices}


class _GivesRecordedPaths(NvidiaDriver):
    """Gives paths of the recorded tree to containers."""

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        return {
            device.name: ContainerEdits(device_nodes=(DeviceNode(path=str(tree.path(f"dev/{device.name}"))),))
            for device in devices
        }


class _SeesNothing(NvidiaDriver):
    """Never sees that a device is gone."""

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        return {}


class _AlwaysSick(NvidiaDriver):
    """Calls healthy devices sick."""

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        sick = Observation(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="mood")
        return {device.name: [sick] for device in devices}


class _UnprepareMinds(NvidiaDriver):
    """Minds undoing what was never prepared."""

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        raise HardwareError("never prepared")


def _function(machine: Machine, device: Device) -> object:
    return next(pci_device for pci_device in machine.pci_devices if pci_device.address == device.pci)


class _Suite(DriverContract):
    """The suite, its tests called one by one with what their fixtures would give."""

    def __init__(self, driver: type[NvidiaDriver], folder: Path) -> None:
        self._driver = driver
        self.machine_on_disk = build(_PROFILE, folder)
        self.hardware = Tree(HardwareSettings(root=str(self.machine_on_disk.root)))
        self.as_read = read_machine(self.hardware, "contract-node")
        self.made = driver()
        self.found = tuple(self.made.discover(self.hardware, self.as_read).devices)

    def make_driver(self) -> DeviceDriver:
        return self._driver()

    def record(self, into: Path) -> RecordedMachine:
        return build(_PROFILE, into)


_CASES: list[tuple[type[NvidiaDriver], Callable[[_Suite], None]]] = [
    (
        _CountingNames,
        lambda s: s.test_discover_answers_the_same_when_the_machine_lists_its_parts_otherwise(
            s.made, s.hardware, s.as_read, s.found
        ),
    ),
    (_CountingNames, lambda s: s.test_discover_keeps_names_when_another_device_vanishes(s.made, s.machine_on_disk)),
    (
        _AssumesANode,
        lambda s: s.test_discover_places_devices_as_the_machine_does_when_they_have_a_place(s.as_read, s.found),
    ),
    (_ReadsOutside, lambda s: s.test_driver_reads_inside_the_tree_when_it_looks(s.made, s.hardware, s.as_read)),
    (
        _TrustsFiles,
        lambda s: s.test_driver_raises_nothing_but_hardware_errors_when_a_file_is_bad(
            "garbage", s.made, s.machine_on_disk, s.hardware, s.as_read
        ),
    ),
    (_ForgetsOne, lambda s: s.test_prepare_gives_edits_of_each_device_when_asked(s.made, s.hardware, s.found)),
    (
        _SharesVariable,
        lambda s: s.test_prepare_uses_each_variable_once_when_devices_share_a_container(s.made, s.hardware, s.found),
    ),
    (
        _GivesRecordedPaths,
        lambda s: s.test_prepare_gives_paths_of_the_host_when_the_tree_is_recorded(s.made, s.hardware, s.found),
    ),
    (_SeesNothing, lambda s: s.test_driver_copes_when_a_device_vanishes(s.made, s.machine_on_disk)),
    (_SharesVariable, lambda s: s.test_driver_copes_when_a_device_vanishes(s.made, s.machine_on_disk)),
    (_AlwaysSick, lambda s: s.test_observe_speaks_of_its_devices_only_when_it_looks(s.made, s.hardware, s.found)),
]


@pytest.mark.parametrize(
    ("driver", "test"),
    _CASES,
    ids=[f"{nvidia_driver_type.__name__.strip('_')}-{number}" for number, (nvidia_driver_type, _) in enumerate(_CASES)],
)
def test_suite_fails_when_a_driver_breaks_the_contract(
    driver: type[NvidiaDriver], test: Callable[[_Suite], None], tmp_path: Path
) -> None:
    """Each broken driver fails the test that stands for the broken promise."""
    suite = _Suite(driver, tmp_path / "machine")

    with pytest.raises(AssertionError):
        test(suite)


def test_suite_fails_when_unprepare_minds(tmp_path: Path) -> None:
    """A driver that raises when it undoes what was never done fails the suite."""
    suite = _Suite(_UnprepareMinds, tmp_path / "machine")

    with pytest.raises(HardwareError):
        suite.test_unprepare_is_fine_when_repeated_or_never_prepared(suite.made, suite.hardware, suite.found)
