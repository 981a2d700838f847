"""Publishes the health events of one class on one node: the first state of each device, then every
change, with numbers that continue the stream's.

The last published state is read from the stream itself, so a restart repeats nothing and a crash
between two writes loses nothing. When the stream has dropped an event (its bound drops the
oldest of any device), it is published again, so that late subscribers find the present state of
each device as its newest event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from topobus.bus.bus import Bus
from topobus.engine.health.health_machine import is_same_to_readers
from topobus.formats.messages.catalogue import HEALTH
from topobus.formats.messages.messages import HealthEvent
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.names import next_generation
from topobus.values.request import Owner

__all__ = ["HealthAnnouncer"]

# At a start the stream is asked once for each device. So many requests at a time keep a node with
# hundreds of CPUs below a second.
_PARALLEL_READS = 32


class HealthAnnouncer:
    """Publishes health events. The only writer of its class's subjects on its node."""

    def __init__(self, bus: Bus, *, node: str, device_class: str) -> None:
        self._bus = bus
        self._node = node
        self._class = device_class
        self._last: dict[str, HealthEvent | None] = {}
        self._generations: dict[str, int] = {}
        """Generation of each device's last event that this process published. A stream that was
        lost begins again, and its subscribers drop what is older than they have seen."""
        self._sequences: dict[str, int] = {}
        """Sequence in the stream of the last event of each device."""
        self._lost: set[str] = set()
        self._created = ""

    async def load(self, names: Sequence[str]) -> None:
        """Read the last events of the devices that this process has no event of yet.

        Errors: raises PeerUnavailable when the stream cannot be read.
        Cost:   one request for each such device, 32 at a time.
        """
        unread = [name for name in names if name not in self._last]
        for start in range(0, len(unread), _PARALLEL_READS):
            batch = unread[start : start + _PARALLEL_READS]
            async with asyncio.TaskGroup() as group:
                reads = {name: group.create_task(self._read(name)) for name in batch}
            self._last.update({name: task.result() for name, task in reads.items()})

    def clear_cache(self) -> None:
        """Read the stream again before the next event: it may have lost the last ones."""
        self._last.clear()
        self._sequences.clear()
        self._lost.clear()

    async def check(self) -> bool:
        """Compare the cached events with what the stream still holds.

        True when some are gone, which `announce` publishes again.

        Errors: raises PeerUnavailable.
        Cost:   one request.
        """
        # The positions before the request: an event published during it may be newer than the
        # answer.
        sequences = dict(self._sequences)
        span = await self._bus.span(HEALTH)
        is_other = self._created not in ("", span.created)
        if is_other:
            self.clear_cache()
        self._created = span.created
        self._lost = {
            name
            for name, sequence in sequences.items()
            if self._sequences.get(name) == sequence and not span.oldest <= sequence <= span.newest
        }
        if self._lost:
            get_logger().info("health.lost", device_class=self._class, devices=len(self._lost), oldest=span.oldest)
        return is_other or bool(self._lost)

    def is_news(self, device: Device) -> bool:
        """Return whether a device's health differs from its last event, or whether that event is
        lost, as far as this process knows.
        """
        last = self._last.get(device.name)
        return (
            device.name in self._lost
            or last is None
            or last.is_removed
            or not is_same_to_readers(last.health, device.health)
        )

    async def announce(
        self,
        device: Device,
        *,
        affected: Sequence[Owner],
        pods: Sequence[Owner] = (),
        inventory_generation: int,
        time: str,
        is_removed: bool = False,
    ) -> bool:
        """Publish one device's health if it changed. True when an event was published.

        Errors: raises PeerUnavailable; then the event may or may not be stored, and the next call
        reads the stream again.
        """
        await self.load([device.name])
        last = self._last[device.name]
        is_same = (
            last is not None
            and last.is_removed == is_removed
            and (is_removed or is_same_to_readers(last.health, device.health))
        )
        if is_same and device.name not in self._lost:
            return False
        event = HealthEvent(
            node=self._node,
            device_class=self._class,
            device=device.name,
            health=device.health,
            previous=None if last is None or last.is_removed else last.health.state,
            generation=next_generation(
                max(0 if last is None else last.generation, self._generations.get(device.name, 0))
            ),
            inventory_generation=inventory_generation,
            is_removed=is_removed,
            affected=tuple(sorted(affected, key=lambda owner: owner.key)),
            pods=tuple(sorted(set(pods), key=lambda pod: pod.key)),
            time=time,
        )
        del self._last[device.name]
        event_id = f"{self._node}.{self._class}.{device.name}.{event.generation}"
        sequence = await self._bus.publish(
            HEALTH, event, event_id=event_id, node=self._node, device_class=self._class, device=device.name
        )
        self._last[device.name] = event
        self._generations[device.name] = event.generation
        self._sequences[device.name] = sequence
        self._lost.discard(device.name)
        self._log(event)
        return True

    async def _read(self, name: str) -> HealthEvent | None:
        received = await self._bus.last(HEALTH, limit=1, node=self._node, device_class=self._class, device=name)
        if not received:
            return None
        self._sequences[name] = received[-1].sequence
        return received[-1].value

    def _log(self, event: HealthEvent) -> None:
        worst = event.health.worst
        # A healthy device's first event is no decision: a node has hundreds of CPUs.
        is_news = event.is_removed or event.previous is not None or event.health.state is not HealthState.HEALTHY
        tell = get_logger().info if is_news else get_logger().debug
        tell(
            "device.removed" if event.is_removed else "health.changed",
            device=event.device,
            state=str(event.health.state),
            previous=str(event.previous) if event.previous else "",
            reason=worst.reason if worst else "",
            affected=[owner.key for owner in event.affected],
            pods=[pod.key for pod in event.pods],
            generation=event.generation,
        )
