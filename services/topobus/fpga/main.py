"""Console script `topobus-fpga`."""

from __future__ import annotations

import sys

from topobus.fpga.config import FpgaSettings
from topobus.fpga.service import check, serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the fpga service; the exit code is the process's."""
    sys.exit(run("fpga", FpgaSettings, serve, check=check))


if __name__ == "__main__":
    main()
