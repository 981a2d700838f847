"""The reconfigurable region behind a DFL port, read from sysfs.

Source: Documentation/fpga/dfl.rst: a bitstream fits a region when its interface id is the region's
compat_id; the port's afu_id is the loaded function's.
"""

from __future__ import annotations

from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm, normal_id
from topobus.fpga.programmer import DflProgrammer
from topobus.fpga.region import Region
from topobus.sysfs.fpga import DflCard, DflPort, read_dfl_card
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.errors import HardwareError

__all__ = ["dfl_region", "ports_of"]


def ports_of(card: DflCard, device: Device) -> tuple[DflPort, ...]:
    """Find a device's ports.

    Empty for a device that is gone, or whose card has another number of ports now: then its name
    means another device.
    """
    is_parent = device.role is DeviceRole.PARTITION_PARENT
    if (bool(device.partition_of) or is_parent) != (card.port_count > 1):
        return ()
    return tuple(port for port in card.ports if is_parent or port.number == device.attributes.get("port"))


def dfl_region(tree: Tree, device: Device, programmer: DflProgrammer) -> Region:
    """Read the region of a port.

    The device of a card with all of its ports can be reset, but not programmed.

    Errors: raises HardwareError when the port is gone, or a file of it cannot be read.
    """
    card = read_dfl_card(tree, str(device.attributes["region"]))
    ports = ports_of(card, device)
    if not ports:
        raise HardwareError(
            f"{device.name}: the card has no port {device.attributes.get('port')} any more", path=card.path
        )
    port, is_one = ports[0], len(ports) == 1
    nodes = [str(tree.path(f"dev/{each_port.name}")) for each_port in ports]
    interface = normal_id(card.interface_id(port)) if is_one else ""
    obstacle = "" if is_one else "it is a card with several regions: ask for one of its ports"
    if is_one and not card.engine:
        obstacle = "the card's management engine is not on this node"

    def fits(bitstream: Bitstream) -> str:
        if bitstream.form not in (BitstreamForm.GBS, BitstreamForm.AOCX):
            return "it is for Xilinx cards"
        if not is_one:
            return obstacle
        return (
            ""
            if bitstream.interface == interface
            else f"its interface id is {bitstream.interface}, the region's {interface or 'unknown'}"
        )

    def reset() -> None:
        for node in nodes:
            programmer.reset(node)

    shown = normal_id(port.afu_id) if is_one and not port.has_crashed else ""
    return Region(
        device=device.name,
        shown=shown if shown.strip("0") else "",
        fault=next((fault for fault in map(_fault, ports) if fault), ""),
        obstacle=obstacle,
        fits=fits,
        program=lambda image: programmer.program(str(tree.path(f"dev/{card.engine}")), nodes[0], port.number, image),
        reset=reset,
    )


def _fault(port: DflPort) -> str:
    if port.has_crashed:
        return f"{port.name}: the function's id reads as all ones"
    return f"{port.name} holds error {port.errors.value:#x}" if port.errors is not None and port.errors.value else ""
