"""Reads the id of the machine's current boot.

After a reboot devices may be numbered differently and nothing is prepared any more, so records of
an earlier boot are invalid. A container shares the host's boot id. It is read from /proc of this
machine and not from the recorded machine's root.
"""

from __future__ import annotations

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree

__all__ = ["LIVE", "boot_id"]

LIVE = Tree()


def boot_id() -> str:
    """Read the id of this boot. Empty where the kernel gives none."""
    return read_boot_id(LIVE)
