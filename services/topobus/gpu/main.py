"""Console script `topobus-gpu`."""

from __future__ import annotations

import sys

from topobus.gpu.config import GpuSettings
from topobus.gpu.service import check, serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the gpu service; the exit code is the process's."""
    sys.exit(run("gpu", GpuSettings, serve, check=check))


if __name__ == "__main__":
    main()
