"""Listings of devices: counts by node and class, the devices of one inventory, and the health of
devices.

The rows have the fields for programs and selectors as well. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from topobus.cli.render.listing import Cell, Column, Fit, Listing, Row
from topobus.cli.render.styles import health_text, holder_style
from topobus.engine.drawing.leaves import short_address
from topobus.engine.drawing.letters import DrawnHolder, DrawnHolders, holders_of
from topobus.engine.health.silence import SERVICE_SILENT
from topobus.sysfs.tree import natural_key
from topobus.values.cpu_groups import cpus_of
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.health import Condition, HealthState
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.quantity import Quantity, QuantityForm
from topobus.values.shares import SHARES
from topobus.values.timestamps import short_time

__all__ = [
    "amounts_text",
    "class_text",
    "device_labels",
    "device_listing",
    "health_document",
    "health_listing",
    "holder_of",
    "summary_listing",
]


def summary_listing(inventories: Iterable[Inventory], ledgers: Mapping[str, Ledger]) -> Listing:
    """Count devices by node and class: all, held, free, and unhealthy.

    For several nodes there are also totals by class.
    """
    rows = tuple(_summary_row(inventory, holders_of(ledgers.get(inventory.node))) for inventory in inventories)
    numbers = [Column(title=title, fit=Fit.NUMBER) for title in ("devices", "held", "free", "not well")]
    return Listing(
        columns=(
            Column(title="node", fit=Fit.NAME),
            Column(title="class", fit=Fit.NAME),
            *numbers,
            Column(title="NUMA nodes"),
            Column(title="found by", gives_way=True),
            Column(title="generation", fit=Fit.NUMBER, gives_way=True),
            Column(title="resource", fit=Fit.NAME, is_wide=True),
            Column(title="models", is_wide=True),
            Column(title="warnings", is_wide=True),
        ),
        rows=rows,
        totals=_totals(rows) if len({row.labels["node"] for row in rows}) > 1 else (),
    )


def _totals(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Add up the numbers of summary rows by class."""
    by_class: dict[str, list[Row]] = {}
    for row in rows:
        by_class.setdefault(str(row.cells[1]), []).append(row)
    totals: list[Row] = []
    for device_class, of_class in sorted(by_class.items()):
        sums = [str(sum(int(str(row.cells[place])) for row in of_class)) for place in range(2, 6)]
        rest = ["-"] * (len(of_class[0].cells) - 6)
        totals.append(Row(cells=(Text(f"total of {len(of_class)}", "title"), Text(device_class, "name"), *sums, *rest)))
    return tuple(totals)


def _summary_row(inventory: Inventory, holders: DrawnHolders) -> Row:
    held = {device.name for device in inventory.devices if holder_of(device, holders) is not None}
    sick = [device for device in inventory.devices if not device.health.is_allocatable]
    free = [device for device in inventory.devices if device.name not in held and device.is_allocatable]
    return Row(
        name=f"{inventory.node}/{inventory.device_class}",
        cells=(
            inventory.node,
            Text(class_text(inventory), "name"),
            str(len(inventory.devices)),
            str(len(held)),
            str(len(free)),
            Text(str(len(sick)), "fail" if sick else ""),
            ", ".join(f"{node}: {count}" for node, count in _by_numa(inventory.devices)) or "-",
            ", ".join(sorted({device.driver for device in inventory.devices if device.driver})) or "-",
            str(inventory.generation),
            inventory.resource or f"topobus.dev/{inventory.device_class}",
            ", ".join(sorted({device.model for device in inventory.devices if device.model})) or "-",
            "; ".join(inventory.warnings) or "-",
        ),
        document=inventory,
        labels={"node": inventory.node, "class": inventory.device_class},
    )


def class_text(inventory: Inventory) -> str:
    """Name a class, and the resource that pods request it by when that is not ours.

    >>> class_text(Inventory(node="n", device_class="gpu-nvidia", generation=1, resource="nvidia.com/gpu"))
    'gpu-nvidia (nvidia.com/gpu)'
    """
    return f"{inventory.device_class} ({inventory.resource})" if inventory.resource else inventory.device_class


def device_listing(inventory: Inventory, holders: DrawnHolders, *, sums_up: bool = True) -> Listing:
    """List the devices of one inventory.

    CPUs core by core would be hundreds of lines, so people see totals by NUMA node.
    """
    if sums_up and inventory.device_class == "cpu":
        return _cpu_listing(inventory, holders)
    return Listing(
        title=f"{inventory.node}: {class_text(inventory)}",
        columns=(
            Column(title="device", fit=Fit.NAME),
            # A device's place, health and holder are more important than its model.
            Column(title="model", gives_way=True),
            Column(title="NUMA", fit=Fit.NAME),
            Column(title="below", fit=Fit.NAME, gives_way=True),
            Column(title="health"),
            Column(title="held by", fit=Fit.NAME),
            Column(title="since", fit=Fit.NAME, is_wide=True),
            Column(title="driver", fit=Fit.NAME, is_wide=True),
            Column(title="PCI", fit=Fit.NAME, is_wide=True),
            Column(title="root", fit=Fit.NAME, is_wide=True),
            Column(title="attributes", is_wide=True),
        ),
        rows=tuple(_device_row(inventory, device, holders) for device in inventory.devices),
    )


