"""What a service needs of the machine beyond its own container, each with its reason: declared beside the code that needs it, in the service's `rights.py`.

Flows out: values that manifests, the page docs/reference/rights.md and tests are held against. Nothing here grants anything. A service without a `rights.py` needs nothing.
Drivers run inside their class's service and declare nothing: a vendor's driver has no right by default, and what an operator's overlay gives to the service.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["HARDWARE_RIGHTS", "Right", "RightKind"]


class RightKind(StrEnum):
    """What is given."""

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
    """Of a mount: what the host mounts below it later is seen, too (HostToContainer)."""


def _read(folder: str, why: str) -> Right:
    return Right(kind=RightKind.MOUNT, what=folder, why=why)


HARDWARE_RIGHTS = (
    _read("/sys", "the kernel tells there which hardware there is, and how it is"),
    _read("/proc", "what drivers tell of their cards stands there, and the node's interfaces and memory"),
    _read("/dev", "whether a device's nodes are there; only looked at, no container can open them there"),
)
"""What every service that reads hardware needs: to read it."""
