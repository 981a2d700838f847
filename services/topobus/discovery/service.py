"""Keeps the machine's entry on the bus equal to the hardware tree: reads, compares, publishes.

What can change is read every `hardware.rescan_s`. Everything is read after each kernel event, after
each change, and every five minutes. The KV entry is written only when the machine changed, with
a generation that continues the stored one. When the tree cannot be read, the last good machine
stays published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.discovery.config import DiscoverySettings
from topobus.discovery.metrics import LOOK_SECONDS, LOOKS, MACHINE_GENERATION
from topobus.discovery.rules.changes import describe_changes, machine_to_publish, steady
from topobus.formats.messages.catalogue import MACHINE
from topobus.process.clock import until_tick
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import Tree
from topobus.sysfs.uevent import UeventsUnavailable, open_uevents
from topobus.sysfs.volatile import VolatileFacts, read_volatile
from topobus.values.errors import ContractError, HardwareError, PeerUnavailable
from topobus.values.machine import Machine

__all__ = ["serve"]

_READY_PART = "machine"
# Seconds between two complete reads, whether or not anything seems to have changed: what only they
# find (an edited file of a recorded machine) does not change on a running machine.
_FULL_RESCAN_S = 300.0
# Kernel events come in bursts, because a card is tens of devices. One read after this pause covers
# the whole burst.
_SETTLE_S = 0.1
# A tree may change while it is read and show half of a change. So a changed machine must be read
# twice with the same result, within this number of reads.
_MAX_LOOKS = 5
# Events of these subsystems can change the machine. Network and block events come by the hundred
# and cannot.
_SUBSYSTEMS = frozenset({"cpu", "pci", "memory", "node"})


async def serve(settings: DiscoverySettings, runtime: Runtime) -> None:
    """Publish this node's machine until cancelled."""
    runtime.readiness.set(_READY_PART, is_ready=False, why="not read yet")
    publisher = _Publisher(settings, runtime)
    wake = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_listen(Tree(settings.hardware), wake), name="uevents")
        beat = runtime.beats.loop("discovery")
        while True:
            beat.turn()
            await publisher.check()
            beat.rest()
            try:
                async with asyncio.timeout(until_tick(runtime.clock.monotonic(), settings.hardware.rescan_s)):
                    await wake.wait()
                    await asyncio.sleep(_SETTLE_S)
            except TimeoutError:
                pass
            # Checked after the wait, because the kernel may have reported a change since it ended.
            if wake.is_set():
                publisher.distrust()
            wake.clear()


