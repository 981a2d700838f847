"""Which boot of the machine this is: after another one devices are numbered anew, and nothing that was made ready still is.

A container shares the host's id, so it is read where it always is and not below the recorded machine's root.
"""

from __future__ import annotations

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree

__all__ = ["LIVE", "boot_id"]

LIVE = Tree()


def boot_id() -> str:
    """Read the id of this boot; empty where the kernel tells none."""
    return read_boot_id(LIVE)
