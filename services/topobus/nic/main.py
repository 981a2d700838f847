"""Console script `topobus-nic`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the nic service and exit with its exit code."""
    answer_probe("nic")
    with needing_extra("nic"):
        from topobus.nic.config import NicSettings
        from topobus.nic.service import check, serve
        from topobus.process.service import run
    sys.exit(run("nic", NicSettings, serve, check=check, parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
