"""Console script `topobus-discovery`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the discovery service and exit with its exit code."""
    answer_probe("discovery")
    with needing_extra("discovery"):
        from topobus.discovery.config import DiscoverySettings
        from topobus.discovery.service import serve
        from topobus.process.service import run
    sys.exit(run("discovery", DiscoverySettings, serve, parts=("machine",)))


if __name__ == "__main__":
    main()
