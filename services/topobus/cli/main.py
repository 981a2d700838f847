"""Console script `topobus`, the operator's program."""

import gc
import sys

from topobus.cli.help.quick import answer_quickly
from topobus.process.packages import needing_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    # What is loaded stays for the whole run: looking through it for garbage, again and again,
    # is a tenth of a short command.
    gc.disable()
    with needing_extra("cli", program="topobus", more="'topobus[all]' for the whole system"):
        if answer_quickly(sys.argv[1:]):
            sys.exit(0)
        from topobus.cli.application import run
    sys.exit(run(sys.argv[1:], when_loaded=_collect_garbage))


def _collect_garbage() -> None:
    """Look for garbage from now on, and never among what is there already."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
