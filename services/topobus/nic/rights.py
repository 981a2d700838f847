"""What the nic service needs of the machine: read access, and the rights to hand interfaces over to
pods where an operator enables that.
"""

from __future__ import annotations

from topobus.devicekit.rights import DEVICE_RESET, HARDWARE_RIGHTS, Right, RightKind, kit_rights

__all__ = ["HAND_OVER", "RIGHTS", "VIRTUAL_FUNCTIONS"]

HAND_OVER = "hand-over"
"""Interfaces are moved into pods and back (docs/reference/nic-configuration.md), also by CNI
plugins."""
VIRTUAL_FUNCTIONS = "virtual-functions"
"""The number of virtual functions is kept (setting `virtual_functions`), or made when a claim gets
one (`partitions.virtual_functions`)."""


def _of_hand_over(
    kind: RightKind, why: str, what: str = "", *, is_writable: bool = False, propagates: bool = False
) -> Right:
    return Right(kind=kind, what=what, why=why, feature=HAND_OVER, is_writable=is_writable, propagates=propagates)


RIGHTS = (
    *HARDWARE_RIGHTS,
    *kit_rights("nic"),
    Right(
        kind=RightKind.CAPABILITY,
        what="NET_ADMIN",
        why="an interface is switched off and on after a reset, so that its driver sets the card up again",
        feature=DEVICE_RESET,
    ),
    _of_hand_over(RightKind.ROOT, "a capability of another user is lost when the program is started"),
    _of_hand_over(
        RightKind.CAPABILITY, "interfaces, addresses, routes and virtual functions are changed by netlink", "NET_ADMIN"
    ),
    _of_hand_over(RightKind.CAPABILITY, "a pod's network namespace is entered by setns", "SYS_ADMIN"),
    _of_hand_over(RightKind.HOST_NETWORK, "an interface leaves from, and returns to, the node's network namespace"),
    _of_hand_over(
        RightKind.MOUNT,
        "the runtime keeps the network namespaces of pods there, and mounts new ones later",
        "/run/netns",
        propagates=True,
    ),
    _of_hand_over(
        RightKind.MOUNT,
        "sysctls of an interface are set there; the rest of /proc stays read-only",
        "/proc/sys/net",
        is_writable=True,
    ),
    _of_hand_over(
        RightKind.MOUNT,
        "the journal of what was done, and the records of CNI, must survive the pod and a reboot",
        "/var/lib/topobus/nic",
        is_writable=True,
    ),
    _of_hand_over(RightKind.MOUNT, "CNI plugins that a network names are run from there", "/opt/cni/bin"),
    _of_hand_over(
        RightKind.MOUNT,
        "the address plugin host-local keeps there which addresses are taken",
        "/var/lib/cni",
        is_writable=True,
    ),
    Right(
        kind=RightKind.MOUNT,
        what="/sys/devices",
        why="a physical function's sriov_numvfs is written there; the kernel has no narrower folder that "
        "outlives a card",
        feature=VIRTUAL_FUNCTIONS,
        is_writable=True,
    ),
)
