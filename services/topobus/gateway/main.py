"""Console script `topobus-gateway`."""

from __future__ import annotations

import sys

from topobus.gateway.config import GatewaySettings, check
from topobus.gateway.service import serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the gateway service; the exit code is the process's."""
    sys.exit(run("gateway", GatewaySettings, serve, check=check))


if __name__ == "__main__":
    main()
