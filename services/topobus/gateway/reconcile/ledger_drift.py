"""Publishes an event when kubelet and the ledger disagree twice in a row about a device, and
another one when they agree again.

The newest event about a device is its present state. Each event also has a log line. What was
published before is read from the stream, so a restarted gateway neither repeats an event nor misses
an end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import structs

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import DISAGREEMENT
from topobus.formats.messages.messages import Disagreement, DisagreementEvent
from topobus.process.clock import SystemClock
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.timestamps import rfc3339

__all__ = ["LedgerDrift"]

_Key = tuple[str, str]
"""Class and device."""

# More devices than a node has. The stream keeps the newest event of each in any case.
_RECALLED = 1024


class LedgerDrift:
    """The node's disagreements, as published."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._clock = SystemClock()
        self._published: dict[_Key, Disagreement] | None = None
        self._ending: set[_Key] = set()

    async def publish(self, confirmed: Iterable[Disagreement], seen: Iterable[Disagreement]) -> None:
        """Publish new disagreements that were seen twice, and the end of those that were not seen
        twice in a row.

        What could not be published is published next time.
        """
        wanted = {(disagreement.device_class, disagreement.device): disagreement for disagreement in confirmed}
        present = {(disagreement.device_class, disagreement.device) for disagreement in seen}
        try:
            disagreements = await self._read_published()
            for key, disagreement in sorted(wanted.items()):
                if disagreements.get(key) != disagreement:
                    await self._publish(disagreement, is_over=False)
                    disagreements[key] = disagreement
            absent = disagreements.keys() - wanted.keys() - present
            for key in sorted(absent & self._ending):
                await self._publish(disagreements[key], is_over=True)
                del disagreements[key]
            self._ending = absent
        except TopobusError as err:
            # The outcome is unknown. Next time the stream's content decides.
            self._published = None
            get_logger().warning("disagreement.untold", error=str(err))

    async def _read_published(self) -> dict[_Key, Disagreement]:
        if self._published is None:
            newest: dict[_Key, DisagreementEvent] = {}
            for received in await self._bus.last(DISAGREEMENT, limit=_RECALLED, node=self._node):
                newest[(received.value.device_class, received.value.device)] = received.value
            self._published = {
                key: Disagreement(**{name: getattr(event, name) for name in Disagreement.__struct_fields__})
                for key, event in newest.items()
                if not event.is_over
            }
        return self._published

    async def _publish(self, disagreement: Disagreement, *, is_over: bool) -> None:
        facts, time = structs.asdict(disagreement), rfc3339(self._clock.now())
        event = DisagreementEvent(node=self._node, is_over=is_over, time=time, **facts)
        sides = hashlib.sha256(
            f"{disagreement.kubelet}\n{disagreement.ledger}\n{is_over}\n{time}".encode()
        ).hexdigest()[:16]
        event_id = f"{self._node}.{disagreement.device_class}.{disagreement.device}.{sides}"
        await self._bus.publish(
            DISAGREEMENT,
            event,
            event_id=event_id,
            node=self._node,
            device_class=disagreement.device_class,
            device=disagreement.device,
        )
        if is_over:
            get_logger().info("holding.agreed", **facts)
        else:
            get_logger().warning("holding.disagreed", **facts)
