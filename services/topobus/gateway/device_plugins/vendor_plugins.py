"""Detects whether a vendor's own device plugin serves a resource on this node that a profile names.
Of two plugins with one resource, kubelet keeps the last to register.

A plugin is recognised by its socket while a process listens on it, and, before our first
registration, by what kubelet can allocate of the resource. Its API is not called, because NVIDIA's
plugin sends a change of health to only one stream.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from topobus.gateway.device_plugins.pod_resources import PodResourcesReader
from topobus.gateway.device_plugins.sockets import identity
from topobus.values.vendor_profiles import socket_names

__all__ = ["VendorPlugins"]

_CONNECT_LIMIT_S = 1.0


class VendorPlugins:
    """Looks for the plugin of a resource."""

    def __init__(self, folders: Sequence[Path], pods: PodResourcesReader) -> None:
        """Device plugins serve in `folders`."""
        self._folders = tuple(folders)
        self._pods = pods

    async def rival_of(self, resource: str, *, own_sockets: str, is_first: bool) -> str:
        """Return which plugin serves the resource. Empty: none.

        Shapes: own_sockets — pattern of the names that gateways give to this resource's sockets;
        is_first — we have not registered it yet, so what kubelet can allocate of it is not ours,
        unless an ending gateway of ours serves it.
        """
        path = await asyncio.to_thread(self._listening, socket_names(resource))
        if path is not None:
            return f"another device plugin serves {resource} at {path}"
        if not is_first or await asyncio.to_thread(self._is_served_by, own_sockets):
            return ""
        count = await self._pods.allocatable(resource)
        return f"kubelet can allocate {count} devices of {resource} that another device plugin lists" if count else ""

    def _listening(self, names: Sequence[str]) -> Path | None:
        return next((folder / name for folder in self._folders for name in names if _is_listening(folder / name)), None)

    def _is_served_by(self, pattern: str) -> bool:
        return any(_is_listening(path) for folder in self._folders for path in sorted(folder.glob(pattern)))


def _is_listening(path: Path) -> bool:
    """Return whether a process accepts connections. A dead process leaves its socket."""
    if identity(path) is None:
        return False
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_LIMIT_S)
            probe.connect(str(path))
    except OSError:
        return False
    return True
