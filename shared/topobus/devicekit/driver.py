"""What a vendor writes: one class, found by entry point, run by the class's device service.

Three methods every driver has: `discover`, `observe` and `prepare`. All others are optional. Those
that make a `Capabilities` are called only where a driver defines them. The rest do nothing by
default.

The host calls every method in a worker thread with a time limit, one driver at a time. An exception
or a hang makes that driver's devices Unknown and leaves all others alone. A driver reads hardware
only through the `Tree` it is given, never by an absolute path. Every method may block, may raise
HardwareError, must answer the same for the same tree, and must be idempotent: after a crash the
host asks again. A driver records its changes in the record that it is given, the intent before the
act, so that the next start can undo what is half done (`device_record`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.devicekit.partitioning.on_demand_functions import OnDemandFunctions
from topobus.devicekit.prepare_context import LongWork, PrepareContext
from topobus.devicekit.settings import CpuGroupSettings, PartitionSettings
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device, KeptFunction
from topobus.values.edits import ContainerEdits
from topobus.values.health import Observation
from topobus.values.hint import Hint
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.readings import Reading
from topobus.values.sandbox import AttachedInterface, ContainerName, Sandbox

__all__ = [
    "Capabilities",
    "DeviceDriver",
    "DeviceRecord",
    "Discovery",
    "HostServices",
    "LongWork",
    "PrepareContext",
    "missing_verbs",
]

# By capability: the methods that make it.
_VERBS = {
    "checks": ("check",),
    "only_reads": ("only_reads",),
    "attaches": ("to_attach", "attach", "detach"),
    "adjusts": ("adjust",),
    "cleans": ("clean",),
    "resets": ("reset",),
    "burns_in": ("burn_in",),
    "measures": ("measure",),
    "hints": ("hints",),
}


class HostServices(Struct, frozen=True, kw_only=True):
    """What a device service gives each of its drivers, once, before the first `discover`."""

    partitions: PartitionSettings = PartitionSettings()
    """What the operator wants of cards whose parts are devices of their own."""
    cpus: CpuGroupSettings = CpuGroupSettings()
    """How CPUs are offered: singly or in groups."""
    recorded: Callable[[str], Sequence[Step]] = lambda _device: ()
    """By a device's name: the steps that the journal has of `prepare` for its owners. It
    distinguishes what this driver has made for them from what others have made."""

    @property
    def offers_parents(self) -> bool:
        """Whether a card that is cut is offered beside its parts.

        Then `discover` lists it with the role `partition-parent`, and its parts name it in
        `partition_of`, so that they are never held beside it.
        """
        return self.partitions.parents == "counted"

    @property
    def cuts_on_demand(self) -> bool:
        """Whether a card that this driver can cut is offered as a whole and in parts.

        Then `discover` lists it and the parts of each way to cut it, with counters by which never
        two of these ways are held at once, and `prepare` cuts.
        """
        return self.partitions.on_demand


class Capabilities(Struct, frozen=True, kw_only=True):
    """Which optional verbs a driver has."""

    checks: bool = False
    """It reads configuration: `check`."""
    only_reads: bool = False
    """It can report whether `prepare` only looks: `only_reads`."""
    attaches: bool = False
    """Its devices move into a pod's sandbox: `to_attach`, `attach` and `detach`."""
    adjusts: bool = False
    """Its containers differ from one another: `adjust`."""
    cleans: bool = False
    """It cleans a device between two owners: `clean`."""
    resets: bool = False
    """It resets devices in a way of its own: `reset`."""
    burns_in: bool = False
    """It tests devices: `burn_in`."""
    measures: bool = False
    """It reads what people graph: `measure`."""
    hints: bool = False
    """It has an opinion of its own on NUMA hints: `hints`."""


class Discovery(Struct, frozen=True, kw_only=True):
    """The result of one look for devices."""

    devices: Sequence[Device] = ()
    """Names begin with the class and `-`, have no `--`, and must be stable over reboots; none is an
    ordinary answer."""
    counter_sets: Sequence[CounterSet] = ()
    """What the `consumes` of these devices refers to: the counters of cards that are used whole or
    in parts. A name begins with the class and `-`, has no `--` and is unique in the class, so it
    names the hardware: `gpu-0000-18-00-0`."""
    warnings: Sequence[str] = ()
    """Sentences for people: what was left out and why, what had to be done without."""
    kept: Sequence[KeptFunction] = ()
    """Functions that are not offered, since they are for something else."""
    uncut: frozenset[str] = frozenset()
    """Cards that a rule of `partitions.virtual_functions` names and that cannot be cut now."""


