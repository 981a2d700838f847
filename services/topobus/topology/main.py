"""Console script `topobus-topology`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the topology service and exit with its exit code."""
    answer_probe("topology")
    with needing_extra("topology"):
        from topobus.process.service import run
        from topobus.topology.config import TopologySettings, check
        from topobus.topology.service import serve
    sys.exit(run("topology", TopologySettings, serve, check=check, parts=("machine", "inventories", "ledger")))


if __name__ == "__main__":
    main()
