"""Reads the id of the current boot from proc/sys/kernel/random/boot_id: a random text that the
kernel makes at its start.
"""

from __future__ import annotations

from topobus.sysfs.tree import Tree

__all__ = ["BOOT_ID_FILE", "read_boot_id"]

BOOT_ID_FILE = "proc/sys/kernel/random/boot_id"


def read_boot_id(tree: Tree) -> str:
    """Read the id of this boot. Empty where the kernel has none.

    Errors: raises HardwareError when the file exists and cannot be read.
    """
    return tree.read(BOOT_ID_FILE) or ""
