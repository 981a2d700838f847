"""Console script `topobus-relay`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the relay and exit with its exit code."""
    answer_probe("relay")
    with needing_extra("relay"):
        from topobus.process.service import run
        from topobus.relay.config import RelaySettings
        from topobus.relay.service import serve
    sys.exit(run("relay", RelaySettings, serve, parts=("hub",)))


if __name__ == "__main__":
    main()
