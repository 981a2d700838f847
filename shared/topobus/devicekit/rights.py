"""What a service needs of the machine beyond its own container, each with its reason: declared
beside the code that needs it, in the service's `rights.py`.

Manifests, the page docs/reference/rights.md and tests are checked against these values. Nothing
here grants anything. A service without a `rights.py` needs nothing. Drivers run inside their
class's service and declare nothing: a vendor's driver has no right by default, and otherwise those
that an operator's overlay gives to the service.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["DEVICE_RESET", "HARDWARE_RIGHTS", "PASSTHROUGH", "Right", "RightKind", "kit_rights"]

PASSTHROUGH = "passthrough"
"""Claims may have PCI functions switched to VFIO, for virtual machines (setting `passthrough`)."""
DEVICE_RESET = "device-reset"
"""An operator may have a device reset or bound to its kernel driver again (`topobus device reset`,
`rebind`)."""


class RightKind(StrEnum):
    """The kinds of rights."""

    CAPABILITY = "capability"
    """A Linux capability, by its name without CAP_."""
    HOST_NETWORK = "host network"
    """The container is in the node's network namespace."""
    HOST_PIDS = "host PIDs"
    """The container sees the node's processes."""
    MOUNT = "mount"
    """A folder of the host."""
    PRIVILEGED = "privileged"
    """The container may open every device node that its user may."""
    ROOT = "user root"


class Right(Struct, frozen=True, kw_only=True):
    """One right of one service."""

    kind: RightKind
    what: str = ""
    """The capability, or the folder on the host."""
    why: str
    """What does not work without it: one sentence, which the manifest has as a comment."""
    feature: str = ""
    """What an operator switches on that needs it; empty: the service needs it always."""
    is_writable: bool = False
    """Of a mount."""
    propagates: bool = False
    """Of a mount: what the host mounts below it later is also visible (HostToContainer)."""


def _read(folder: str, why: str) -> Right:
    return Right(kind=RightKind.MOUNT, what=folder, why=why)


HARDWARE_RIGHTS = (
    _read("/sys", "the kernel shows there which hardware there is, and its state"),
    _read("/proc", "drivers show their cards there, and the kernel the node's interfaces and memory"),
    _read("/dev", "whether a device's nodes are there; only looked at, no container can open them there"),
)
"""What every service that reads hardware needs: to read it."""


def kit_rights(device_class: str) -> tuple[Right, ...]:
    """Return the rights that the kit itself needs, for features that an operator switches on, in a
    service for PCI devices.
    """
    rights: list[Right] = []
    for feature in (PASSTHROUGH, DEVICE_RESET):
        is_passthrough = feature == PASSTHROUGH
        devices = "driver_override is written there" if is_passthrough else "a function's reset is written there"
        rights += [
            Right(
                kind=RightKind.ROOT,
                why="the kernel's files for this are root's; no capability is needed to write them",
                feature=feature,
            ),
            Right(
                kind=RightKind.MOUNT,
                what="/sys/devices",
                why=f"{devices}; the kernel has no narrower folder that outlives a card",
                feature=feature,
                is_writable=True,
            ),
            Right(
                kind=RightKind.MOUNT,
                what=f"/var/lib/topobus/{device_class}",
                why="what was done to a device must be known after a crash and a reboot, to undo it",
                feature=feature,
                is_writable=True,
            ),
            Right(
                kind=RightKind.MOUNT,
                what="/sys/bus/pci/drivers",
                why="bind and unbind of the kernel's drivers are written there",
                feature=feature,
                is_writable=True,
            ),
            Right(
                kind=RightKind.CAPABILITY,
                what="SYS_PTRACE",
                why="the processes that have a device open are found by the open files of all processes; none is "
                "traced",
                feature=feature,
            ),
        ]
    return tuple(rights)
