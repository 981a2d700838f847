"""Which boot of the machine this is: after another one devices are numbered anew, and nothing that was made ready still is.

A container shares the host's id, so it is read where it always is and not below the recorded machine's root.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BOOT_ID", "boot_id"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Read the id of this boot; empty where the kernel tells none."""
    return BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
