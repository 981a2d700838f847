"""What a vendor writes: one class with four blocking methods, found by entry point, run by the class's device service. What it may do besides: `hands`.

The host process calls every method in a worker thread with a time limit, one driver at a time; an exception or a hang makes that driver's
devices Unknown and leaves all others alone. A driver reads hardware only through the `Tree` it is given, never by an absolute path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, RecordState, Step
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device, KeptFunction
from topobus.values.edits import ContainerEdits
from topobus.values.health import Observation
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.request import Owner

__all__ = [
    "CountingDriver",
    "CuttingDriver",
    "DeviceDriver",
    "HintingDriver",
    "KeepingDriver",
    "LongWork",
    "ParentingDriver",
    "PrepareContext",
    "RecallingDriver",
    "RememberingDriver",
]


class PrepareContext(Struct, frozen=True, kw_only=True):
    """Who wants the devices and with what opaque configuration (class configs before claim configs)."""

    owner: Owner
    config: tuple[dict[str, Any], ...] = ()
    """For all devices, unless `device_config` has another word for one."""
    device_config: dict[str, tuple[dict[str, Any], ...]] = {}
    """By device, where a claim configures single requests; a device that is not named here has `config`."""
    records: Mapping[str, DeviceRecord] = MappingProxyType({})
    """By device: where `prepare` writes down what it changes, for `unprepare` to undo, also after a crash. A driver that changes nothing leaves it alone."""

    attached: frozenset[str] = frozenset()
    """Those of the devices that this owner has in a sandbox already: kubelet asks again for pods that run, and what left the host then is not gone."""
    free: frozenset[str] = frozenset()
    """Those of the devices that nobody had when this owner came, as far as the journal knows: what is there now was there before."""
    looked_at: frozenset[str] = frozenset()
    """Those of the devices that this owner only looks at (admin access): somebody else may have them, through any door."""
    cpus: Mapping[str, CpuSet] = MappingProxyType({})
    """Which CPUs the owner has of devices that are groups of CPUs; class `cpu` alone has some."""
    shares: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    """How much the owner has of devices that it shares: device to capacity to amount. Of what it has whole, and in `unprepare`, nothing is said."""
    others: Mapping[str, tuple[RecordState, ...]] = MappingProxyType({})
    """By device: what the journal says of each other owner that has it now; none for the last one."""
    in_use: Callable[[], frozenset[str]] = frozenset
    """Which devices of the class the journal knows as somebody's at the moment of the call, those that are still to be cleaned included; not the devices of this
    request, as far as they are this owner's alone. Who cuts a card otherwise asks it with a lock of the card's, after it has written its own intent."""

    def config_of(self, device: str) -> tuple[dict[str, Any], ...]:
        """Give one device's configuration."""
        return self.device_config.get(device, self.config)


class LongWork(Struct, frozen=True, kw_only=True):
    """`prepare` may answer this instead of edits: what takes longer than a call may."""

    limit_s: float
    """Seconds after which it is refused, however far it is."""
    what: str
    """For people: `programming the region of fpga-0`."""
    work: Callable[[], Mapping[str, ContainerEdits] | Refusal]
    """Runs in a thread of its own, beside the driver's other methods, and answers as `prepare` does. It writes into `context.records`."""


@runtime_checkable
class DeviceDriver(Protocol):
    """One vendor's (or one kind of hardware's) driver.

    Every method may block, may raise HardwareError, and must answer the same for the same tree.
    """

    name: str
    """Unique among drivers: `nvidia`. A DNS label."""
    device_class: str
    """The class whose devices it finds: `gpu`."""

    def discover(self, tree: Tree, machine: Machine) -> Sequence[Device]:
        """Find this driver's devices. Names must be stable over reboots; an empty answer is an ordinary one."""
        ...

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at the health of devices found before; device name to what is wrong with it (absent or empty: nothing)."""
        ...

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Make devices ready; idempotent. One entry a device; the key "" holds edits common to all of them in one container."""
        ...

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo `prepare`; idempotent, and no error for a device that was never prepared."""
        ...


@runtime_checkable
class HintingDriver(DeviceDriver, Protocol):
    """A driver with an opinion of its own on NUMA hints; the service's inventory then says `has_custom_hints`."""

    def hints(self, machine: Machine, devices: Sequence[Device], count: int, available: Sequence[str]) -> tuple[Hint, ...] | None:
        """Give hints for `count` of `available`; None is "no opinion", an empty tuple "cannot be satisfied"."""
        ...


@runtime_checkable
class CountingDriver(DeviceDriver, Protocol):
    """A driver whose devices take from common counters: the partitions of a card, and the card as a whole."""

    def counter_sets(self, devices: Sequence[Device]) -> Sequence[CounterSet]:
        """Give what the `consumes` of these devices refers to; called after each `discover`, with its answer.

        A name must be unique in the class, so it says which hardware is meant: `gpu-0000-18-00-0`.
        """
        ...


@runtime_checkable
class KeepingDriver(Protocol):
    """A driver that tells which functions it does not offer, since they are for something else."""

    kept: Sequence[KeptFunction]
    """Read after each `discover`."""


@runtime_checkable
class ParentingDriver(DeviceDriver, Protocol):
    """A driver that can offer a card beside the parts that it is cut into."""

    offers_parents: bool
    """Set by the service before the first `discover`, from `partitions.parents`. True: `discover` lists such a card, too, with the role `partition-parent`, and its parts name it
    in `partition_of`, so that they are never held beside it. False, as a new driver has it: the parts alone."""


@runtime_checkable
class CuttingDriver(DeviceDriver, Protocol):
    """A driver that can cut an idle card into parts when somebody gets one of them."""

    cuts_on_demand: bool
    """Set by the service before the first `discover`, from `partitions.on_demand`. True: `discover` lists such a card as a whole and as the parts of each way in which it can be
    cut, with counters by which never two of these ways are held at once, and `prepare` cuts. False, as a new driver has it: cards are listed as they are."""


@runtime_checkable
class RememberingDriver(DeviceDriver, Protocol):
    """A driver whose names depend on what it has seen before: which parts a card had, when one of them is missing now."""

    def remember(self, devices: Sequence[Device]) -> None:
        """Learn from its devices in the inventory of the earlier run; called once, before the first `discover`, and not at all where there was none."""
        ...


@runtime_checkable
class RecallingDriver(DeviceDriver, Protocol):
    """A driver whose hardware shows what was made for owners, and does not show for whom."""

    recorded: Callable[[str], Sequence[Step]]
    """Set by the service before the first `discover`: the steps that the journal has of `prepare` for a device's owners, so that `discover` tells what it has made itself
    from what somebody else has. A new driver has one that gives none."""
