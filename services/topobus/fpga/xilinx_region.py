"""The reconfigurable region of a Xilinx card, as XRT's drivers show it in sysfs.

The user function shows the uuid of the xclbin that was loaded through it. It shows what the
management function has loaded only after a user has opened the card (XRT, icap.c: the driver asks
the peer for the uuid when a user loads). A card has one region for all of its user functions, so a
card with several is never programmed for one of them.
Source: XRT's xocl and xclmgmt: xclbinuuid, interface_uuids, instance (node /dev/xclmgmt<instance>),
rom VBNV and timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.pci import pci_folder
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm, normal_id, normal_platform
from topobus.fpga.programmer import XrtProgrammer
from topobus.fpga.region import Region
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["xilinx_region"]


def xilinx_region(tree: Tree, device: Device, programmer: XrtProgrammer) -> Region:
    """Read a card's region.

    Errors: raises HardwareError when the card is gone, or a file of it cannot be read.
    """
    if device.pci is None or not tree.exists(pci_folder(device.pci)):
        raise HardwareError(f"{device.name} is no longer on the bus", path=pci_folder(device.pci) if device.pci else "")
    management = _management(device)
    instance = tree.read_int(f"{pci_folder(management)}/instance", 0) if management is not None else None
    obstacle = ""
    if device.partition_of:
        obstacle = "its region is that of several user functions, whose users would lose theirs"
    elif management is None or instance is None:
        obstacle = "the card's management function is not on this node, or its driver (xclmgmt) is not loaded"
    folders = [pci_folder(address) for address in (device.pci, management) if address is not None]
    interfaces = {
        normal_id(line) for folder in folders for line in (tree.read(f"{folder}/interface_uuids") or "").split()
    }
    platform = normal_platform(str(device.attributes.get("shell", "")))
    built = _number(str(device.attributes.get("shellTimestamp", "")))
    shown = normal_id(tree.read(f"{pci_folder(device.pci)}/xclbinuuid") or "")

    def fits(bitstream: Bitstream) -> str:
        if bitstream.form is not BitstreamForm.XCLBIN:
            return "it is for Intel's cards"
        if bitstream.interface and interfaces:
            return (
                ""
                if bitstream.interface in interfaces
                else f"its interface uuid is {bitstream.interface}, the shell's {_listed(interfaces)}"
            )
        if not platform or normal_platform(bitstream.platform) != platform:
            return f"its platform is {bitstream.platform or 'unknown'}, the card's shell {platform or 'unknown'}"
        if bitstream.platform_timestamp and built and bitstream.platform_timestamp != built:
            return (
                f"it was built for the shell of {bitstream.platform_timestamp:#x}, the card has the one of {built:#x}"
            )
        return ""

    return Region(
        device=device.name,
        shown=shown if shown.strip("0") else "",
        shows_at_once=False,
        obstacle=obstacle,
        fits=fits,
        program=lambda image: programmer.program(str(tree.path(f"dev/xclmgmt{instance}")), image),
    )


def _management(device: Device) -> PciAddress | None:
    text = device.attributes.get("managementPciBusID")
    return PciAddress.parse(text) if isinstance(text, str) and text != str(device.pci) else None


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _listed(interfaces: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(interfaces))
