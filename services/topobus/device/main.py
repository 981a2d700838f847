"""Console script `topobus-device`."""

import sys

from topobus.process.packages import needing_extra
from topobus.process.probe import answer_probe

__all__ = ["main"]

_USAGE = """usage: topobus-device --class NAME [--config FILE] [--check-config] [--probe] [--version]

The device service of a class of your own: it runs the installed drivers whose device_class is NAME.
Its settings are those of every device service (docs/reference/settings.md), from TOPOBUS_<NAME>__…; how to
write a driver: docs/how-to/write-a-driver.md.

  topobus-device --class npu                  serve class npu on this node
  topobus-device --class npu --check-config   check settings and drivers, and exit
"""
# sysexits.h EX_USAGE.
_EXIT_USAGE = 64


def main() -> None:
    """Run the service of the class that `--class` names, and exit with its exit code."""
    device_class, arguments = _split(sys.argv[1:])
    if not device_class:
        if arguments in (["-h"], ["--help"]):
            sys.stdout.write(_USAGE)
            sys.exit(0)
        if arguments != ["--version"]:
            sys.stderr.write(
                "error: topobus-device: got no --class, wanted the device class to serve\n  next: "
                "topobus-device --class npu\n"
            )
            sys.exit(_EXIT_USAGE)
        device_class = "device"
    sys.argv[1:] = arguments
    answer_probe(device_class)
    with needing_extra("device"):
        from functools import partial

        from topobus.device.config import DeviceSettings
        from topobus.devicekit.host.host import check_devices, serve_devices
        from topobus.formats.messages.device_classes import DEVICE_SERVICES, class_complaint
        from topobus.process.service import run
    complaint = class_complaint(device_class) if arguments != ["--version"] else ""
    if device_class in DEVICE_SERVICES:
        sys.stderr.write(
            f"error: topobus-device: class {device_class} has a service of its own\n  next: topobus-{device_class}\n"
        )
        sys.exit(_EXIT_USAGE)
    if complaint:
        sys.stderr.write(
            f"error: topobus-device: --class: {complaint}\n  next: choose another name, and "
            "set it as your driver's device_class\n"
        )
        sys.exit(_EXIT_USAGE)
    serve, check = partial(serve_devices, device_class=device_class), partial(check_devices, device_class)
    sys.exit(run(device_class, DeviceSettings, serve, check=check, parts=("machine", "inventory")))


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """Take `--class NAME` out of the arguments, or return an empty name when it is not there.

    Argparse is not used because its import would slow down every probe.
    """
    for place, word in enumerate(arguments):
        if word == "--class" and place + 1 < len(arguments):
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
        if word.startswith("--class="):
            return word.removeprefix("--class="), arguments[:place] + arguments[place + 1 :]
    return "", arguments


if __name__ == "__main__":
    main()
