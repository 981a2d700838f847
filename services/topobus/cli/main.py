"""Console script `topobus`, the operator's program."""

import gc
import sys

from topobus.cli.help.quick import answer_quickly
from topobus.process.packages import needing_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    # Loaded modules stay for the whole run: collecting garbage among them takes a tenth of a short
    # command.
    gc.disable()
    with needing_extra("cli", program="topobus", more="'topobus[all]' for the whole system"):
        if answer_quickly(sys.argv[1:]):
            sys.exit(0)
        from topobus.cli.application import run
    sys.exit(run(sys.argv[1:], when_loaded=_collect_garbage))


def _collect_garbage() -> None:
    """Collect garbage from now on, but never among the objects that exist already."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
