"""Console script `topobus-cpu`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the cpu service and exit with its exit code."""
    answer_probe("cpu")
    with needing_extra("cpu"):
        from topobus.cpu.config import CpuSettings
        from topobus.cpu.service import check, serve
        from topobus.process.service import run
    sys.exit(run("cpu", CpuSettings, serve, check=check, parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
