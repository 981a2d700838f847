"""Stores the inventory of one class in its bucket: reads it at the start, writes it when it
differs, and checks it afterwards.

The bucket's entry has generations that continue the earlier ones. Each change sets readiness and
metrics and writes one log line. This process is the entry's only writer, so any other content is
garbage, a deletion or an older copy. An inventory that exceeds the bucket's or the readers' limits
is not written: the last good one stays, and a metric and readiness report that it is old.
"""

from __future__ import annotations

import asyncio

import msgspec

from topobus.bus.bus import Entry
from topobus.devicekit.host.metrics import DeviceMetrics
from topobus.formats.messages.catalogue import INVENTORY
from topobus.formats.messages.codec import encode
from topobus.formats.messages.stored import objection
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.health import HealthState
from topobus.values.names import next_generation

__all__ = ["InventoryStore"]


class InventoryStore:
    """The one inventory that this process writes."""

    def __init__(self, runtime: Runtime, device_class: str, *, metrics: DeviceMetrics, root: str) -> None:
        """Make the store of a class. `root` is the tree that the devices come from, for the log."""
        self._bus = runtime.bus
        self._readiness = runtime.readiness
        self._node = runtime.node
        self.device_class = device_class
        """The class whose inventory it is."""
        self._root = root
        self.generation = 0
        """Of the newest inventory that was written, or may have been."""
        self._stored: Inventory | None = None
        self._confirmed = ("", 0)
        """Fingerprint of the inventory that stood in the bucket when it was last read and was ours,
        and its generation."""
        self._has_published = False
        self._refused: Inventory | None = None
        """The inventory that could not be published, without its generations; None when the newest
        is in the bucket."""
        self._metrics = metrics

    @property
    def is_refused(self) -> bool:
        """Say whether the newest inventory could not be published, so that no reader has it."""
        return self._refused is not None

    async def load(self) -> Inventory | None:
        """Read the inventory of the earlier run, and continue its generations.

        None when there is no readable one.

        Errors: raises PeerUnavailable when the bucket cannot be read.
        """
        entry = await self._last_inventory()
        if entry is None:
            return None
        # A number that cannot have been reached by counting is not continued.
        self.generation = next_generation(entry.value.generation) - 1
        get_logger().info("inventory.recalled", generation=entry.value.generation, devices=len(entry.value.devices))
        return entry.value

    async def _last_inventory(self) -> Entry[Inventory] | None:
        """Read the bucket's inventory.

        When it is garbage, the newest older revision that is readable.
        """
        try:
            entry = await self._bus.get(INVENTORY, node=self._node, device_class=self.device_class)
            # The next publishing is skipped when it equals this. Garbage is always overwritten, and
            # an inventory that another release wrote is written again by this one.
            self._stored = entry.value if entry is not None and entry.origin.release == self._bus.release else None
            return entry
        except ContractError as err:
            older = await self._bus.history(INVENTORY, node=self._node, device_class=self.device_class)
            found_entry = older[-1] if older else None
            fields = {
                **err.facts,
                "error": err.message,
                "recalled_revision": found_entry.revision if found_entry else 0,
            }
            get_logger().warning("inventory.misread", **fields)
            return found_entry

    def clear_cache(self) -> None:
        """Write the next inventory even if it equals the last one: the store may have lost it."""
        self._stored = None

    async def put(self, inventory: Inventory) -> None:
        """Publish an inventory when it differs from the one in the bucket, with the next
        generation.

        Errors: raises PeerUnavailable when it could not be written, or the outcome is unknown.
        """
        inventory = msgspec.structs.replace(inventory, generation=self.generation)
        # A machine that changed without changing a device is no news to the readers of this class.
        is_news = (
            self._stored is None
            or msgspec.structs.replace(self._stored, machine_generation=inventory.machine_generation) != inventory
        )
        if is_news and not await self._is_readable(inventory):
            return
        if is_news:
            # Spent even when the write fails: a write that timed out may have been done, and no
            # generation may have two values.
            self.generation = next_generation(self.generation)
            self._stored = None
            inventory = msgspec.structs.replace(inventory, generation=self.generation)
            await self._bus.put(INVENTORY, inventory, node=self._node, device_class=self.device_class)
            self._stored = inventory
            self._report_inventory(inventory)
        if not self._has_published or self._refused is not None:
            self._has_published = True
            self._refused = None
            self._metrics.set_unpublished(is_unpublished=False)
            self._readiness.set("inventory", is_ready=True)
            if not inventory.devices:
                get_logger().info(
                    "inventory.empty", device_class=self.device_class, drivers=list(inventory.drivers), root=self._root
                )

    async def is_standing(self) -> bool:
        """Return whether our inventory is in the bucket. True while we write it.

        Errors: raises PeerUnavailable when the bucket cannot be read.
        """
        inventory = self._stored
        if inventory is None:
            return True
        why = "it is gone"
        fingerprint = await self._bus.fingerprint(INVENTORY, node=self._node, device_class=self.device_class)
        if fingerprint and self._confirmed == (fingerprint, inventory.generation):
            # Read once already. Reading thousands of devices at each look would delay this
            # process's answers.
            return True
        try:
            entry = await self._bus.get(INVENTORY, node=self._node, device_class=self.device_class)
            if entry is not None:
                if await asyncio.to_thread(_is_same_but_counts, entry.value, inventory):
                    # The fingerprint was taken first: if the value read is newer, the old
                    # fingerprint is never current again and confirms nothing.
                    self._confirmed = (fingerprint, inventory.generation)
                    return True
                why = f"somebody else wrote generation {entry.value.generation} over it"
        except ContractError as err:
            why = err.message
        if self._stored is not inventory:
            # Written while we looked: we may have seen the previous value.
            return True
        self._stored = None
        get_logger().warning(
            "inventory.overwritten",
            why=why,
            next_step="it is written again; see who writes this bucket besides the device services",
        )
        return False

    async def _is_readable(self, inventory: Inventory) -> bool:
        """Return whether the bucket and its readers accept an inventory.

        One that they do not accept is reported once, the last good one stays, and no process ends
        for it.
        """
        plain = msgspec.structs.replace(inventory, generation=0, machine_generation=0)
        if plain == self._refused:
            return False
        # In a thread: thousands of devices take a tenth of a second, in which this process answers
        # others.
        why = await asyncio.to_thread(objection, INVENTORY, inventory)
        if not why:
            return True
        is_reported = self._refused is not None and len(self._refused.devices) == len(inventory.devices)
        self._refused = plain
        self._metrics.set_unpublished(is_unpublished=True)
        text = f"{len(inventory.devices)} devices cannot be published: {why}"
        self._readiness.set("inventory", is_ready=self._has_published, why=text)
        if is_reported:
            return False
        get_logger().error(
            "inventory.unpublished",
            device_class=self.device_class,
            devices=len(inventory.devices),
            why=why,
            published_generation=self._stored.generation if self._stored is not None else 0,
            next_step="offer fewer devices of this class on the node, or give them shorter names",
        )
        return False

    def _report_inventory(self, inventory: Inventory) -> None:
        counts = {state: sum(device.health.state is state for device in inventory.devices) for state in HealthState}
        self._metrics.set_devices(inventory.devices)
        get_logger().info(
            "inventory.published",
            generation=inventory.generation,
            devices=len(inventory.devices),
            states={str(state): count for state, count in counts.items() if count},
            warnings=list(inventory.warnings),
        )


def _is_same_but_counts(left: Inventory, right: Inventory) -> bool:
    """Compare two inventories without their generations.

    Another instance of ours counts its generations for itself.
    """
    first, second = (
        msgspec.structs.replace(inventory, generation=0, machine_generation=0) for inventory in (left, right)
    )
    return encode(first) == encode(second)
