"""Console script `topobus`, the operator's program."""

import sys

from topobus.cli.help.quick import answer_quickly
from topobus.runtime.packages import needing_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    with needing_extra("cli", program="topobus", more="'topobus[all]' for the whole system"):
        if answer_quickly(sys.argv[1:]):
            sys.exit(0)
        from topobus.cli.application import run
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
