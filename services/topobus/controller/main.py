"""Console script `topobus-controller`."""

from __future__ import annotations

import sys

from topobus.controller.config import ControllerSettings
from topobus.controller.service import serve
from topobus.runtime.service import run

__all__ = ["main"]


def main() -> None:
    """Run the controller; the exit code is the process's."""
    sys.exit(run("controller", ControllerSettings, serve))


if __name__ == "__main__":
    main()
