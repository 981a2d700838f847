"""Writes the files by which Multus learns of devices with PCI addresses as ids, and removes those
of devices that nobody has any more.

Flows in: the devices of an Allocate; what is held. Flows out: files in Multus' folder. A file
that cannot be written is told in the log and stops nothing: pods that do not use Multus need
none. Each write replaces the file in one step. Files are kept while the gateway stands still,
for a pod may be between Allocate and its attachment; those of devices that nobody holds go
when the gateway serves again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from topobus.devicekit.containers.cdi_files import write
from topobus.gateway.device_plugins.rules.multus import PciUse, device_info, file_name, is_file_of
from topobus.process.logging import get_logger

__all__ = ["DeviceInfoFiles"]


class DeviceInfoFiles:
    """The files of our resources in Multus' folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cleaned: dict[str, frozenset[str]] = {}
        # A look at what is held is of no use any more once another device's file is written.
        self._lock = asyncio.Lock()

    async def store(self, resource: str, uses: Mapping[str, PciUse]) -> None:
        """Write the file of each device, by its id towards kubelet."""
        documents = {file_name(resource, device_id): device_info(use) for device_id, use in sorted(uses.items())}
        try:
            async with self._lock:
                self._cleaned.pop(resource, None)
                await asyncio.to_thread(self._write, documents)
        except OSError as err:
            get_logger().warning("device-info.unwritten", resource=resource, folder=str(self._folder), error=str(err))

    async def clean(self, resource: str, held: Callable[[], Collection[str]]) -> None:
        """Remove the files of a resource's devices that are not held.

        Nothing where that was done already.

        Shapes: held — gives the ids towards kubelet of what is held now; a device counts as held
        from before its file is written.
        """
        async with self._lock:
            kept = frozenset(file_name(resource, device_id) for device_id in held())
            if self._cleaned.get(resource) == kept:
                return
            try:
                await asyncio.to_thread(self._remove, resource, kept)
            except OSError as err:
                get_logger().warning(
                    "device-info.unremoved", resource=resource, folder=str(self._folder), error=str(err)
                )
            self._cleaned[resource] = kept

    def _write(self, documents: Mapping[str, bytes]) -> None:
        for name, document in documents.items():
            write(self._folder, name, document)

    def _remove(self, resource: str, kept: Collection[str]) -> None:
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            if is_file_of(resource, path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
