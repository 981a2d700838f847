"""`topobus inventory`: the devices of one or all classes, with their place, health and holder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.render.holders import Holder, Holders, holders_of
from topobus.cli.render.leaves import HEALTH_STYLES, short_address
from topobus.cli.system.responding_services import as_of_now
from topobus.contracts.catalogue import INVENTORY, LEDGER
from topobus.domain.cpu_groups import cpus_of
from topobus.domain.device import Device, Inventory
from topobus.domain.device_sharing import HeldShare
from topobus.domain.errors import PeerUnavailable
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.quantity import Quantity, QuantityForm
from topobus.domain.shares import SHARES
from topobus.sysfs.tree import natural_key

__all__ = ["amounts_text", "device_table", "inventory", "summary_table"]


def inventory(
    device_class: Annotated[
        str | None, Parameter(name="CLASS", help="gpu, nic, fpga, cpu or a plugin's class. Without it: a summary.")
    ] = None,
    /,
    *,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List devices: where they sit, how they are, who holds them."""
    return asyncio.run(_inventory(device_class, node, options))


async def _inventory(device_class: str | None, node: str | None, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        inventories = [entry.value for entry in await bus.list(INVENTORY)]
        ledgers = {entry.parts["node"]: entry.value for entry in await bus.list(LEDGER)}
        if not inventories:
            raise PeerUnavailable("no device service has published an inventory", next_step="`topobus doctor` tells what is missing")
        if node is not None:
            one_of("node", node, (each_inventory.node for each_inventory in inventories))
        if device_class is not None:
            one_of("device class", device_class, (each_inventory.device_class for each_inventory in inventories))
        chosen = await as_of_now(
            bus,
            (
                each_inventory
                for each_inventory in inventories
                if node in (None, each_inventory.node) and device_class in (None, each_inventory.device_class)
            ),
        )
    if output.is_json:
        output.document({"inventories": chosen})
    elif device_class is None:
        output.show(summary_table(chosen, ledgers))
    else:
        for class_inventory in chosen:
            output.show(device_table(class_inventory, holders_of(ledgers.get(class_inventory.node))))
    for each_inventory in chosen:
        for warning in each_inventory.warnings:
            output.show(Text(f"{each_inventory.node}: {each_inventory.device_class}: {warning}", "warn"))
    return ExitCode.OK


def summary_table(inventories: Sequence[Inventory], ledgers: dict[str, Ledger]) -> Table:
    """Count devices a node and class: all, held, free, and those that are not well."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("node", "class", "devices", "held", "free", "not well", "NUMA nodes", "found by", "generation"):
        table.add_column(title, justify="right" if title in ("devices", "held", "free", "not well", "generation") else "left")
    for class_inventory in inventories:
        holders = holders_of(ledgers.get(class_inventory.node))
        held = {device.name for device in class_inventory.devices if _is_held(device, holders)}
        sick = [device for device in class_inventory.devices if not device.health.is_allocatable]
        free = [device for device in class_inventory.devices if device.name not in held and device.is_allocatable]
        table.add_row(
            class_inventory.node,
            Text(class_text(class_inventory), "name"),
            str(len(class_inventory.devices)),
            str(len(held)),
            str(len(free)),
            Text(str(len(sick)), "fail" if sick else ""),
            ", ".join(f"{node}: {count}" for node, count in _by_numa(class_inventory.devices)) or "-",
            ", ".join(sorted({device.driver for device in class_inventory.devices if device.driver})) or "-",
            str(class_inventory.generation),
        )
    return table


def class_text(inventory: Inventory) -> str:
    """Name a class, and the resource under which pods know it when that is not ours.

    >>> class_text(Inventory(node="n", device_class="gpu-nvidia", generation=1, resource="nvidia.com/gpu"))
    'gpu-nvidia (nvidia.com/gpu)'
    """
    return f"{inventory.device_class} ({inventory.resource})" if inventory.resource else inventory.device_class


def device_table(inventory: Inventory, holders: Holders) -> Table:
    """List the devices of one inventory; CPUs core by core would be hundreds of lines, so they are summed up a NUMA node."""
    if inventory.device_class == "cpu":
        return _cpu_table(inventory, holders)
    title = f"{inventory.node}: {class_text(inventory)}"
    table = Table(box=box.SIMPLE_HEAD, header_style="title", title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    # Who holds a device may have a long name; where it sits and how it is must not be pushed out by it.
    for column, least in (("device", 16), ("model", 10), ("NUMA", 4), ("below", 7), ("health", 10), ("held by", 10)):
        is_elastic = column in ("model", "held by")
        table.add_column(column, no_wrap=is_elastic, overflow="ellipsis" if is_elastic else "fold", min_width=least, max_width=24)
    for device in inventory.devices:
        holder = holders.by_device.get((device.device_class, device.name))
        sharers = holders.sharers.get((device.device_class, device.name), ())
        worst = device.health.worst
        health = device.health.state.value + (f": {worst.reason}" if worst else "")
        if device.maintenance is not None:
            health += f", {device.why_not}"
        table.add_row(
            Text(device.name, "name"),
            device.model or device.vendor or "-",
            str(device.numa_nodes) if device.numa_nodes is not None else "?",
            short_address(str(device.pcie_switch)) if device.pcie_switch else device.pcie_root.removeprefix("pci") or "-",
            Text(health, HEALTH_STYLES[device.health.state] or "ok"),
            _shares_text(device, sharers)
            if device.sharing is not None and (sharers or holder is None)
            else Text(holder.name, holder.style)
            if holder
            else Text("-", "faint"),
        )
        for sharer, share in sharers:
            numbers = ", ".join(f"::{number}" for number in share.replicas) or "share"
            table.add_row(Text(f"└ {numbers}", "faint"), amounts_text(share), "", "", "", Text(sharer.name, sharer.style))
    return table


def amounts_text(share: HeldShare) -> str:
    """Say how much a share is.

    >>> amounts_text(HeldShare(amounts={"memory": 20 << 30, "shares": 1}))
    'memory 20Gi, shares 1'
    """
    return ", ".join(f"{name} {Quantity.of(amount, QuantityForm.BINARY)}" for name, amount in sorted(share.amounts.items())) or "-"


def _shares_text(device: Device, sharers: Sequence[tuple[Holder, HeldShare]]) -> Text:
    used = sum(share.amounts.get(SHARES, 0) for _, share in sharers)
    return Text(f"{used} of {device.capacity.get(SHARES, 0)} shares", "" if used else "faint")


def _cpu_table(inventory: Inventory, holders: Holders) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="title", title=f"{inventory.node}: cpu", title_justify="left")
    for title in ("NUMA", "cpus", "cores", "held", "free"):
        table.add_column(title)
    by_node: dict[str, list[Device]] = {}
    for device in inventory.devices:
        by_node.setdefault(str(device.numa_nodes) if device.numa_nodes is not None else "?", []).append(device)
    for node, devices in by_node.items():
        cpus = CpuSet.of(cpu for device in devices for cpu in cpus_of(device))
        held = CpuSet.of(cpu for cpu in cpus if cpu in holders.by_cpu)
        free = CpuSet.of(cpu for device in devices if device.is_allocatable for cpu in cpus_of(device)) - held
        table.add_row(node, str(cpus), str(sum(map(_cores, _distinct(devices)))), str(held) or "-", f"{len(free)}")
    return table


def _distinct(devices: Iterable[Device]) -> list[Device]:
    """Give one device a core, and all groups of CPUs."""
    return list({device.core if device.cpu is not None else device.name: device for device in devices}.values())


def _cores(device: Device) -> int:
    cores = device.attributes.get("cores")
    return cores if device.cpu is None and isinstance(cores, int) else 1


def _by_numa(devices: Iterable[Device]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for device in devices:
        key = str(device.numa_nodes) if device.numa_nodes is not None else "?"
        counts[key] = counts.get(key, 0) + 1
    return sorted(counts.items(), key=lambda item: natural_key(item[0]))


def _is_held(device: Device, holders: Holders) -> bool:
    if device.cpu is not None:
        return device.cpu in holders.by_cpu
    return (device.device_class, device.name) in holders.by_device
