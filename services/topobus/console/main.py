"""Console script `topobus-console`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the console and end the process with its exit code."""
    answer_probe("console")
    with needing_extra("console"):
        from topobus.console.config import ConsoleSettings, check_settings
        from topobus.console.service import serve
        from topobus.process.service import run
    sys.exit(run("console", ConsoleSettings, serve, check=check_settings, parts=("page",)))


if __name__ == "__main__":
    main()
