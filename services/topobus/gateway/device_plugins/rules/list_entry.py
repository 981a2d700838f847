"""One line of a device plugin's list, as the gateway keeps it."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ListEntry"]


class ListEntry(Struct, frozen=True, kw_only=True):
    """One device in the device plugin's list.

    `nodes` None: no topology is sent, which differs from node 0.
    """

    id: str
    is_healthy: bool
    nodes: tuple[int, ...] | None = None
    reason: str = ""
    """Why it is not healthy, for the error of an Allocate. kubelet has no field for it."""
    is_held: bool = False
    """It is held, so it must stay in the list."""
    kubelet_id: str = ""
    """Its id for kubelet. Empty: its name `id` (see `device_ids`)."""
    is_unnamed: bool = False
    """It cannot be named as the resource's devices are, so it is not offered."""

    @property
    def wire_id(self) -> str:
        """The id that kubelet gets."""
        return self.kubelet_id or self.id
