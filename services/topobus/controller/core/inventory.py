"""Inventories as ResourceSlices: what kube-scheduler would see of a node, without a cluster.

Flows in: a node's inventories and ledger. Flows out: one slice a class (driver `<class>.topobus.dev`, pool = the node), and who holds what. Attributes of
the driver stand in its domain; the standard ones (`resource.kubernetes.io/...`) are derived from the device's fields, and what is unknown is absent, never 0.
A sick device is a tainted one. Source: knowledge note dynamic-resource-allocation, 1.3 (standard attributes), KEP-5055 (taints).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from topobus.contracts.kubernetes.limits import MAX_ATTRIBUTES, MAX_DEVICES, MAX_TEXT
from topobus.contracts.kubernetes.resource import Attribute, Capacity, Pool, SliceDevice, SliceSpec, Taint
from topobus.controller.core.values import DeviceId, Slice
from topobus.domain.device import AttributeValue, Device, Inventory, driver_name
from topobus.domain.health import HealthState
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.quantity import Quantity, QuantityForm
from topobus.domain.request import Owner

__all__ = ["HEALTH_TAINT", "STANDARD_DOMAIN", "class_of_driver", "holders_from_ledger", "slices_from_inventory"]

STANDARD_DOMAIN = "resource.kubernetes.io"
HEALTH_TAINT = "topobus.dev/health"

_SUFFIX = driver_name("")
_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
_INT64 = 1 << 63
# 128 devices fit into a slice, 64 when one has a taint or a list; sickness comes and goes, so slices are always cut for the worse case.
_DEVICES_PER_SLICE = MAX_DEVICES // 2


def slices_from_inventory(inventory: Inventory) -> tuple[Slice, ...]:
    """Show an inventory as slices.

    Order: devices as in the inventory (by name); slice names carry an index, so the order of slices is theirs.
    """
    driver = driver_name(inventory.device_class)
    devices = tuple(_device(one) for one in inventory.devices)
    chunks = [devices[start : start + _DEVICES_PER_SLICE] for start in range(0, len(devices), _DEVICES_PER_SLICE)]
    pool = Pool(name=inventory.node, generation=inventory.generation, resource_slice_count=max(len(chunks), 1))
    return tuple(
        Slice(
            f"{inventory.node}-{inventory.device_class}-{index:03d}",
            SliceSpec(driver=driver, pool=pool, node_name=inventory.node, devices=chunk),
        )
        for index, chunk in enumerate(chunks)
    )


def holders_from_ledger(ledger: Ledger, cpu_devices: Iterable[Device] = ()) -> dict[DeviceId, Owner]:
    """Say which devices of a node are held and by whom; CPUs too, by their device names."""
    names = {one.cpu: one.name for one in cpu_devices if one.cpu is not None}
    held: dict[DeviceId, Owner] = {}
    for key in sorted(ledger.allocations):
        allocation = ledger.allocations[key]
        cpus = CpuSet()
        for holding in allocation.holdings:
            cpus |= holding.cpus
            for device_class, devices in holding.devices.items():
                for device in devices:
                    held[DeviceId(driver_name(device_class), ledger.node, device)] = allocation.owner
        for cpu in cpus:
            if cpu in names:
                held[DeviceId(driver_name("cpu"), ledger.node, names[cpu])] = allocation.owner
    return held


def class_of_driver(driver: str) -> str | None:
    """Name the device class behind a driver of ours; None for a foreign one.

    >>> class_of_driver("gpu.topobus.dev"), class_of_driver("gpu.example.com")
    ('gpu', None)
    """
    return driver.removesuffix(_SUFFIX) if driver.endswith(_SUFFIX) and driver != _SUFFIX else None


def _device(one: Device) -> SliceDevice:
    attributes = _standard_attributes(one) | _own_attributes(one)
    room = MAX_ATTRIBUTES - len(one.capacity)
    return SliceDevice(
        name=one.name,
        attributes=dict(list(attributes.items())[:room]),
        capacity={
            _identifier(name): Capacity(value=str(Quantity.of(amount, QuantityForm.BINARY)))
            for name, amount in sorted(one.capacity.items())
            if amount >= 0
        },
        taints=_taints(one),
    )


def _standard_attributes(one: Device) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    if one.pcie_root:
        found[f"{STANDARD_DOMAIN}/pcieRoot"] = Attribute(string=one.pcie_root)
    if one.pci is not None:
        found[f"{STANDARD_DOMAIN}/pciBusID"] = Attribute(string=str(one.pci))
    if one.numa_nodes is not None and len(one.numa_nodes) == 1:
        found[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(int_=one.numa_nodes.lowest)
    elif one.numa_nodes:
        found[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(ints=one.numa_nodes.ids)
    return found


def _own_attributes(one: Device) -> dict[str, Attribute]:
    """Collect the fields that a selector may want, then what the driver says; the driver's word wins over a field's."""
    texts = {
        "vendor": one.vendor,
        "model": one.model,
        "uuid": one.uuid,
        "parent": one.parent,
        "pcieSwitch": str(one.pcie_switch) if one.pcie_switch is not None else "",
    }
    numbers = {"cpu": one.cpu, "core": one.core, "socket": one.socket, "l3": one.l3}
    fields: dict[str, AttributeValue] = {name: text for name, text in texts.items() if text}
    fields |= {name: number for name, number in numbers.items() if number is not None}
    fields |= {_identifier(name): value for name, value in sorted(one.attributes.items())}
    return {name: _attribute(name, value) for name, value in fields.items() if not isinstance(value, int) or -_INT64 <= value < _INT64}


def _attribute(name: str, value: AttributeValue) -> Attribute:
    """Type an attribute: a text under a name that ends in `Version` is a version when it can be one, as DRA drivers publish it."""
    if isinstance(value, bool):
        return Attribute(bool_=value)
    if isinstance(value, int):
        return Attribute(int_=value)
    if name.lower().endswith("version") and _VERSION.fullmatch(value) and len(value) <= MAX_TEXT:
        return Attribute(version=value)
    return Attribute(string=value[:MAX_TEXT])


def _identifier(name: str) -> str:
    """Make a legal name: a C identifier of at most 32 characters, after a domain where there is one."""
    domain, slash, last = name.rpartition("/")
    cleaned = _IDENTIFIER.sub("_", last)[:32]
    return domain + slash + (f"_{cleaned}"[:32] if not cleaned or cleaned[0].isdigit() else cleaned)


def _taints(one: Device) -> tuple[Taint, ...]:
    """Taint what may not be handed out: evidence of a fault also evicts, mere silence does not."""
    if one.health.is_allocatable:
        return ()
    effect = "NoExecute" if one.health.state is HealthState.UNHEALTHY else "NoSchedule"
    return (Taint(key=HEALTH_TAINT, value=str(one.health.state), effect=effect),)
