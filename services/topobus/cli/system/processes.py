"""Says which process a number belongs to, so that a note about a process that ended is not taken for one about another process with the same number."""

from __future__ import annotations

from pathlib import Path

__all__ = ["process_start"]


def process_start(pid: int) -> str:
    """Give when a process began, in clock ticks since the boot; empty when there is none.

    A process id is given again after a while, this time is not. Source: proc_pid_stat(5), field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()[19]
