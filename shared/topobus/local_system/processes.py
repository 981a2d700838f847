"""Says which process a number belongs to, so that a note about a process that ended is not taken
for one about another process with the same number.
"""

from __future__ import annotations

from pathlib import Path

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree

__all__ = ["is_process", "process_start"]


def is_process(pid: int, started: str) -> bool:
    """Say whether the very process of a note runs."""
    return pid != 0 and started != "" and started == process_start(pid)


def process_start(pid: int) -> str:
    """Give when a process began, in clock ticks since the boot, and which boot.

    Empty when there is none. A process id is given again after a while, this time is not before the
    next boot. Source: proc_pid_stat(5), field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return f"{text.rpartition(')')[2].split()[19]}@{read_boot_id(Tree())}"
