"""The inputs that other services publish about this node, the machine and the inventories, kept in
memory by watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from topobus.bus.bus import Bus
from topobus.bus.streams.state import Change, ChangeKind
from topobus.engine.alignment.planning.node_view import aligned_view, with_ledger
from topobus.engine.health.strays import stray_devices, without_strays
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.process.broadcast import Broadcast
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.values.device import Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.maintenance import Maintenance
from topobus.values.view import NodeAlignment, NodeView

__all__ = ["NodeInputs"]

# A longer list does not help a person. The count is logged as well.
_SHOWN_STRAYS = 16
# An inventory that the gateway had before it asked is in this process as well, a few steps of the loop
# away. The gateway waits ten times as long for an adoption (its setting deadlines.adopt_s).
_BEHIND_S = 0.3


class NodeInputs:
    """The machine and the inventories of one node. Watches write it, answers read it."""

    def __init__(self, bus: Bus, alignment: NodeAlignment, readiness: Readiness) -> None:
        self.machine: Machine | None = None
        self.inventories: dict[str, Inventory] = {}
        self._changed = Broadcast()
        """Announced at each change of `inventories`."""
        self._bus = bus
        self._node = alignment.node
        self._alignment = alignment
        self._readiness = readiness
        self._has_inventories = False
        self._unheard: Mapping[str, str] = {}
        self._static: NodeView | None = None
        self._strays: tuple[str, ...] = ()
        readiness.set("machine", is_ready=False, why="waiting for discovery")
        readiness.set("inventories", is_ready=False, why="reading inventories")

    async def watch(self) -> None:
        """Follow both until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_machine())
            group.create_task(self._watch_inventories())

    def note_silence(self, unheard_classes: Mapping[str, str]) -> None:
        """Store which classes' services are silent, and since when. From now on a plan treats their
        devices as Unknown.
        """
        self._unheard, self._static = unheard_classes, None

    def view(self, ledger: Ledger) -> NodeView:
        """Return the node as a plan sees it now.

        Errors: raises PeerUnavailable before discovery and the inventories have been received.
        """
        return with_ledger(self.bare_view(), ledger)

    def bare_view(self) -> NodeView:
        """Return the node as it would be with no device held.

        Errors: as `view`.
        """
        if self.machine is None or not self._has_inventories:
            what = "the machine" if self.machine is None else "the inventories"
            raise PeerUnavailable(
                f"node {self._node}: {what} has not been published yet",
                next_step="see whether discovery and the device services run",
            )
        if self._static is None:
            self._static = aligned_view(
                self.machine,
                self._without_strays(self.machine),
                None,
                self._alignment,
                unheard_classes={name: since for name, since in self._unheard.items() if name in self.inventories},
            )
            self._warn_about_reserved(self._static)
        return self._static

    def _without_strays(self, machine: Machine) -> dict[str, Inventory]:
        """Remove devices with NUMA nodes that the machine lacks. Log them when they change."""
        strays = tuple(
            sorted(
                device.name for inventory in self.inventories.values() for device in stray_devices(inventory, machine)
            )
        )
        if strays and strays != self._strays:
            get_logger().warning(
                "devices.set-aside",
                count=len(strays),
                devices=strays[:_SHOWN_STRAYS],
                numa_nodes=str(machine.node_set),
                next_step="they name NUMA nodes that the machine lacks: see their plugin, or whether discovery runs",
            )
        self._strays = strays
        return {name: without_strays(inventory, machine) for name, inventory in self.inventories.items()}

    async def _watch_machine(self) -> None:
        async with aclosing(self._bus.watch(MACHINE, node=self._node)) as changes:
            async for change in changes:
                # When discovery no longer publishes the machine, the last one is kept: silence does
                # not mean that the machine has changed.
                if change.kind is ChangeKind.PUT and change.value is not None:
                    self.machine, self._static = change.value, None
                    self._readiness.set("machine", is_ready=True)
                    get_logger().info(
                        "machine.heard", generation=change.value.generation, numa_nodes=str(change.value.node_set)
                    )

    async def wait_listed(self, *devices: Mapping[str, tuple[str, ...]]) -> None:
        """Wait until the inventories list these devices, by class, for 0.3 s at most.

        The gateway follows the same inventories and may be ahead: kubelet allocates what it has
        just offered, and does not ask again when that is refused.
        """
        await self._changed.until(lambda: all(map(self._lists, devices)), asyncio.timeout(_BEHIND_S))

    def _lists(self, devices: Mapping[str, tuple[str, ...]]) -> bool:
        """Say whether the inventories list these devices. CPUs are the machine's."""
        return all(
            device_class in self.inventories
            and all(self.inventories[device_class].device(name) is not None for name in names)
            for device_class, names in devices.items()
            if device_class != CPU_CLASS
        )

    async def wait_shown(self, device_class: str, device: str, maintenance: Maintenance | None) -> None:
        """Wait until plans use the maintenance that an operator has set for a device.

        A device that does not exist counts as shown.
        """

        def is_shown() -> bool:
            inventory = self.inventories.get(device_class)
            listed = inventory.device(device) if inventory is not None else None
            return listed is None or listed.maintenance == maintenance

        await self._changed.until(is_shown)

    async def _watch_inventories(self) -> None:
        async with aclosing(self._bus.watch(INVENTORY, node=self._node)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.RESET:
                    # The store lost its history, which proves nothing about devices. What was known
                    # is kept until its service publishes it again.
                    get_logger().warning("inventories.reset", kept=sorted(self.inventories))
                elif change.kind is ChangeKind.SNAPSHOT_END:
                    self._has_inventories = True
                    self._readiness.set("inventories", is_ready=True)
                else:
                    self.inventories, self._static = self._apply(change), None
                    self._changed.announce()

    def _apply(self, change: Change[Inventory]) -> dict[str, Inventory]:
        device_class = change.parts["device_class"]
        if change.kind is not ChangeKind.PUT or change.value is None:
            return {name: inventory for name, inventory in self.inventories.items() if name != device_class}
        get_logger().debug(
            "inventory.heard",
            device_class=device_class,
            generation=change.value.generation,
            devices=len(change.value.devices),
        )
        return {**self.inventories, device_class: change.value}

    def _warn_about_reserved(self, view: NodeView) -> None:
        online = CpuSet()
        for core in view.cores:
            online |= core.cpus
        reserved = self._alignment.reserved_cpus
        if not reserved <= online:
            get_logger().warning("reserved-cpus.missing", reserved=str(reserved), missing=str(reserved - online))
