"""Console script `topobus-controller`."""

from __future__ import annotations

import sys

from topobus.controller.config import ControllerSettings, check
from topobus.controller.service import serve
from topobus.runtime.service import Runtime, run

__all__ = ["main"]


def main() -> None:
    """Run the controller; the exit code is the process's."""
    sys.exit(run("controller", ControllerSettings, _serve, check=check))


async def _serve(settings: ControllerSettings, runtime: Runtime) -> None:
    """Serve in the home that the settings name."""
    if settings.home == "cluster":
        # Only here: the stand-alone home needs no Kubernetes client.
        from topobus.controller.cluster.service import serve_cluster

        await serve_cluster(settings, runtime)
    else:
        await serve(settings, runtime)


if __name__ == "__main__":
    main()
