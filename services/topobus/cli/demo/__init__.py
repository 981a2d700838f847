"""The demo: the main job of Topobus on a recorded 8-GPU machine, with every step checked. It runs
by `topobus demo` or `make demo`.
"""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["demo"]


def demo(*, svg: Annotated[Path | None, Parameter(help="Save the two central steps as a picture.")] = None) -> int:
    """Show the main job on a recorded 8-GPU machine in under a minute.

    Every step is checked, nothing is left behind.
    """
    # gRPC's core reports on stderr every plugin that disconnects, as all do at the end. It reads
    # this variable when it is loaded, so it is set before our imports.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from topobus.cli.demo.run import run_demo

    return run_demo(svg)
