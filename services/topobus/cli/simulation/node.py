"""A simulated node without services: reads its machine, finds its devices with the same drivers,
and keeps its ledger in memory.

The machine is a hardware tree (a folder, an archive of one, a profile) or a snapshot of one as
JSON. Each pod gets the decision that the services would make. It writes nothing and sends no
request.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct, structs

from topobus.cli.exits import InputError
from topobus.cli.objects.input_files import SNAPSHOT_BYTES, read_bytes
from topobus.devicekit.driver import DeviceDriver, HostServices
from topobus.devicekit.host.host import hinting_driver
from topobus.devicekit.registry import load_drivers
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.alignment.planning.claims_only import shortages
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.alignment.planning.placement import place
from topobus.engine.health.health_machine import HealthSettings
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.engine.ledger import transitions
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import DecisionEvent
from topobus.simulation.machines import PROFILES, MemoryTree, content_of
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import HardwareError, InvariantError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Adoption, Ledger
from topobus.values.machine import Machine
from topobus.values.outcome import Placement, Refusal
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, PodRequest
from topobus.values.timestamps import rfc3339
from topobus.values.vendor_profiles import VendorProfile, pools_of_profiles, renamed
from topobus.values.view import AlignmentOptions, NodeAlignment, NodeView

__all__ = ["Simulation", "Snapshot", "open_machine"]

# A simulation has no time of its own, so the same pods give exactly the same decisions.
_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
# What `record` copies of a large machine is some 20 MiB in 50,000 files. An archive that holds ten
# times that is something else.
_ARCHIVE_BYTES = 256 << 20
_ARCHIVE_MEMBERS = 500_000
_CLASSES = ("gpu", "nic", "fpga", "cpu")


class Snapshot(Struct, frozen=True, kw_only=True):
    """A machine and its devices: enough to plan on it anywhere."""

    machine: Machine
    inventories: tuple[Inventory, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Node:
    snapshot: Snapshot
    hinting: Mapping[str, DeviceDriver] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@contextmanager
def open_machine(what: str, cpus: CpuGroupSettings = CpuGroupSettings()) -> Iterator[_Node]:  # noqa: B008 - frozen
    """Read a machine by profile name, folder, archive (tar) or JSON file (a snapshot, or a Machine
    alone, whose only devices are then its CPUs).

    Shapes: cpus — how its CPUs are offered. A snapshot has them as they were when it was saved.
    Errors: raises InputError for what is none of these and for a file that cannot be read,
    ContractError for JSON that is no machine, HardwareError for a tree that cannot be read as a
    machine.
    """
    path = Path(what)
    if path.is_dir():
        yield _read_tree(path, path, cpus)
    elif path.is_file() and tarfile.is_tarfile(path):
        with tempfile.TemporaryDirectory(prefix="topobus-simulate-") as folder:
            yield _read_tree(_unpack(path, Path(folder)), path, cpus)
    elif path.is_file():
        with tempfile.TemporaryDirectory(prefix="topobus-simulate-") as folder:
            yield _read_file(path, Path(folder), cpus)
    elif what in PROFILES:
        # In memory: a profile's tree has thousands of files.
        tree = MemoryTree(content_of(what))
        yield _find_devices(tree, read_machine(tree, what.split(".")[0].lower()), cpus)
    else:
        raise InputError(
            f"{what} is no folder, no file and no profile",
            next_step="give a folder with sys and proc (/ is this machine), an archive of one, a JSON file, or one of "
            f"{', '.join(sorted(PROFILES))}",
        )


class Simulation:
    """Places pods one after the other on one node."""

    def __init__(
        self,
        node: _Node,
        options: AlignmentOptions,
        reserved_cpus: CpuSet,
        profiles: Collection[VendorProfile] = (),
        *,
        reserved_memory: Mapping[int, int] | None = None,
        own_shapes: tuple[OwnShape, ...] = (),
    ) -> None:
        self.machine = node.snapshot.machine
        self._names: dict[str, str] = {}
        inventories: list[Inventory] = []
        for inventory in node.snapshot.inventories:
            devices, names = pools_of_profiles(inventory.devices, profiles)
            inventories.append(structs.replace(inventory, devices=devices))
            self._names |= names
        self.inventories = tuple(inventories)
        self.ledger = Ledger(node=self.machine.node)
        self.decisions: list[DecisionEvent] = []
        self._options = options
        self._reserved = reserved_cpus
        self._reserved_memory = dict(reserved_memory or {})
        self._own_shapes = own_shapes
        self._hinting = node.hinting

    def place(self, pod: PodRequest) -> Placement | Refusal:
        """Plan one pod and hold what it gets."""
        pod = self.named(pod)
        number = len(self.decisions) + 1
        view = self._view(custom_hints=self._custom_hints(pod))
        outcome = place(view, pod)
        op_id, decision_id = f"simulate-{number}", f"simulated-{number}"
        if isinstance(outcome, Placement):
            step = transitions.reserve(
                self.ledger, op_id=op_id, request=pod, placement=outcome, decision_id=decision_id
            )
        else:
            step = transitions.record_refusal(
                self.ledger, op_id=op_id, verb="place", owner=pod.owner, decision_id=decision_id, refusal=outcome
            )
        self.ledger = step.ledger
        self.decisions.append(
            DecisionEvent(
                id=decision_id,
                verb="place",
                node=self.machine.node,
                op_id=op_id,
                time=rfc3339(_MOMENT),
                owner=pod.owner,
                request=pod,
                view=view,
                outcome=outcome,
                ledger_sequence=self.ledger.sequence,
            )
        )
        return outcome

    def named(self, pod: PodRequest) -> PodRequest:
        """Replace the vendors' resource names in a pod's request by ours."""
        return renamed(pod, self._names)

    def _view(self, custom_hints: Mapping[str, tuple[tuple[NodeSet | None, bool], ...]] | None = None) -> NodeView:
        return node_view(
            self.machine,
            {inventory.device_class: inventory for inventory in self.inventories},
            self.ledger,
            self._options,
            self._reserved,
            custom_hints=custom_hints,
            reserved_memory=self._reserved_memory,
        )

    @property
    def alignment(self) -> NodeAlignment:
        """How the node aligns, as it would publish it."""
        return NodeAlignment(
            node=self.machine.node,
            options=self._options,
            reserved_cpus=self._reserved,
            reserved_memory={str(numa_node): size for numa_node, size in sorted(self._reserved_memory.items())},
            own_shapes=self._own_shapes,
        )

    def hold(self, owner: Owner, devices: Mapping[str, tuple[str, ...]], shared: Mapping[str, tuple[str, ...]]) -> None:
        """Hold what a claim was allocated.

        Errors: raises InvariantError when the ledger refuses it.
        """
        number = f"simulate-{owner.key}"
        short = shortages(self._view(), devices)
        step = (
            Refusal(reasons=tuple(short))
            if short
            else transitions.adopt(
                self.ledger,
                Adoption(owner=owner, devices=dict(devices), shared=dict(shared)),
                op_id=number,
                decision_id=number,
            )
        )
        if isinstance(step, Refusal):
            raise InvariantError(f"{owner} was allocated devices that are held: {step.reasons[0].message}")
        self.ledger = step.ledger

    def refuse(self, pod: PodRequest, refusal: Refusal) -> None:
        """Record that a pod found no place for its claims."""
        number = len(self.decisions) + 1
        self.decisions.append(
            DecisionEvent(
                id=f"simulated-{number}",
                verb="schedule",
                node=self.machine.node,
                op_id=f"simulate-{number}",
                time=rfc3339(_MOMENT),
                owner=pod.owner,
                outcome=refusal,
                ledger_sequence=self.ledger.sequence,
            )
        )

    def undo(self, ledger: Ledger) -> None:
        """Return to an earlier ledger. What was held since has no effect."""
        self.ledger = ledger

    def _custom_hints(self, pod: PodRequest) -> dict[str, tuple[tuple[NodeSet | None, bool], ...]]:
        """Ask drivers that have hints of their own, as their service would."""
        asked: dict[str, tuple[tuple[NodeSet | None, bool], ...]] = {}
        held = {
            (device_class, name)
            for allocation in self.ledger.allocations.values()
            for holding in allocation.holdings
            for device_class, names in holding.devices.items()
            for name in names
        }
        for inventory in self.inventories:
            driver = self._hinting.get(inventory.device_class)
            counts = {
                device.count
                for want in pod.containers
                for device in want.devices
                if device.device_class == inventory.device_class and not device.names and device.count > 0
            }
            for count in sorted(counts) if driver is not None else ():
                free = [
                    device.name
                    for device in inventory.devices
                    if device.is_allocatable and (inventory.device_class, device.name) not in held
                ]
                hints = driver.hints(self.machine, inventory.devices, count, free) if driver is not None else None
                asked[f"{inventory.device_class}/{count}"] = (
                    ((None, True),) if hints is None else tuple((hint.nodes, hint.preferred) for hint in hints)
                )
        return asked


def _read_tree(root: Path, named: Path, cpus: CpuGroupSettings) -> _Node:
    if not (root / "sys").is_dir():
        raise InputError(
            f"{named} has no folder sys in it",
            next_step="give the folder that holds sys and proc, such as / for this machine",
        )
    tree = Tree(HardwareSettings(root=str(root)))
    name = (named.absolute().name or "localhost").split(".")[0].lower()
    return _find_devices(tree, read_machine(tree, name), cpus)


def _find_devices(tree: Tree, machine: Machine, cpus: CpuGroupSettings) -> _Node:
    """Let every driver look once for its devices and their health."""
    inventories: list[Inventory] = []
    hinting: dict[str, DeviceDriver] = {}
    warnings: list[str] = []
    for device_class in _CLASSES:
        registry = load_drivers(device_class)
        warnings += [
            f"{device_class}: plugin {skipped_plugin.name} is left out: {skipped_plugin.why}"
            for skipped_plugin in registry.skipped
        ]
        for driver in registry.drivers:
            driver.configure(HostServices(cpus=cpus))
        views = {driver.name: _read_driver(driver, tree, machine, warnings) for driver in registry.drivers}
        merged = advance_inventory(
            MergedInventory(),
            views,
            device_class=device_class,
            machine=machine,
            held=frozenset(),
            now=_MOMENT,
            settings=HealthSettings(),
        )
        own = hinting_driver(registry.drivers, merged.devices)
        if own is not None:
            hinting[device_class] = own
        inventories.append(
            Inventory(
                node=machine.node,
                device_class=device_class,
                generation=1,
                machine_generation=machine.generation,
                devices=merged.devices,
                has_custom_hints=own is not None,
                drivers=tuple(sorted(views)),
                counter_sets=merged.counter_sets,
                kept=merged.kept,
                warnings=merged.warnings,
            )
        )
    return _Node(
        snapshot=Snapshot(machine=machine, inventories=tuple(inventories)), hinting=hinting, warnings=tuple(warnings)
    )


def _read_driver(driver: DeviceDriver, tree: Tree, machine: Machine, warnings: list[str]) -> DriverView:
    try:
        discovery = driver.discover(tree, machine)
        devices = tuple(discovery.devices)
        return DriverView(
            devices=devices,
            counter_sets=tuple(discovery.counter_sets),
            observations=dict(driver.observe(tree, devices)) if devices else {},
            kept=tuple(discovery.kept),
        )
    except HardwareError as err:
        warnings.append(f"driver {driver.name} could not look: {err}")
        return DriverView(devices=())


def _read_file(path: Path, empty: Path, cpus: CpuGroupSettings) -> _Node:
    """Read a snapshot.

    For a Machine alone the drivers see no files, so they find the CPUs and nothing else.
    """
    data = read_bytes(path, limit_bytes=SNAPSHOT_BYTES, next_step="give a file that this user may read")
    try:
        keys = json.loads(data)
    except ValueError:
        keys = None
    if isinstance(keys, dict) and "machine" in keys:
        warning = f"{path} has its CPUs as they were offered when it was saved"
        return _Node(
            snapshot=decode(data, Snapshot, where=str(path)), warnings=(warning,) if cpus != CpuGroupSettings() else ()
        )
    return _find_devices(Tree(HardwareSettings(root=str(empty))), decode(data, Machine, where=str(path)), cpus)


def _unpack(path: Path, into: Path) -> Path:
    """Unpack a recorded tree.

    Its links point anywhere in it, but nothing may be written outside the folder.
    """
    size, members = 0, 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                size, members = size + member.size, members + 1
                if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
                    raise InputError(
                        f"{path}: {member.name} is no file, folder or link",
                        next_step="archive what `topobus record` wrote",
                    )
                if size > _ARCHIVE_BYTES or members > _ARCHIVE_MEMBERS:
                    raise InputError(
                        f"{path}: it unpacks to more than {_ARCHIVE_BYTES >> 20} MiB or {_ARCHIVE_MEMBERS} files",
                        next_step="archive what `topobus record` wrote, and nothing else",
                    )
                archive.extract(member, into, filter="tar")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as err:
        raise InputError(f"{path}: cannot be unpacked: {err}", next_step="archive what `topobus record` wrote") from err
    paths = [each_path for each_path in (into, *sorted(into.iterdir())) if (each_path / "sys").is_dir()]
    return paths[0] if paths else into
