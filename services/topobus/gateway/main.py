"""Console script `topobus-gateway`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the gateway service and exit with its exit code."""
    answer_probe("gateway")
    with needing_extra("gateway"):
        from topobus.gateway.config import GatewaySettings, check
        from topobus.gateway.service import serve
        from topobus.process.service import run
    sys.exit(run("gateway", GatewaySettings, serve, check=check, parts=("inventories",)))


if __name__ == "__main__":
    main()
