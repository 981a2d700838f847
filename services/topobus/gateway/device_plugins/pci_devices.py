"""Describes devices whose ids are PCI addresses to containers and Multus, as the SR-IOV device
plugin does: by variables in the Allocate answer, and by a file for each device.

Nothing here chooses or refuses a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from topobus.formats.messages.messages import Prepared
from topobus.gateway.device_plugins.device_info_files import DeviceInfoFiles
from topobus.gateway.device_plugins.rules.device_ids import address_of
from topobus.gateway.device_plugins.rules.multus import PciUse, variables
from topobus.gateway.node_state import NodeState, Offer
from topobus.values.edits import ContainerEdits

__all__ = ["PciDevices"]


class PciDevices:
    """The devices of one resource."""

    def __init__(self, offer: Offer, state: NodeState, folder: Path) -> None:
        """`folder` is Multus' folder."""
        self._offer = offer
        self._state = state
        self._files = DeviceInfoFiles(folder)

    async def tell(self, names: Sequence[str], prepared: Prepared) -> dict[str, str]:
        """Write the files of these devices, and return the container's variables."""
        inventory = self._state.inventories().get(self._offer.device_class)
        uses: dict[str, PciUse] = {}
        for name in names:
            entry = self._state.entry(self._offer.resource, name)
            device = inventory.device(name) if inventory is not None else None
            if entry is None or device is None or device.pci is None:
                continue
            nodes = (*prepared.edits[name].device_nodes, *prepared.common.device_nodes)
            rdma = device.attributes.get("rdmaDevice", "")
            uses[entry.wire_id] = PciUse(
                address=device.pci,
                edits=ContainerEdits(device_nodes=nodes),
                rdma_device=rdma if isinstance(rdma, str) else "",
                physical=address_of(device.parent, self._offer.device_class),
            )
        await self._files.store(self._offer.resource, uses)
        return variables(self._offer.resource, uses)

    async def follow(self) -> None:
        """Remove the files of devices that are not held, until cancelled."""
        while True:
            ticket = self._state.changed.ticket()
            await self._files.clean(self._offer.resource, self._held)
            await ticket.wait()

    def _held(self) -> frozenset[str]:
        return frozenset(entry.wire_id for entry in self._state.entries(self._offer.resource) if entry.is_held)
