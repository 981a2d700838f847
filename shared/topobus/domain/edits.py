"""Container edits: what a device adds to a container, in CDI's terms.

One value serves three doors: the device plugin's Allocate answer, a CDI file, and an OCI spec. Source: CDI spec 1.1.0, containerEdits.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ContainerEdits", "DeviceNode", "Mount"]


class DeviceNode(Struct, frozen=True, kw_only=True):
    """A device node to create in the container. `permissions` is a subset of `rwm`."""

    path: str
    host_path: str = ""
    permissions: str = "rw"


class Mount(Struct, frozen=True, kw_only=True):
    """A bind mount."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")


class ContainerEdits(Struct, frozen=True, kw_only=True):
    """Edits for one container. Environment keys must be unique per class: kubelet keeps the first of two and only logs it."""

    env: dict[str, str] = {}
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    annotations: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Say whether nothing would be edited (CDI refuses such a device)."""
        return not (self.env or self.device_nodes or self.mounts)
