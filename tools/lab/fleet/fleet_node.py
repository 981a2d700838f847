"""One simulated node of a fleet: its machine and devices as recorded, and a ledger that it alone
writes.

It publishes machine, inventories and alignment from a `NodeTemplate`, answers `hints`, and
otherwise what `PlayedLedger` answers. Its uuids, serial numbers and times are its own, as on a real
fleet, so a reader that keeps equal values once gains no more here than there.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from msgspec import Struct, structs

from lab.leaves.node_content import NodeContent, node_name
from lab.played_ledger import PlayedLedger
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.node_view import node_view
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import HintsReply, HintsRequest
from topobus.formats.messages.stored import from_stored
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.timestamps import rfc3339
from topobus.values.view import AlignmentOptions, NodeAlignment, NodeView

__all__ = ["FleetNode", "NodeTemplate", "node_template"]

# Any time: nodes only need to differ by it.
_FIRST_START = datetime(2026, 1, 1, tzinfo=UTC)


class NodeTemplate(Struct, frozen=True, kw_only=True):
    """What is equal on all nodes of a fleet."""

    machine: Machine
    inventories: tuple[Inventory, ...]
    alignment: NodeAlignment | None
    view: NodeView
    """The node as its engine sees it while nothing is held."""


def node_template(content: NodeContent, classes: frozenset[str]) -> NodeTemplate:
    """Read the publications of a recorded machine's services.

    Shapes: classes — the device classes that the fleet's nodes have.
    Errors: raises ContractError for bytes that no contract accepts, ValueError for a content
    without a machine.
    """
    machine: Machine | None = None
    inventories: list[Inventory] = []
    alignment: NodeAlignment | None = None
    for saying in content.sayings:
        if saying.noun == catalogue.MACHINE.name:
            machine = from_stored(catalogue.MACHINE, saying.data, where=saying.noun)
        elif saying.noun == catalogue.ALIGNMENT.name:
            alignment = from_stored(catalogue.ALIGNMENT, saying.data, where=saying.noun)
        elif saying.noun == catalogue.INVENTORY.name and saying.parts["device_class"] in classes:
            inventories.append(from_stored(catalogue.INVENTORY, saying.data, where=saying.noun))
    if machine is None:
        raise ValueError(f"{content.node}: nothing was recorded of its machine")
    options, reserved = (
        (alignment.options, alignment.reserved_cpus) if alignment is not None else (AlignmentOptions(), CpuSet())
    )
    view = node_view(machine, {inventory.device_class: inventory for inventory in inventories}, None, options, reserved)
    return NodeTemplate(machine=machine, inventories=tuple(inventories), alignment=alignment, view=view)


class FleetNode:
    """One node. Make it, then `start`."""

    def __init__(self, bus: Bus, template: NodeTemplate, index: int) -> None:
        self.name = node_name(index)
        self._bus = bus
        self._template = template
        self._started = rfc3339(_FIRST_START + timedelta(seconds=index))
        self._ledger = PlayedLedger(bus, self.name, lambda: structs.replace(template.view, node=self.name))

    async def start(self) -> None:
        """Publish everything, and answer from now on. Returns when all of it is stored.

        Errors: raises PeerUnavailable.
        """
        await self._bus.put(catalogue.MACHINE, self.machine(), node=self.name)
        if self._template.alignment is not None:
            alignment = structs.replace(self._template.alignment, node=self.name)
            await self._bus.put(catalogue.ALIGNMENT, alignment, node=self.name)
        for own in self.inventories():
            await self._bus.put(catalogue.INVENTORY, own, node=self.name, device_class=own.device_class)
            await self._bus.answer(catalogue.HINT, _no_opinion, node=self.name, device_class=own.device_class)
        await self._ledger.start()

    @property
    def ledger(self) -> Ledger:
        """The present ledger."""
        return self._ledger.ledger

    def machine(self) -> Machine:
        """Make the node's machine."""
        return structs.replace(self._template.machine, node=self.name)

    def inventories(self) -> list[Inventory]:
        """Make the node's inventories, with uuids, serial numbers and times of its own."""
        return [
            structs.replace(inventory, node=self.name, devices=tuple(map(self._own_device, inventory.devices)))
            for inventory in self._template.inventories
        ]

    def _own_device(self, device: Device) -> Device:
        health = structs.replace(device.health, since=self._started)
        if not device.uuid:
            return structs.replace(device, health=health)
        own_uuid = f"{device.device_class.upper()}-{uuid.uuid5(uuid.NAMESPACE_OID, f'{self.name}/{device.uuid}')}"
        attributes = {name: own_uuid if value == device.uuid else value for name, value in device.attributes.items()}
        return structs.replace(device, uuid=own_uuid, attributes=attributes, health=health)


async def _no_opinion(_: HintsRequest) -> HintsReply:
    """Answer for a device service that is present and has no hints of its own."""
    return HintsReply(hints=None)
