"""Keeps equal values of different nodes once, since most nodes of a fleet are alike.

It also keeps what a search needs of a device, derived once for all nodes that have an equal device.
Values are frozen, so a shared value behaves like an own one. What differs between nodes is not
shared: devices with a uuid, health, names.

Measured with DGX nodes (242 devices, 224 of them CPUs): 0.33 MiB a node instead of 1.35, and half
of the processor time to store a node (docs/explanation/large-fleets.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from msgspec import structs

from topobus.engine.allocation.pools import DeviceViews, reasons_unreadable
from topobus.engine.cel.seam import DeviceFacts, facts_of
from topobus.engine.shapes.cpu_places import for_claims
from topobus.engine.shapes.in_slices import SliceShapes, slice_shapes
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.codec import encode
from topobus.values.cpu_groups import is_cpu_group
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS, DRIVER
from topobus.values.health import HEALTHY, DeviceHealth, HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine
from topobus.values.own_shapes import OwnShape

__all__ = ["SharedValues", "shape_key"]

T = TypeVar("T")

# Different values kept. Beyond that all are dropped, and kept again as they arrive. A kind of node
# has some hundred, each of some kilobytes.
_MOST_VALUES = 50_000


@dataclass(eq=False)
class _Form:
    """A device as slices show it, with what searches derive from it."""

    device: SliceDevice

    @cached_property
    def facts(self) -> DeviceFacts:
        return facts_of(DRIVER, self.device)

    @cached_property
    def unreadable(self) -> tuple[str, str]:
        return reasons_unreadable(self.device)


@dataclass(eq=False)
class _Kind:
    """Devices that differ only in their health."""

    device: Device
    form: _Form | None = None


class SharedValues(DeviceViews):
    """Values that are kept once."""

    def __init__(self) -> None:
        self._parts: dict[bytes, Any] = {}
        self._kinds: dict[bytes, _Kind] = {}
        self._together: dict[bytes, tuple[_Kind, ...]] = {}
        """By the digest of all devices of a node and class."""
        self._kinds_by_attributes: dict[int, _Kind] = {}
        """By the identity of the attributes, which all devices of a kind share."""
        self._forms: dict[int, _Form] = {}
        """By the identity of the attributes, which a slice's device keeps when its counters or taints
        are replaced."""
        self._shapes: dict[tuple[bytes, ...], SliceShapes] = {}
        """By what the operator adds and the keys of a node's inventories."""

    def machine(self, machine: Machine) -> Machine:
        """Return an equal machine. Cost: one encoding."""
        self._bound()
        return structs.replace(
            machine,
            numa_nodes=self._part(machine.numa_nodes),
            cpus=self._part(machine.cpus),
            distances=self._part(machine.distances),
            pci_devices=self._part(machine.pci_devices),
        )

    def inventory(self, inventory: Inventory) -> Inventory:
        """Return an equal inventory. Cost: one encoding of the devices without a uuid."""
        self._bound()
        healths: dict[tuple[HealthState, str], DeviceHealth] = {}
        devices = [
            device if kind is None else structs.replace(kind.device, health=_first_alike(device.health, healths))
            for device, kind in zip(inventory.devices, self._kinds_of(inventory.devices), strict=True)
        ]
        return structs.replace(inventory, devices=tuple(devices))

    def slice_device(self, device: Device) -> SliceDevice:
        """Convert a device to its form in a slice. Healthy devices of one kind are one value."""
        kind = self._kinds_by_attributes.get(id(device.attributes))
        is_plain = device.health.state is HealthState.HEALTHY and not device.health.conditions and device.is_allocatable
        if kind is None or kind.device.attributes is not device.attributes or not is_plain:
            return slice_device(device)
        if kind.form is None:
            kind.form = self._keep_form(slice_device(device))
        return kind.form.device

    def shapes(
        self,
        inventories: Mapping[bytes, Inventory],
        own_shapes: Sequence[OwnShape] = (),
        reserved: CpuSet | None = None,
    ) -> SliceShapes:
        """Derive the shapes of a node, once for all nodes with the same devices.

        Shapes: inventories — all of the node's, the CPUs' among them, by their `shape_key`;
                own_shapes — those that its operator adds; reserved — CPUs that no claim gets.
        """
        self._bound()
        reserved = reserved if reserved is not None else CpuSet()
        key = (encode((own_shapes, reserved)), *sorted(inventories))
        shapes = self._shapes.get(key)
        if shapes is None:
            of_node = [for_claims(inventory, None, reserved) for inventory in inventories.values()]
            shapes = self._shapes[key] = slice_shapes(shapes_of(of_node, own_shapes))
            for device in shapes.devices:
                self._keep_form(device)
        return shapes

    def facts(self, driver: str, device: SliceDevice) -> DeviceFacts:
        """Return what selectors see.

        Errors: raises ValueError for a capacity that is no quantity.
        """
        form = self._form_of(device)
        return form.facts if form is not None and driver == DRIVER else facts_of(driver, device)

    def unreadable(self, device: SliceDevice) -> tuple[str, str]:
        """Return why every selector fails on the device."""
        form = self._form_of(device)
        return form.unreadable if form is not None else reasons_unreadable(device)

    def _keep_form(self, device: SliceDevice) -> _Form:
        form = self._forms[id(device.attributes)] = _Form(device)
        return form

    def _form_of(self, device: SliceDevice) -> _Form | None:
        form = self._forms.get(id(device.attributes))
        is_same = (
            form is not None
            and form.device.attributes is device.attributes
            and form.device.capacity is device.capacity
            and form.device.allow_multiple_allocations == device.allow_multiple_allocations
        )
        return form if is_same else None

    def _part(self, value: T) -> T:
        part: T = self._parts.setdefault(encode(value), value)
        return part

    def _kinds_of(self, devices: tuple[Device, ...]) -> tuple[_Kind | None, ...]:
        """Give each device's kind; None: it has a uuid, so no other node has its like.

        Most nodes have all devices of a class alike, and are known by these together.
        """
        bare = tuple([structs.replace(device, health=HEALTHY) for device in devices if not device.uuid])
        if len(bare) < len(devices):
            return tuple([None if device.uuid else self._kind(device) for device in devices])
        together = hashlib.sha256(encode(bare)).digest()
        kinds = self._together.get(together)
        if kinds is None:
            kinds = self._together[together] = tuple(map(self._kind, devices))
        return kinds

    def _kind(self, device: Device) -> _Kind:
        bare = encode(structs.replace(device, health=HEALTHY))
        kind = self._kinds.get(bare)
        if kind is None:
            kind = self._kinds[bare] = self._kinds_by_attributes[id(device.attributes)] = _Kind(device)
        return kind

    def _bound(self) -> None:
        """Drop all values when there are too many, so that values of former nodes do not stay."""
        if len(self._kinds) + len(self._together) + len(self._parts) + len(self._shapes) > _MOST_VALUES:
            self._parts.clear()
            self._kinds.clear()
            self._together.clear()
            self._kinds_by_attributes.clear()
            self._forms.clear()
            self._shapes.clear()


def shape_key(inventory: Inventory) -> bytes:
    """Compute a digest of all of an inventory that the shapes of its node depend on.

    Cost: one encoding of the devices, CPUs aside.
    """
    seen = (
        sorted({_shown_cpus(device) for device in inventory.devices})
        if inventory.device_class == CPU_CLASS
        else list(map(_bare, inventory.devices))
    )
    return hashlib.sha256(encode((inventory.device_class, inventory.resource, seen))).digest()


def _shown_cpus(device: Device) -> bytes:
    """Keep of a CPU what tells the sockets, and all of a group, whose CPUs may be counted."""
    return encode(
        structs.replace(device, health=HEALTHY, maintenance=None)
        if is_cpu_group(device)
        else (device.numa_nodes, device.socket)
    )


def _bare(device: Device) -> Device:
    """Leave out what is of no matter to shapes and differs between nodes and over time."""
    return structs.replace(device, health=HEALTHY, uuid="", attributes={}, maintenance=None, is_spare=False)


def _first_alike(health: DeviceHealth, healths: dict[tuple[HealthState, str], DeviceHealth]) -> DeviceHealth:
    """Give one value for all devices that are so since the same moment."""
    return health if health.conditions else healths.setdefault((health.state, health.since), health)
