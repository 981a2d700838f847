"""Raises this process's limit of open files to the system's hard limit, and refuses a benchmark
that needs more.
"""

from __future__ import annotations

import resource

from topobus.values.errors import ConfigError

__all__ = ["check_open_files", "raise_open_files"]


def raise_open_files() -> int:
    """Raise the soft limit to the hard one, for this process and those that it starts.

    Returns the present limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def check_open_files(wanted: int, limit: int) -> None:
    """Refuse a benchmark that would fail in the middle.

    Errors: raises ConfigError.

    >>> check_open_files(100, 1024)
    """
    if 0 <= limit < wanted:
        raise ConfigError(
            f"open files: this process may have {limit}, wanted {wanted} (a connection each, at the hub and "
            "at the nodes)",
            next_step=f"ulimit -n {wanted}, as root or after raising the hard limit (/etc/security/limits.conf), or "
            "fewer nodes (--nodes)",
        )
