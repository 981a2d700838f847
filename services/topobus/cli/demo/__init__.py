"""The demo: the main job of Topobus on a recorded 8-GPU machine, every step checked; `topobus
demo`, `make demo`.
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
    # gRPC's core tells on stderr of every plugin that goes away, which is what they do at the end.
    # It reads this as it is loaded, so before our imports.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from topobus.cli.demo.run import run_demo

    return run_demo(svg)
