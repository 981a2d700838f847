"""Describes devices whose ids are PCI addresses to containers and Multus, as the SR-IOV device
plugin does: by variables in the Allocate answer, and by a file for each device.

Nothing here chooses or refuses a device. A file that cannot be written is logged and stops nothing,
because pods that do not use Multus need none. Files stay while the gateway is not running, because
a pod may be between Allocate and its attachment. Those of devices that are not held are removed
when the gateway runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from topobus.devicekit.containers.cdi_files import write
from topobus.formats.messages.messages import Prepared
from topobus.gateway.device_plugins.rules.device_ids import address_of
from topobus.gateway.device_plugins.rules.multus import PciUse, device_info, file_name, is_file_of, variables
from topobus.gateway.node_state import NodeState, Offer
from topobus.process.logging import get_logger
from topobus.values.edits import ContainerEdits

__all__ = ["PciDevices"]


class PciDevices:
    """The devices of one resource."""

    def __init__(self, offer: Offer, state: NodeState, folder: Path) -> None:
        """`folder` is Multus' folder."""
        self._offer = offer
        self._state = state
        self._folder = folder
        self._cleaned: frozenset[str] | None = None
        """The files of the devices that were held when the others were removed. None: they have to
        be removed again."""
        # The list of held devices is outdated as soon as another device's file is written.
        self._lock = asyncio.Lock()

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
        resource = self._offer.resource
        documents = {file_name(resource, device_id): device_info(use) for device_id, use in sorted(uses.items())}
        try:
            async with self._lock:
                self._cleaned = None
                await asyncio.to_thread(self._write, documents)
        except OSError as err:
            get_logger().warning("device-info.unwritten", resource=resource, folder=str(self._folder), error=str(err))
        return variables(resource, uses)

    async def follow(self) -> None:
        """Remove the files of devices that are not held, until cancelled."""
        while True:
            ticket = self._state.changed.ticket()
            await self._clean()
            await ticket.wait()

    async def _clean(self) -> None:
        """Remove the files of devices that are not held. A device is held before its file is written."""
        resource = self._offer.resource
        async with self._lock:
            entries = self._state.entries(resource)
            held = frozenset(file_name(resource, entry.wire_id) for entry in entries if entry.is_held)
            if held == self._cleaned:
                return
            try:
                await asyncio.to_thread(self._remove_others, held)
            except OSError as err:
                get_logger().warning(
                    "device-info.unremoved", resource=resource, folder=str(self._folder), error=str(err)
                )
            self._cleaned = held

    def _write(self, documents: Mapping[str, bytes]) -> None:
        for name, document in documents.items():
            write(self._folder, name, document)

    def _remove_others(self, held: Collection[str]) -> None:
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if is_file_of(self._offer.resource, path.name) and path.name not in held:
                path.unlink(missing_ok=True)