def device_labels(inventory: Inventory, device: Device, holder: DrawnHolder | None) -> dict[str, str]:
    """Return the labels of a device for selectors: its attributes, and those that every
    device has.
    """
    facts = {
        "node": inventory.node,
        "class": inventory.device_class,
        "name": device.name,
        "driver": device.driver,
        "model": device.model,
        "vendor": device.vendor,
        "role": device.role.value,
        "numa": str(device.numa_nodes) if device.numa_nodes is not None else "",
        "health": device.health.state.value,
        "reason": device.health.worst.reason if device.health.worst is not None else "",
        "holder": holder.name if holder is not None else "",
        "parent": device.parent,
    }
    attributes = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in device.attributes.items()
    }
    return attributes | {name: value for name, value in facts.items() if value}


def _device_row(inventory: Inventory, device: Device, holders: DrawnHolders) -> Row:
    place = (device.device_class, device.name)
    holder, sharers = holders.by_device.get(place), holders.sharers.get(place, ())
    worst = device.health.worst
    health = health_text(device.health.state, worst.reason if worst else "")
    if device.maintenance is not None or device.is_spare:
        health.append(f", {device.why_not}")
    held_by: Cell = Text(holder.name, holder_style(holder)) if holder else Text("-", "faint")
    if device.sharing is not None and (sharers or holder is None):
        held_by = _shares_text(device, sharers)
    return Row(
        name=device.name,
        cells=(
            Text(device.name, "name"),
            device.model or device.vendor or "-",
            str(device.numa_nodes) if device.numa_nodes is not None else "?",
            short_address(str(device.pcie_switch))
            if device.pcie_switch
            else device.pcie_root.removeprefix("pci") or "-",
            health,
            held_by,
            short_time(device.health.since) or "-",
            device.driver or "-",
            str(device.pci) if device.pci is not None else "-",
            device.pcie_root.removeprefix("pci") or "-",
            ", ".join(f"{name}={value}" for name, value in sorted(device.attributes.items())) or "-",
        ),
        below=tuple(_share_line(sharer, share) for sharer, share in sharers),
        document={
            "node": inventory.node,
            "device_class": inventory.device_class,
            "device": device,
            "holder": holder.name if holder else "",
        },
        labels=device_labels(inventory, device, holder),
    )


def _share_line(sharer: DrawnHolder, share: HeldShare) -> Text:
    numbers = ", ".join(f"::{number}" for number in share.replicas) or "share"
    return Text.assemble((f"└ {numbers}  ", "faint"), f"{amounts_text(share)}  ", (sharer.name, holder_style(sharer)))


def amounts_text(share: HeldShare) -> str:
    """Write the amounts of a share.

    >>> amounts_text(HeldShare(amounts={"memory": 20 << 30, "shares": 1}))
    'memory 20Gi, shares 1'
    """
    return (
        ", ".join(
            f"{name} {Quantity.of(amount, QuantityForm.BINARY)}" for name, amount in sorted(share.amounts.items())
        )
        or "-"
    )


def _shares_text(device: Device, sharers: Sequence[tuple[DrawnHolder, HeldShare]]) -> Text:
    used = sum(share.amounts.get(SHARES, 0) for _, share in sharers)
    return Text(f"{used} of {device.capacity.get(SHARES, 0)} shares", "" if used else "faint")


def _cpu_listing(inventory: Inventory, holders: DrawnHolders) -> Listing:
    by_node: dict[str, list[Device]] = {}
    for device in inventory.devices:
        by_node.setdefault(str(device.numa_nodes) if device.numa_nodes is not None else "?", []).append(device)
    return Listing(
        title=f"{inventory.node}: cpu",
        columns=(
            Column(title="NUMA", fit=Fit.NAME),
            Column(title="cpus"),
            Column(title="cores", fit=Fit.NUMBER),
            Column(title="held"),
            Column(title="free", fit=Fit.NUMBER),
            Column(title="not well", is_wide=True),
            Column(title="held by", is_wide=True),
        ),
        rows=tuple(
            _cpu_row(inventory, node, devices, holders)
            for node, devices in sorted(by_node.items(), key=lambda item: natural_key(item[0]))
        ),
    )


