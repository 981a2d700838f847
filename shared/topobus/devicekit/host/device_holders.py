"""Reads the holders of the devices of one class on this node from the node's ledger.

For health the ledger is read when it is needed: it is written for each pod and claim, while the
health of a device, which the owners are notified of, seldom changes. Only a class whose drivers
give readings follows it, because each line of `/metrics` names the holder of the moment, and one
with spares, because a device that an owner has is none.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.bus.bus import Bus
from topobus.bus.streams.state import ChangeKind
from topobus.engine.ledger.device_users import owners_of_devices, pods_of_devices
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.request import Owner

__all__ = ["DeviceHolders", "NewestLedger"]


class DeviceHolders:
    """The holders of one class's devices, as last read."""

    def __init__(self, bus: Bus, *, node: str, device_class: str) -> None:
        self._bus = bus
        self._node = node
        self._class = device_class
        self._owners: dict[str, tuple[Owner, ...]] | None = None
        self._pods: dict[str, tuple[Owner, ...]] = {}

    async def read(self) -> bool:
        """Read the ledger. When it cannot be read, the earlier holders stay.

        True when the ledger was read.
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
        """Names of devices that have a holder.

        None until the ledger was read, and then no device counts as free.
        """
        return None if self._owners is None else frozenset(self._owners)

    def owners(self, device: str) -> tuple[Owner, ...]:
        """Return the owners of a device. Empty as well until the ledger was read."""
        return (self._owners or {}).get(device, ())

    def pods(self, device: str) -> tuple[Owner, ...]:
        """Return the pods that use a device, through either API."""
        return self._pods.get(device, ())


class NewestLedger:
    """The node's ledger, followed. Readable from any thread."""

    def __init__(self, bus: Bus, node: str, on_change: Callable[[], None]) -> None:
        """Follow the ledger of a node. `on_change` is called after each change."""
        self._bus = bus
        self._node = node
        self._on_change = on_change
        self.value: Holders | None = None
        """None until there is one."""

    async def follow(self) -> None:
        """Follow the ledger until cancelled. While it cannot be read, the earlier one stays."""
        async for change in self._bus.watch(LEDGER.read_as(Holders), node=self._node):
            if change.kind in (ChangeKind.PUT, ChangeKind.DELETE):
                self.value = change.value
                self._on_change()
