"""The node allocation state of classic DRA drivers: allocatable, allocated and prepared devices of
one node, as one object.

It is computed whenever it is requested and never stored: each of its parts has its one writer
already (device services publish what is allocatable, `topology` writes what is allocated and, as
the gateway reports it, prepared), and a stored copy would be a second one. The shape follows the
objects of that name that classic drivers kept (nas.gpu.resource.nvidia.com/v1alpha1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from topobus.engine.ledger.holdings import names_of
from topobus.values.device import Device, Inventory
from topobus.values.ledger import Allocation, Ledger
from topobus.values.request import OwnerKind

__all__ = ["API_VERSION", "KIND", "node_allocation_state"]

API_VERSION = "nas.topobus.dev/v1alpha1"
KIND = "NodeAllocationState"


def node_allocation_state(node: str, inventories: Iterable[Inventory], ledger: Ledger | None) -> dict[str, Any]:
    """Show one node.

    Shapes: allocatedClaims and preparedClaims — claim uid to namespace, name and devices by class;
            otherHolders — the holdings of pods and device plugins, which claims cannot have either.
    Order: devices by class and name, claims by uid.
    """
    own = sorted(
        (inventory for inventory in inventories if inventory.node == node), key=lambda inventory: inventory.device_class
    )
    held = sorted((ledger.allocations if ledger is not None else {}).items())
    claims = {
        allocation.owner.uid: _holding(allocation) for _, allocation in held if allocation.owner.kind is OwnerKind.CLAIM
    }
    prepared = {
        allocation.owner.uid: _holding(allocation)
        for _, allocation in held
        if allocation.owner.kind is OwnerKind.CLAIM and allocation.is_prepared
    }
    others = [
        {"kind": allocation.owner.kind.value, **_holding(allocation)}
        for _, allocation in held
        if allocation.owner.kind is not OwnerKind.CLAIM
    ]
    why = _why_not_ready(own, ledger)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": node},
        "spec": {
            "allocatableDevices": [_device(device) for inventory in own for device in inventory.devices],
            "allocatedClaims": claims,
            "preparedClaims": prepared,
            "otherHolders": others,
        },
        "status": {"state": "NotReady", "reason": why} if why else {"state": "Ready"},
    }


def _device(device: Device) -> dict[str, Any]:
    shown: dict[str, Any] = {"class": device.device_class, "name": device.name, "health": device.health.state.value}
    attributes = {"model": device.model, "uuid": device.uuid, "parent": device.parent}
    shown |= {key: value for key, value in attributes.items() if value}
    return shown | ({"capacity": dict(sorted(device.capacity.items()))} if device.capacity else {})


def _holding(allocation: Allocation) -> dict[str, Any]:
    return {
        "namespace": allocation.owner.namespace,
        "name": allocation.owner.name,
        "devices": {device_class: list(names) for device_class, names in names_of(allocation).items()},
    }


def _why_not_ready(inventories: list[Inventory], ledger: Ledger | None) -> str:
    if not inventories:
        return "no device service has published an inventory"
    return "" if ledger is not None else "topology has written no ledger"
