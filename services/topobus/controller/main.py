"""Console script `topobus-controller`."""

from __future__ import annotations

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

# The value of typing.TYPE_CHECKING. Importing typing would double the cost of a probe.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from topobus.controller.config import ControllerSettings
    from topobus.process.service import Runtime

__all__ = ["main"]

# New objects between two rounds of the garbage collector. The copies of a fleet are millions of
# values that stay and make no cycles; at Python's 700 the collector walks over them all the while
# they are read, which is a third of the processor time of a start with 1,000 DGX.
_OBJECTS_A_ROUND = 50_000


def main() -> None:
    """Run the controller and end the process with its exit code."""
    answer_probe("controller")
    with needing_extra("controller"):
        from topobus.controller.config import ControllerSettings, check
        from topobus.controller.standalone import service  # noqa: F401 - whether all of it is there
        from topobus.process.service import run
    sys.exit(run("controller", ControllerSettings, _serve, check=check, parts=("machines", "inventories", "ledgers")))


async def _serve(settings: ControllerSettings, runtime: Runtime) -> None:
    """Serve in the home that the settings name."""
    # A probe imports this module and nothing that it can do without.
    import gc

    gc.set_threshold(_OBJECTS_A_ROUND)
    if settings.home == "cluster":
        # Before anything is loaded: a replica that has no copy yet must not
        # be taken for one that is ready.
        runtime.readiness.set("cluster", is_ready=False, why="no snapshot yet")
        # Only here: the stand-alone home needs no Kubernetes client.
        with needing_extra("controller"):
            from topobus.controller.cluster.service import serve_cluster

        await serve_cluster(settings, runtime)
    else:
        from topobus.controller.standalone.service import serve

        await serve(settings, runtime)


if __name__ == "__main__":
    main()
