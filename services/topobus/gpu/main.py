"""Console script `topobus-gpu`."""

import sys
from functools import partial

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the gpu service and exit with its exit code."""
    answer_probe("gpu")
    with needing_extra("gpu"):
        from topobus.devicekit.host.host import check_devices
        from topobus.gpu.config import GpuSettings
        from topobus.gpu.service import serve
        from topobus.process.service import run
    sys.exit(run("gpu", GpuSettings, serve, check=partial(check_devices, "gpu"), parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
