"""Console script `topobus-nic`."""

from __future__ import annotations

import sys

from topobus.nic.config import NicSettings
from topobus.nic.service import check, serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the nic service; the exit code is the process's."""
    sys.exit(run("nic", NicSettings, serve, check=check))


if __name__ == "__main__":
    main()
