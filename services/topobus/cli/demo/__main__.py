"""Let `python -m topobus.cli.demo` be `topobus demo`."""

import sys

from topobus.cli.application import run

sys.exit(run(["demo", *sys.argv[1:]]))
