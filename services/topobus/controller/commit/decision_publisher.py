"""Publishes decisions: one event for each, which users, `topobus explain` and dashboards follow.

A decision is published after it is written into an object. The event's id is the operation's, so a
repeated event is the same event. An event that cannot be published is logged. The decision in the
object is valid without it.
"""

from __future__ import annotations

from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import DecisionEvent
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Owner
from topobus.values.timestamps import rfc3339

__all__ = ["DecisionPublisher"]


class DecisionPublisher:
    """Publishes decision events."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def publish(
        self,
        verb: str,
        owner: Owner,
        outcome: Placement | Refusal | None,
        *,
        op_id: str,
        node: str = CLUSTER,
    ) -> None:
        """Publish one decision with the present time.

        Shapes: op_id — the same for the same decision on every replica.
        Errors: a peer's failure and a rejected event are logged, not raised.
        """
        event = DecisionEvent(
            id=op_id,
            verb=verb,
            node=node,
            op_id=op_id,
            time=rfc3339(self._clock.now()),
            owner=owner,
            outcome=outcome,
        )
        try:
            await self._bus.publish(catalogue.DECISION, event, event_id=op_id, node=node)
        except (PeerUnavailable, ContractError) as err:
            get_logger().warning("decision.unpublished", op_id=op_id, error=str(err))