class _Publisher:
    def __init__(self, settings: DiscoverySettings, runtime: Runtime) -> None:
        self._tree = Tree(settings.hardware, is_revisited=True)
        self._runtime = runtime
        self._node = runtime.node
        self._last: Machine | None = None
        self._volatile: VolatileFacts | None = None
        """What could change, as it was before `_last` was read. None: it proves nothing about
        the tree."""
        self._full_look_due_at = 0.0
        self._standing = ""
        """Fingerprint of the published entry when it was last seen equal to `_last`. Empty: it
        was not."""
        self._unreadable = ""
        self._unpublished = ""
        self._looks = LOOKS.register(runtime.registry)
        self._seconds = LOOK_SECONDS.register(runtime.registry)
        self._generation = MACHINE_GENERATION.register(runtime.registry)

    def distrust(self) -> None:
        """Read everything next time, because the kernel reported a change."""
        self._volatile = None

    async def check(self) -> None:
        """Read once, and publish when something changed.

        A failure is logged once, and the next call tries again.
        """
        volatile = await self._read_volatile()
        is_same = (
            volatile is not None
            and volatile == self._volatile
            and self._runtime.clock.monotonic() < self._full_look_due_at
        )
        machine = self._last if is_same else await self._read()
        if machine is None:
            return
        if not is_same:
            # It was read before the machine, so a change in between shows as a difference next
            # time.
            self._volatile = volatile
            self._full_look_due_at = self._runtime.clock.monotonic() + _FULL_RESCAN_S
        try:
            if is_same and await self._is_standing():
                self._looks.labels(outcome="same").inc()
                return
            await self._publish(machine)
        except PeerUnavailable as err:
            # What was read is not published, and `_last` is older: the next call reads everything
            # again.
            self.distrust()
            self._looks.labels(outcome="unpublished").inc()
            if self._unpublished != err.message:
                self._unpublished = err.message
                get_logger().warning(
                    "machine.kept-back",
                    reason=err.message,
                    next_step="nothing to do: it is published when NATS is back",
                )
        else:
            self._unpublished = ""

    async def _is_standing(self) -> bool:
        """Return whether the entry still has the last good fingerprint, without reading it."""
        return bool(self._standing) and await self._runtime.bus.fingerprint(MACHINE, node=self._node) == self._standing

    async def _read_volatile(self) -> VolatileFacts | None:
        """Read what can change.

        None when it cannot be read. Everything is then read, which reports the reason.
        """
        try:
            return await asyncio.to_thread(read_volatile, self._tree)
        except HardwareError:
            return None

    async def _read(self) -> Machine | None:
        self._volatile = None
        try:
            machine = await self._read_steady()
        except HardwareError as err:
            self._looks.labels(outcome="unreadable").inc()
            if self._unreadable != err.message:
                self._unreadable = err.message
                keeps = "the last good machine stays published" if self._last else "nothing is published"
                get_logger().warning("machine.unreadable", reason=err.message, next_step=err.next_step, effect=keeps)
            if self._last is None:
                self._runtime.readiness.set(_READY_PART, is_ready=False, why=str(err))
            return None
        if self._unreadable:
            self._unreadable = ""
            get_logger().info("machine.readable-again")
        return machine

    async def _read_steady(self) -> Machine:
        machine = await self._read_once()
        for _ in range(_MAX_LOOKS - 1):
            if self._last is not None and steady(machine) == steady(self._last):
                return machine
            again = await self._read_once()
            if steady(again) == steady(machine):
                return again
            machine = again
        return machine

    async def _read_once(self) -> Machine:
        read: Callable[[Tree, str], Machine] = read_machine
        with self._seconds.time():
            return await asyncio.to_thread(read, Tree(self._tree.settings), self._node)

    async def _publish(self, machine: Machine) -> None:
        bus = self._runtime.bus
        # Read before the entry: if the entry below is newer, this fingerprint never matches again
        # and confirms nothing.
        fingerprint, self._standing = await bus.fingerprint(MACHINE, node=self._node), ""
        try:
            entry = await bus.get(MACHINE, node=self._node)
        except ContractError as err:
            # Written by a version that we cannot read, so ours replaces it.
            get_logger().warning("machine.misread", reason=err.message)
            entry = None
        # When the store lost its entry, the generation continues from the last one in memory.
        stored = entry.value if entry else None
        new = machine_to_publish(stored if stored is not None else self._last, machine)
        if new is None and entry is not None and self._last is None and entry.origin.release != bus.release:
            # The machine is the same but another release wrote the entry, so write it again under
            # this release. Only at the start, so that two instances of different releases do not
            # alternate.
            new = stored
        if new is None and entry is None:
            assert self._last is not None
            new = self._last
        if new is None:
            assert stored is not None
            self._looks.labels(outcome="same").inc()
            if self._last is None:
                get_logger().info("machine.unchanged", generation=stored.generation)
            self._note_published(stored)
            self._standing = fingerprint
            return
        await bus.put(MACHINE, new, node=self._node)
        self._looks.labels(outcome="published").inc()
        before = stored or self._last
        if before is None or before is new:
            get_logger().info("machine.published", **_summary(new))
        else:
            changes = [str(change) for change in describe_changes(before, new)]
            get_logger().info("machine.changed", generation=new.generation, changes=changes)
        if new.warnings and (before is None or before.warnings != new.warnings):
            get_logger().warning("machine.contradictory", warnings=list(new.warnings))
        self._note_published(new)

    def _note_published(self, machine: Machine) -> None:
        self._last = machine
        self._generation.set(machine.generation)
        self._runtime.readiness.set(_READY_PART, is_ready=True)


async def _listen(tree: Tree, wake: asyncio.Event) -> None:
    """Set `wake` at each kernel event that can change the machine.

    Where there are no such events, it logs the reason once and returns.
    """
    source = open_uevents(tree)
    if isinstance(source, UeventsUnavailable):
        get_logger().info("uevents.unavailable", reason=source.reason, rescan_s=tree.settings.rescan_s)
        return
    with source:
        while True:
            try:
                event = await source.next()
            except OSError as err:
                get_logger().warning("uevents.lost", reason=str(err), rescan_s=tree.settings.rescan_s)
                return
            if event.is_lost or event.subsystem in _SUBSYSTEMS:
                wake.set()


def _summary(machine: Machine) -> dict[str, object]:
    return {
        "generation": machine.generation,
        "numa_nodes": str(machine.node_set),
        "cpus": len(machine.online_cpus),
        "pci_functions": len(machine.pci_devices),
    }
