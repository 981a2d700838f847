"""What a driver may do beyond its four methods: attach a device to a pod's sandbox, adjust a container, clean before the next tenant, work long. All optional.

A driver has a method of these, or it has not: the host looks (`isinstance`), and a driver in one file that needs none stays as short as it was. All methods block, run
in the driver's thread with its time limit, and must be idempotent: after a crash the host asks again. What a driver changes it writes into the record that it is given,
the intent before the act, so that the next start can undo what is half done (`device_record`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

from topobus.devicekit.device_record import DeviceRecord, Json, Step
from topobus.devicekit.driver import DeviceDriver, LongWork, PrepareContext
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, ContainerName, Sandbox

__all__ = [
    "AdjustingDriver",
    "AttachingDriver",
    "CheckingDriver",
    "CleaningDriver",
    "DeviceRecord",
    "Json",
    "LongWork",
    "ReadingDriver",
    "ResettingDriver",
    "Step",
    "SwitchedDriver",
    "is_adjusting",
    "is_attaching",
    "is_checking",
    "is_cleaning",
    "is_reading",
]


@runtime_checkable
class CheckingDriver(DeviceDriver, Protocol):
    """A driver that reads configuration."""

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse bad configuration, naming the field, before anything was changed; None is good. Asked at `prepare`."""
        ...


@runtime_checkable
class AttachingDriver(DeviceDriver, Protocol):
    """A driver whose devices move into a pod's sandbox."""

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        """Name those devices that need the sandbox; decides from its arguments alone, so that it says the same at each time."""
        ...

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        """Put a prepared device into a sandbox. None: done, and it is no interface. What was done before a refusal is undone by `detach`."""
        ...

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Undo all that the record says, in reverse order, and mark each step `undone`.

        Shapes: sandbox — None after a crash, or when the sandbox is gone; its namespaces may be gone also when it is given.
        Errors: whoever raises is asked again; the device stays out of use until the record is empty.
        """
        ...


@runtime_checkable
class AdjustingDriver(DeviceDriver, Protocol):
    """A driver whose containers differ from one another."""

    def adjust(self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName) -> ContainerEdits | Refusal:
        """Say what one container gets beyond the edits of `prepare`: variables, bind mounts and annotations; asked when it is made, for claims alone.

        Changes nothing outside: there is no record, nobody undoes it, and what it answers lasts as long as the container. The runtime waits about a second.
        """
        ...


@runtime_checkable
class CleaningDriver(DeviceDriver, Protocol):
    """A driver that cleans a device after its last owner and before the next one."""

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Clean; None is clean. A refusal keeps the device Unhealthy (`dirty`), and its facts become the evidence; it is asked again later."""
        ...


@runtime_checkable
class ReadingDriver(DeviceDriver, Protocol):
    """A driver whose `prepare` only looks, for some devices at least."""

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Say whether `prepare` of these changes nothing, on the machine or in this process, for an owner by the device plugin API, whose devices have no configuration.

        Then it is asked while the ledger is written, and its answer is thrown away where the ledger refuses. Decides from its arguments and what it knows; quick.
        """
        ...


@runtime_checkable
class ResettingDriver(DeviceDriver, Protocol):
    """A driver that resets its devices in a way of its own; for all others the kernel resets the PCI function, where it can."""

    def reset(self, tree: Tree, device: Device) -> Refusal | None:
        """Reset a device that nobody holds, when an operator asks for it; None is done. The host looks at the device anew afterwards."""
        ...


@runtime_checkable
class SwitchedDriver(DeviceDriver, Protocol):
    """A driver whose devices the host may give to VFIO for a claim, and that has something of its own on them; all others are switched without a word to them."""

    passthrough_variables: Mapping[str, str]
    """What containers get beside VFIO's nodes, where the maker's runtime would do something of its own otherwise."""

    def own_nodes(self, tree: Tree, device: Device) -> Sequence[str]:
        """Name nodes of the device, relative to dev, that its folder in sysfs does not tell of."""
        ...

    def let_go(self, tree: Tree, device: Device) -> None:
        """Close what this process has open on a device, and leave it alone until `take_back`; idempotent."""
        ...

    def take_back(self, tree: Tree, device: Device) -> None:
        """Go on with a device that its kernel driver has again, or still; idempotent."""
        ...


def is_reading(driver: DeviceDriver) -> TypeGuard[ReadingDriver]:
    """Say whether a driver can say that it only reads.

    Cost: with a protocol `isinstance` takes 20 µs, and this is asked at each `prepare`.
    """
    return callable(getattr(driver, "only_reads", None))


def is_checking(driver: DeviceDriver) -> TypeGuard[CheckingDriver]:
    """Say whether a driver checks configuration, as quickly."""
    return callable(getattr(driver, "check", None))


def is_attaching(driver: DeviceDriver) -> TypeGuard[AttachingDriver]:
    """Say whether a driver's devices move into sandboxes, as quickly."""
    return (
        callable(getattr(driver, "to_attach", None))
        and callable(getattr(driver, "attach", None))
        and callable(getattr(driver, "detach", None))
    )


def is_adjusting(driver: DeviceDriver) -> TypeGuard[AdjustingDriver]:
    """Say whether a driver's containers differ from one another, as quickly."""
    return callable(getattr(driver, "adjust", None))


def is_cleaning(driver: DeviceDriver) -> bool:
    """Say whether a driver cleans: it has the method, and has no `cleans` that is false (what an operator may switch off)."""
    return callable(getattr(driver, "clean", None)) and bool(getattr(driver, "cleans", True))
