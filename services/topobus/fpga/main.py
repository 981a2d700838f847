"""Console script `topobus-fpga`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]


def main() -> None:
    """Run the fpga service and exit with its exit code."""
    answer_probe("fpga")
    with needing_extra("fpga"):
        from functools import partial

        from topobus.devicekit.host.host import check_devices
        from topobus.fpga.config import FpgaSettings
        from topobus.fpga.service import serve
        from topobus.process.service import run
    check = partial(check_devices, "fpga")
    sys.exit(run("fpga", FpgaSettings, serve, check=check, parts=("machine", "inventory")))


if __name__ == "__main__":
    main()
