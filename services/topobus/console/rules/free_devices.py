"""What is free by class and node, in the words of `topobus free`. Pure.

What that command reads from ResourceSlices, the console has from inventories and ledgers: a device
that is not well is tainted, and one that an operator withholds is withheld.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from topobus.console.rules.node_drawing import View
from topobus.values.cluster_answers import FreeRow
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.ledger import Holders

__all__ = ["free_rows", "free_view", "sum_rows"]


def free_rows(inventories: Iterable[Inventory], ledger: Holders | None) -> dict[str, FreeRow]:
    """Count one node's devices by class."""
    return {
        inventory.device_class: _row(inventory, _held_names(ledger, inventory.device_class))
        for inventory in inventories
    }


def sum_rows(device_class: str, rows: Sequence[FreeRow]) -> FreeRow:
    """Add up the devices of one class on all nodes. Those that lie together are on one node."""
    return FreeRow(
        group={"class": device_class},
        nodes=len(rows),
        such_as=(),
        devices=sum(row.devices for row in rows),
        free=sum(row.free for row in rows),
        held=sum(row.held for row in rows),
        tainted=sum(row.tainted for row in rows),
        other=sum(row.other for row in rows),
        spares=sum(row.spares for row in rows),
        on_one_node=max((row.on_one_node for row in rows), default=0),
        on_one_numa_node=max((row.on_one_numa_node for row in rows), default=0),
        under_one_root=max((row.under_one_root for row in rows), default=0),
    )


def free_view(row: FreeRow) -> View:
    """Return a row for the page."""
    return {
        "class": row.group["class"],
        "nodes": row.nodes,
        "total": row.devices,
        "held": row.held,
        "free": row.free,
        "others": row.others_text,
        "together": row.together_text,
    }


def _row(inventory: Inventory, held: set[str]) -> FreeRow:
    states = Counter(_state(device, held) for device in inventory.devices)
    free = [device for device in inventory.devices if _state(device, held) == "free"]
    return FreeRow(
        group={"class": inventory.device_class},
        nodes=1,
        such_as=(inventory.node,),
        devices=len(inventory.devices),
        free=states["free"],
        held=states["held"],
        tainted=states["tainted"],
        other=states["withheld"],
        spares=states["spare"],
        on_one_node=states["free"],
        on_one_numa_node=_most(str(device.numa_nodes) for device in free if device.numa_nodes),
        under_one_root=_most(device.pcie_root for device in free if device.pcie_root),
    )


def _state(device: Device, held: set[str]) -> str:
    if device.name in held:
        return "held"
    if device.is_allocatable:
        return "free"
    if device.is_fit:
        return "spare"
    return "withheld" if device.maintenance is not None else "tainted"


def _most(places: Iterable[str]) -> int:
    return max(Counter(places).values(), default=0)


def _held_names(ledger: Holders | None, device_class: str) -> set[str]:
    holdings = [
        holding
        for allocation in (ledger.allocations if ledger is not None else {}).values()
        for holding in allocation.holdings
    ]
    if device_class == CPU_CLASS:
        return {f"cpu-{cpu}" for holding in holdings for cpu in holding.cpus}
    return {name for holding in holdings for name in holding.devices.get(device_class, ())}
