"""Console script `topobus-cpu`."""

from __future__ import annotations

import sys

from topobus.cpu.config import CpuSettings
from topobus.cpu.service import check, serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the cpu service; the exit code is the process's."""
    sys.exit(run("cpu", CpuSettings, serve, check=check))


if __name__ == "__main__":
    main()
