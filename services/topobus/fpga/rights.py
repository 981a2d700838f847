"""What the fpga service needs of the machine: read access, and the rights to program cards where an
operator enables that.
"""

from __future__ import annotations

from topobus.devicekit.rights import HARDWARE_RIGHTS, Right, RightKind, kit_rights

__all__ = ["PROGRAMMING", "RIGHTS"]

PROGRAMMING = "programming"
"""Cards are programmed with what claims ask for, and cleaned after them (setting
`functions.program`)."""


def _of_programming(kind: RightKind, why: str, what: str = "", *, is_writable: bool = False) -> Right:
    return Right(kind=kind, what=what, why=why, feature=PROGRAMMING, is_writable=is_writable)


RIGHTS = (
    *HARDWARE_RIGHTS,
    *kit_rights("fpga"),
    _of_programming(RightKind.ROOT, "the kernel makes the cards' nodes for root alone"),
    _of_programming(
        RightKind.PRIVILEGED,
        "Kubernetes has no narrower right for opening /dev/dfl-* and /dev/xclmgmt*, by which cards are programmed",
    ),
    _of_programming(
        RightKind.MOUNT,
        "what was being loaded must be known after the pod and a reboot, before the next claim gets the card",
        "/var/lib/topobus/fpga",
        is_writable=True,
    ),
    _of_programming(
        RightKind.MOUNT,
        "the bitstreams are there; the service reads them, and another program fills the folder",
        "/var/lib/topobus/bitstreams",
    ),
)