def _cpu_row(inventory: Inventory, node: str, devices: Sequence[Device], holders: DrawnHolders) -> Row:
    cpus = CpuSet.of(cpu for device in devices for cpu in cpus_of(device))
    held = CpuSet.of(cpu for cpu in cpus if cpu in holders.by_cpu)
    free = CpuSet.of(cpu for device in devices if device.is_allocatable for cpu in cpus_of(device)) - held
    sick = CpuSet.of(cpu for device in devices if not device.is_allocatable for cpu in cpus_of(device))
    owners = ", ".join(sorted({holders.by_cpu[cpu].name for cpu in held}))
    return Row(
        name=f"{inventory.node}/numa-{node}",
        cells=(
            node,
            str(cpus),
            str(sum(map(_cores, _distinct(devices)))),
            str(held) or "-",
            str(len(free)),
            str(sick) or "-",
            owners or "-",
        ),
        document={
            "node": inventory.node,
            "device_class": "cpu",
            "numa": node,
            "cpus": str(cpus),
            "held": str(held),
            "free": len(free),
            "not_well": str(sick),
        },
        labels={"node": inventory.node, "class": "cpu", "numa": node},
    )


def _distinct(devices: Iterable[Device]) -> list[Device]:
    """Return one device for each core, and all groups of CPUs."""
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


def holder_of(device: Device, holders: DrawnHolders) -> DrawnHolder | None:
    """Return who holds a device or a CPU."""
    if device.cpu is not None:
        return holders.by_cpu.get(device.cpu)
    return holders.by_device.get((device.device_class, device.name))


def health_listing(
    inventories: Iterable[Inventory], *, is_all: bool, ledgers: Mapping[str, Ledger]
) -> tuple[Listing, int]:
    """List the unhealthy devices, or all, and count the healthy ones that are left out.

    The devices of a class whose service is silent are one row: CPUs alone would fill screens.
    """
    rows: list[Row] = []
    well = 0
    for inventory in inventories:
        holders = holders_of(ledgers.get(inventory.node))
        unheard: list[Device] = []
        for device in inventory.devices:
            worst = device.health.worst
            if worst is not None and worst.reason == SERVICE_SILENT:
                unheard.append(device)
            elif worst is None and not is_all:
                well += 1
            else:
                rows.append(_health_row(inventory, device, holders))
        if unheard:
            rows.append(_silent_row(inventory, unheard))
    columns = (
        Column(title="device", fit=Fit.NAME),
        Column(title="node", fit=Fit.NAME),
        Column(title="health", fit=Fit.NAME),
        Column(title="since", fit=Fit.NAME),
        Column(title="what"),
        Column(title="held by", fit=Fit.NAME, gives_way=True),
        Column(title="do", fit=Fit.NAME, is_wide=True),
        Column(title="evidence", is_wide=True),
    )
    return Listing(columns=columns, rows=tuple(rows)), well


def health_document(inventory: Inventory, device: Device) -> dict[str, Any]:
    """Return a device's health for programs."""
    return {
        "node": inventory.node,
        "device_class": inventory.device_class,
        "device": device.name,
        "health": device.health,
    }


def _what_is_wrong(worst: Condition) -> str:
    """Return what is wrong.

    For a recovering device, what was wrong: its message is about a fault that no longer shows.
    """
    if worst.until:
        return (
            f"{worst.reason} before (it was: {worst.message}); watched until {short_time(worst.until)}, then "
            "given out again"
        )
    return f"{worst.reason}: {worst.message}" + (f" (do: {worst.action})" if worst.action != "none" else "")


def _health_row(inventory: Inventory, device: Device, holders: DrawnHolders) -> Row:
    worst = device.health.worst
    what = _what_is_wrong(worst) if worst is not None else "-"
    holder = holder_of(device, holders)
    return Row(
        name=device.name,
        cells=(
            Text(device.name, "name"),
            inventory.node,
            health_text(device.health.state),
            short_time(device.health.since) or "-",
            what,
            Text(holder.name, holder_style(holder)) if holder else Text("-", "faint"),
            str(worst.action) if worst else "-",
            ", ".join(f"{name}={value}" for name, value in sorted(worst.evidence.items())) or "-" if worst else "-",
        ),
        document=health_document(inventory, device),
        labels=device_labels(inventory, device, holder),
    )


def _silent_row(inventory: Inventory, devices: Sequence[Device]) -> Row:
    why = inventory.warnings[0] if inventory.warnings else "its service is silent"
    return Row(
        name=f"{inventory.node}/{inventory.device_class}",
        cells=(
            Text(f"{len(devices)} of class {inventory.device_class}", "name"),
            inventory.node,
            health_text(HealthState.UNKNOWN),
            "-",
            why,
            Text("-", "faint"),
            "-",
            "-",
        ),
        document=[health_document(inventory, device) for device in devices],
        labels={
            "node": inventory.node,
            "class": inventory.device_class,
            "health": HealthState.UNKNOWN.value,
            "reason": SERVICE_SILENT,
        },
    )
