"""Reads what people graph of a network device: the counters of its interfaces and of its RDMA
ports, each summed over the device.

An interface that is in a pod's network namespace is not visible here, and has no reading meanwhile.
RDMA goes past the interface, so its bytes are counted apart.
Source: Documentation/ABI/testing/sysfs-class-net-statistics;
Documentation/ABI/stable/sysfs-class-infiniband (port_rcv_data counts words of four bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.readings import Quantity, Reading

__all__ = ["link_readings"]

_INTERFACE_COUNTERS = (
    ("rx_bytes", Quantity.RECEIVED, "network"),
    ("tx_bytes", Quantity.SENT, "network"),
    ("rx_errors", Quantity.LINK_ERRORS, "received"),
    ("tx_errors", Quantity.LINK_ERRORS, "sent"),
    ("rx_dropped", Quantity.LINK_DROPS, "received"),
    ("tx_dropped", Quantity.LINK_DROPS, "sent"),
)
_RDMA_COUNTERS = (
    ("port_rcv_data", Quantity.RECEIVED, "rdma"),
    ("port_xmit_data", Quantity.SENT, "rdma"),
)
_RDMA_WORD_BYTES = 4


def link_readings(tree: Tree, interface_paths: Sequence[str], port_paths: Sequence[str] = ()) -> list[Reading]:
    """Read one device.

    Shapes: interface_paths, port_paths — folders of its interfaces and of its RDMA ports.
    """
    counted = [
        (quantity, part, 1, _sum(tree, (f"{path}/statistics/{name}" for path in interface_paths)))
        for name, quantity, part in _INTERFACE_COUNTERS
    ]
    counted += [
        (quantity, part, _RDMA_WORD_BYTES, _sum(tree, (f"{path}/counters/{name}" for path in port_paths)))
        for name, quantity, part in _RDMA_COUNTERS
    ]
    return [
        Reading(quantity=quantity, part=part, value=float(count * unit))
        for quantity, part, unit, count in counted
        if count is not None
    ]


def _sum(tree: Tree, paths: Iterable[str]) -> int | None:
    """Add up the counters. None where there is none, or one cannot be read."""
    try:
        counts = [count for path in paths if (count := tree.read_int(path)) is not None]
    except HardwareError:
        return None
    return sum(counts) if counts else None
