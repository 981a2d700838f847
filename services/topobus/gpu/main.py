"""Console script `topobus-gpu`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the gpu service and exit with its exit code."""
    answer_probe("gpu")
    with needing_extra("gpu"):
        from functools import partial

        from topobus.devicekit.host.host import check_devices
        from topobus.gpu.config import GpuSettings
        from topobus.gpu.service import serve
        from topobus.process.service import run
    check = partial(check_devices, "gpu")
    sys.exit(run("gpu", GpuSettings, serve, check=check, parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
