"""Console script `topobus-topology`."""

from __future__ import annotations

import sys

from topobus.runtime.service import run
from topobus.topology.config import TopologySettings
from topobus.topology.service import serve

__all__ = ["main"]


def main() -> None:
    """Run the topology service; the exit code is the process's."""
    sys.exit(run("topology", TopologySettings, serve))


if __name__ == "__main__":
    main()
