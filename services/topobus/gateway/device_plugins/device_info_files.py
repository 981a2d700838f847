"""Writes the files by which Multus learns of devices with PCI addresses as ids, and removes those
of devices that are no longer held.

A file that cannot be written is logged and stops nothing, because pods that do not use Multus need
none. Each write replaces the file in one step. Files stay while the gateway is not running, because
a pod may be between Allocate and its attachment. Those of devices that are not held are removed
when the gateway runs again.
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
        # The list of held devices is outdated as soon as another device's file is written.
        self._lock = asyncio.Lock()

    async def store(self, resource: str, uses: Mapping[str, PciUse]) -> None:
        """Write the file of each device, by its kubelet id."""
        documents = {file_name(resource, device_id): device_info(use) for device_id, use in sorted(uses.items())}
        try:
            async with self._lock:
                self._cleaned.pop(resource, None)
                await asyncio.to_thread(self._write, documents)
        except OSError as err:
            get_logger().warning("device-info.unwritten", resource=resource, folder=str(self._folder), error=str(err))

    async def clean(self, resource: str, held: Callable[[], Collection[str]]) -> None:
        """Remove the files of a resource's devices that are not held.

        Does nothing if that was done already.

        Shapes: held — returns the kubelet ids of all devices held now; a device counts as held
        before its file is written.
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
