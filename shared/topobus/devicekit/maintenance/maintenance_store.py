"""Stores what an operator wants of the devices of one class, and the verdicts of others on them:
read at the start, written with each operation and verdict, and written again when the store has
lost it.

This process is the entry's only writer, so any other content is garbage, a deletion or an older
copy. Memory has the last written value. A value that could not be written does not count.
"""

from __future__ import annotations

import asyncio

from topobus.formats.messages.catalogue import MAINTENANCE
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.formats.messages.releases import START_THAT_RELEASE, is_of_other_release
from topobus.process.clock import until_tick
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["MaintenanceStore"]


class MaintenanceStore:
    """The operator's decisions for the devices of one class on this node."""

    def __init__(self, runtime: Runtime, device_class: str) -> None:
        """Begin with nothing. `load` reads the stored value."""
        self._bus = runtime.bus
        self._clock = runtime.clock
        self._node = runtime.node
        self._class = device_class
        self.value = ClassMaintenance(node=runtime.node, device_class=device_class)
        self.writing = asyncio.Lock()
        """Held by whoever changes the value, from reading it until it is written: it is one value
        of all devices."""

    async def load(self) -> None:
        """Read the stored value.

        Waits until the bucket can be read, because a withheld device must not be offered for a
        moment.
        """
        while True:
            try:
                stored = await self._read()
            except PeerUnavailable as err:
                get_logger().warning("maintenance.unread", why=str(err))
                await self._clock.sleep(err.retry_after_s)
                continue
            if stored is not None:
                self.value = stored
                get_logger().info("maintenance.recalled", devices=sorted(stored.devices))
            return

    async def put(self, value: ClassMaintenance) -> None:
        """Write the decisions that apply from now on.

        Errors: raises PeerUnavailable when it could not be written, or the outcome is unknown. The
        earlier decisions apply then.
        """
        if value == self.value:
            return
        await self._bus.put(MAINTENANCE, value, node=self._node, device_class=self._class)
        self.value = value

    async def run(self, look_s: float) -> None:
        """Confirm the stored value periodically, without end.

        Units: look_s — seconds between two checks, at the process's other ticks.
        """
        while True:
            await self._clock.sleep(until_tick(self._clock.monotonic(), look_s))
            try:
                await self.confirm()
            except PeerUnavailable as err:
                get_logger().debug("maintenance.unseen", why=err.message)

    async def confirm(self) -> None:
        """Check that the present value is still stored, and write it again if not.

        Errors: raises PeerUnavailable.
        Cost: one request, and none while there was never an operation or a verdict.
        """
        stands = self.value
        if not stands.devices and not stands.operations and not stands.verdicts:
            return
        try:
            entry = await self._bus.get(MAINTENANCE, node=self._node, device_class=self._class)
            if (entry is not None and entry.value == stands) or stands is not self.value:
                return
            why = "it is gone" if entry is None else "somebody else wrote over it"
        except ContractError as err:
            self._leave_others(err)
            why = err.message
        get_logger().warning(
            "maintenance.overwritten",
            why=why,
            next_step="it is written again; see who writes this bucket besides the device services",
        )
        await self._bus.put(MAINTENANCE, stands, node=self._node, device_class=self._class)

    async def _read(self) -> ClassMaintenance | None:
        """Read the bucket's value.

        When it is garbage, the newest older revision that is readable.
        """
        try:
            entry = await self._bus.get(MAINTENANCE, node=self._node, device_class=self._class)
        except ContractError as err:
            self._leave_others(err)
            older = await self._bus.history(MAINTENANCE, node=self._node, device_class=self._class)
            get_logger().warning("maintenance.misread", why=err.message, is_recalled=bool(older))
            return older[-1].value if older else None
        return entry.value if entry is not None else None

    def _leave_others(self, err: ContractError) -> None:
        """Raise for a value that another release wrote: what it withholds must stay withheld."""
        if is_of_other_release(str(err.facts.get("release", "")), self._bus.release):
            raise ContractError(err.message, next_step=START_THAT_RELEASE, **err.facts) from err
