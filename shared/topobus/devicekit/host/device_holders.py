"""Reads the holders of the devices of one class on this node from the node's ledger.

Flows in: the ledger, read when it is needed. Flows out: device names with their owners. The
ledger is not watched: it is written for each pod and claim, while a device's health, of which the
owners are notified, seldom changes.
"""

from __future__ import annotations

from topobus.bus.bus import Bus
from topobus.engine.ledger.device_users import owners_of_devices, pods_of_devices
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.request import Owner

__all__ = ["DeviceHolders"]


class DeviceHolders:
    """The holders of one class's devices, as last read."""

    def __init__(self, bus: Bus, *, node: str, device_class: str) -> None:
        self._bus = bus
        self._node = node
        self._class = device_class
        self._owners: dict[str, tuple[Owner, ...]] | None = None
        self._pods: dict[str, tuple[Owner, ...]] = {}

    async def read(self) -> bool:
        """Read the ledger; when it cannot be read, what was known stands.

        True: what is known now is what was read.
        """
        try:
            entry = await self._bus.get(LEDGER.read_as(Holders), node=self._node)
        except (PeerUnavailable, ContractError) as err:
            get_logger().warning("ledger.unread", why=err.message)
            return False
        ledger = entry.value if entry is not None else None
        self._owners, self._pods = owners_of_devices(ledger, self._class), pods_of_devices(ledger, self._class)
        return True

    @property
    def held(self) -> frozenset[str] | None:
        """Names of devices that somebody holds.

        None while nobody knows, and then nothing counts as free.
        """
        return None if self._owners is None else frozenset(self._owners)

    def owners(self, device: str) -> tuple[Owner, ...]:
        """Who holds a device; empty as well while nobody knows."""
        return (self._owners or {}).get(device, ())

    def pods(self, device: str) -> tuple[Owner, ...]:
        """Which pods use a device, by whichever door."""
        return self._pods.get(device, ())
