"""Console script `topobus-gpu`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the gpu service and exit with its exit code."""
    answer_probe("gpu")
    with needing_extra("gpu"):
        from topobus.gpu.config import GpuSettings
        from topobus.gpu.service import check, serve
        from topobus.process.service import run
    sys.exit(run("gpu", GpuSettings, serve, check=check, parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
