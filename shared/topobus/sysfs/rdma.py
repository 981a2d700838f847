"""Reads RDMA devices of PCI functions: ports with their state, and the character devices that user
space opens.

Source: Documentation/ABI/stable/sysfs-class-infiniband, Documentation/infiniband/user_verbs.rst and
user_mad.rst.
"""

from __future__ import annotations

import re

from msgspec import Struct, structs

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["RdmaDevice", "RdmaPort", "function_rdma_devices", "function_rdma_ports"]


class RdmaPort(Struct, frozen=True, kw_only=True):
    """One port. States are the kernel's names: `ACTIVE`, `DOWN` and `LinkUp`, `Disabled`."""

    number: int
    path: str
    state: str = ""
    physical_state: str = ""
    link_layer: str = ""
    """`InfiniBand` or `Ethernet`."""
    rate_gbps: float | None = None

    @property
    def is_active(self) -> bool:
        """Return whether the port carries traffic. True when the tree has no file for it."""
        return self.state in ("ACTIVE", "")


class RdmaDevice(Struct, frozen=True, kw_only=True):
    """One RDMA device. `nodes` are its character devices, relative to dev: `infiniband/uverbs0`."""

    name: str
    ports: tuple[RdmaPort, ...] = ()
    nodes: tuple[str, ...] = ()


def function_rdma_devices(tree: Tree, address: PciAddress) -> tuple[RdmaDevice, ...]:
    """Read the RDMA devices of one PCI function with their ports and device nodes.

    A device in another RDMA network namespace is invisible and missing in the result, which is no
    fault.

    Order: by name.
    Errors: raises HardwareError for a file that cannot be read.
    Source: Documentation/ABI/stable/sysfs-class-infiniband.
    """
    base = pci_folder(address)
    return tuple(
        RdmaDevice(
            name=name, ports=_read_ports(tree, f"{base}/infiniband/{name}/ports"), nodes=_nodes(tree, base, name)
        )
        for name in tree.names(f"{base}/infiniband")
    )


def function_rdma_ports(tree: Tree, address: PciAddress) -> tuple[RdmaPort, ...]:
    """Read the ports of all RDMA devices of one PCI function, without the devices' nodes, and the
    physical state only of those that are not active.

    Order, errors, source: as `function_rdma_devices`.
    Cost: four reads per port, for a look each second.
    """
    folder = f"{pci_folder(address)}/infiniband"
    return tuple(
        port if port.is_active else structs.replace(port, physical_state=_word(tree.read(f"{port.path}/phys_state")))
        for name in tree.names(folder)
        for port in _read_states(tree, f"{folder}/{name}/ports")
    )


def _read_ports(tree: Tree, folder: str) -> tuple[RdmaPort, ...]:
    return tuple(
        structs.replace(port, physical_state=_word(tree.read(f"{port.path}/phys_state")))
        for port in _read_states(tree, folder)
    )


def _read_states(tree: Tree, folder: str) -> tuple[RdmaPort, ...]:
    return tuple(
        RdmaPort(
            number=int(name),
            path=f"{folder}/{name}",
            state=_word(tree.read(f"{folder}/{name}/state")),
            link_layer=tree.read(f"{folder}/{name}/link_layer") or "",
            rate_gbps=_rate(tree.read(f"{folder}/{name}/rate")),
        )
        for name in tree.names(folder)
        if name.isdecimal()
    )


def _nodes(tree: Tree, base: str, device: str) -> tuple[str, ...]:
    """Name the verbs and management devices: the `ibdev` of each entry names its device (a function
    with two devices has both sets).
    """
    names = [
        name
        for kind in ("infiniband_verbs", "infiniband_mad")
        for name in tree.names(f"{base}/{kind}")
        if (tree.read(f"{base}/{kind}/{name}/ibdev") or device) == device
    ]
    return tuple(f"infiniband/{name}" for name in names if re.fullmatch(r"(uverbs|umad|issm)\d+", name))


def _word(text: str | None) -> str:
    """Take the word of `4: ACTIVE`."""
    return (text or "").rpartition(":")[2].strip()


def _rate(text: str | None) -> float | None:
    """Take the number of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s+Gb/sec", text or "")
    return float(match.group(1)) if match else None
