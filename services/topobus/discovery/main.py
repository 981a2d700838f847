"""Console script `topobus-discovery`."""

from __future__ import annotations

import sys

from topobus.discovery.config import DiscoverySettings
from topobus.discovery.service import serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the discovery service; the exit code is the process's."""
    sys.exit(run("discovery", DiscoverySettings, serve))


if __name__ == "__main__":
    main()