class DeviceDriver(ABC):
    """One vendor's (or one kind of hardware's) driver."""

    name: str
    """Unique among drivers: `nvidia`. A DNS label."""
    device_class: str
    """The class whose devices it finds: `gpu`."""
    host: HostServices = HostServices()
    """What the service gave to `configure`."""
    sharing_strategies: frozenset[str] = frozenset()
    """How containers of one claim may share its devices, besides
    Exclusive: `TimeSlicing`, `MPS`."""
    passthrough_variables: Mapping[str, str] = MappingProxyType({})
    """What a virtual machine's container gets beside VFIO's nodes."""

    @abstractmethod
    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Find this driver's devices."""

    @abstractmethod
    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at the health of devices found before.

        Return the observations of each device. A device without any (absent or empty) has no fault.
        """

    @abstractmethod
    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Make devices ready, and return an entry for each device.

        The key "" holds edits common to all of them in one container.
        """

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:  # noqa: B027 - optional
        """Undo `prepare`. A device that was never prepared is no error.

        By default nothing, for a driver whose `prepare` changes nothing.
        """

    @property
    def on_demand_functions(self) -> OnDemandFunctions | None:
        """How it makes virtual functions when a claim gets one of them. None when it makes none."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """Its optional verbs: those that its class defines.

        A driver overrides this where an operator's settings switch one of them off.
        """
        return _capabilities_of(type(self))

    def configure(self, host: HostServices) -> None:
        """Take the service's values. Called once, before everything else."""
        self.host = host
        if self.on_demand_functions is not None:
            self.on_demand_functions.rules = host.partitions.virtual_functions

    def remember(self, devices: Sequence[Device]) -> None:  # noqa: B027 - optional
        """Learn from its devices in the inventory of the earlier run, where names depend on what
        was seen before.

        Called once, before the first `discover`, and not at all where there was none.
        """

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse bad configuration, naming the field, before anything is changed. None when it is
        good.

        Called before `prepare`.

        Errors: NotImplementedError in a driver that does not define it.
        """
        raise NotImplementedError

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return whether `prepare` of these devices changes nothing, on the machine or in this
        process.

        It is called for owners by the device plugin API, whose devices have no configuration. Where
        it is true, `prepare` is called while the ledger is written, and its answer is thrown away
        where the ledger refuses. It must decide from its arguments and the driver's state, and
        return quickly.
        """
        return False

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        """Name the devices that need the sandbox.

        It must decide from its arguments alone, so that it returns the same each time.
        """
        raise NotImplementedError

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        """Put a prepared device into a sandbox. None when it is done and the device is no
        interface.

        What was done before a refusal is undone by `detach`.
        """
        raise NotImplementedError

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Undo all steps of the record, in reverse order, and mark each step `undone`.

        Shapes: sandbox — None after a crash, or when the sandbox is gone; its namespaces may be
        gone also when it is given.
        Errors: a driver that raises is called again; the device stays out of use until the record
        is empty.
        """
        raise NotImplementedError

    def adjust(
        self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName
    ) -> ContainerEdits | Refusal:
        """Return what one container gets beyond the edits of `prepare`: variables, bind mounts and
        annotations.

        Called when the container is made, for claims alone. It changes nothing outside: there is no
        record, and its answer lasts as long as the container. The runtime waits about a second.
        """
        raise NotImplementedError

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Clean a device after its last owner and before the next one. None when it is clean.

        A refusal keeps the device Unhealthy (`dirty`), and its facts become the evidence. The call
        is repeated later.
        """
        raise NotImplementedError

    def reset(self, tree: Tree, device: Device) -> Refusal | None:
        """Reset a device that has no holder, when an operator asks for it. None when it is done.

        Without this method the kernel resets the PCI function, where it can.
        """
        raise NotImplementedError

    def burn_in(self, tree: Tree, device: Device) -> Refusal | None:
        """Test a device that is withheld and has no holder, when an operator asks for it. None when
        it passes.

        It may take `burn_in.timeout_s`, and leaves the device as it was.
        """
        raise NotImplementedError

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read what the devices count and measure: use, memory, power, temperature, bytes, errors.

        Called after a look at their health, each 10 s. What a device does not tell is left out. A
        failure costs the readings and changes no device's health.
        """
        raise NotImplementedError

    def hints(
        self, machine: Machine, devices: Sequence[Device], count: int, available: Sequence[str]
    ) -> tuple[Hint, ...] | None:
        """Return hints for `count` of `available`.

        None is "no opinion", an empty tuple "cannot be satisfied".
        """
        raise NotImplementedError

    def own_nodes(self, tree: Tree, device: Device) -> Sequence[str]:
        """Name the nodes of a device, relative to dev, that its folder in sysfs does not show.

        Called before it goes to VFIO.
        """
        return ()

    def let_go(self, tree: Tree, device: Device) -> None:  # noqa: B027 - optional
        """Close all files of this process on a device that goes to VFIO, and do not use it until
        `take_back`.
        """

    def take_back(self, tree: Tree, device: Device) -> None:  # noqa: B027 - optional
        """Use a device again that is back with its kernel driver, or never left it."""


def missing_verbs(driver: type[DeviceDriver]) -> tuple[str, ...]:
    """Name the methods that a driver lacks, although it has another one that is useless without
    them.
    """
    defined = {capability: [verb for verb in verbs if _defines(driver, verb)] for capability, verbs in _VERBS.items()}
    return tuple(
        verb
        for capability, verbs in _VERBS.items()
        for verb in verbs
        if defined[capability] and verb not in defined[capability]
    )


@cache
def _capabilities_of(driver: type[DeviceDriver]) -> Capabilities:
    return Capabilities(
        **{capability: all(_defines(driver, verb) for verb in verbs) for capability, verbs in _VERBS.items()}
    )


def _defines(driver: type[DeviceDriver], verb: str) -> bool:
    return getattr(driver, verb) is not getattr(DeviceDriver, verb)
