"""The holders of the devices of one class on this node, read from the node's ledger.

The ledger is read when it is needed: it is written for each pod and claim, while the health of a
device, which the owners are notified of, seldom changes, and a scrape, whose lines name the holder
of the moment, comes a few times a minute. Only a class with spares follows it, because a device
that an owner has is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError

from topobus.bus.bus import Bus
from topobus.bus.streams.state import ChangeKind
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
        self._loop = asyncio.get_running_loop()
        self.ledger: Holders | None = None
        """The ledger that was read last. None until there is one. Readable from any thread."""
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
        self._note(entry.value if entry is not None else None)
        return True

    def read_from_thread(self, limit_s: float) -> None:
        """Read the ledger for another thread than the event loop's. The earlier holders stay when it
        cannot be read, also within the limit.
        """
        reading = asyncio.run_coroutine_threadsafe(self.read(), self._loop)
        try:
            reading.result(limit_s)
        except CancelledError:
            return  # the process stops
        except TimeoutError:
            reading.cancel()
            get_logger().warning("ledger.unread", why=f"it was not read within {limit_s:g} s")

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Follow the ledger until cancelled. While it cannot be read, the earlier holders stay.

        Shapes: on_change — called after each change, and when it is certain that there is no ledger.
        """
        async for change in self._bus.watch(LEDGER.read_as(Holders), node=self._node):
            is_missing = change.kind is ChangeKind.SNAPSHOT_END and self._owners is None
            if is_missing or change.kind in (ChangeKind.PUT, ChangeKind.DELETE):
                self._note(change.value)
                on_change()

    def _note(self, ledger: Holders | None) -> None:
        self.ledger = ledger
        self._owners, self._pods = owners_of_devices(ledger, self._class), pods_of_devices(ledger, self._class)

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
