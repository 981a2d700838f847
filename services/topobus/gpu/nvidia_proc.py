"""Reads the files of NVIDIA's kernel module in /proc: its version, and a page for each GPU."""

from __future__ import annotations

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["PROC", "driver_version", "information", "information_if_readable", "information_path"]

PROC = "proc/driver/nvidia"


def information_path(address: PciAddress) -> str:
    """Return the path of a GPU's page."""
    return f"{PROC}/gpus/{address}/information"


def information(tree: Tree, address: PciAddress) -> dict[str, str]:
    """Read the kernel module's page of a GPU, with lines such as `Model: NVIDIA H100`.

    Empty when the module is not loaded.
    """
    text = tree.read(information_path(address)) or ""
    lines = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in lines if colon}


def information_if_readable(tree: Tree, address: PciAddress) -> dict[str, str]:
    """Read that page, or return nothing when it cannot be read."""
    try:
        return information(tree, address)
    except HardwareError:
        # The GPU is listed all the same: `observe` reports the unreadable file.
        return {}


def driver_version(tree: Tree) -> str:
    """Read the module's version, the first word with a dot after `Kernel Module` in
    /proc/driver/nvidia/version.
    """
    try:
        text = tree.read(f"{PROC}/version") or ""
    except HardwareError:
        return ""
    words = text.partition("Kernel Module")[2].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")
