"""Identifies a process beyond its number, so that a note about a process that ended does not count
for another process with the same number.
"""

from __future__ import annotations

from pathlib import Path

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree

__all__ = ["is_process", "process_start"]


def is_process(pid: int, started: str) -> bool:
    """Return whether the process of a note still runs."""
    return pid != 0 and started != "" and started == process_start(pid)


def process_start(pid: int) -> str:
    """Return when a process began, in clock ticks since the boot, and which boot.

    Empty when there is none. A process id is reused after a while, but this time only recurs after
    the next boot. Source: proc_pid_stat(5), field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return f"{text.rpartition(')')[2].split()[19]}@{read_boot_id(Tree())}"
