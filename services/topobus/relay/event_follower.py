"""Sends every event of one stream of the node's own server to the hub, in the stream's order, each
after the acknowledgement of the previous one.

Events keep their ids, extended by an ending that only this node's relay knows, and the relay's note
records how far they are (`HubLink.note`). Only two kinds of event are skipped: one that no subject
can hold, and one that the hub's stream refuses permanently. Both are logged and counted.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from topobus.bus.connection.reply_inbox import new_token
from topobus.bus.failures import AmbiguousWrite
from topobus.bus.streams.uplink import Acknowledged, Delivery, HubRefused, Mark, Uplink, event_parts
from topobus.formats.messages.nouns import Event
from topobus.process.backoff import full_jitter
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.relay.hub_link import HubLink
from topobus.relay.rules.positions import advanced, first_unsaid
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["EventFollower"]

# A full stream stays full until an operator makes room.
_REFUSED_MOST_S = 30.0


class EventFollower:
    """Sends one kind of event to the hub."""

    def __init__(self, event: Event[Any], link: HubLink, uplink: Uplink, runtime: Runtime) -> None:
        self._event = event
        self._link = link
        self._uplink = uplink
        self._runtime = runtime
        self._created = ""

    async def run(self) -> None:
        """Send what the hub does not have according to its note, then each new event.

        Never returns. It begins again after the node's store was lost.
        """
        while True:
            await self._link.joined.wait()
            try:
                behind = await self._find_start()
            except PeerUnavailable as err:
                get_logger().debug("events.waiting", noun=self._event.name, error=err.message)
                await self._runtime.clock.sleep(full_jitter(0, least_s=1.0))
                continue
            await self._follow(behind)

    async def _find_start(self) -> int:
        span = await self._runtime.bus.span(self._event)
        self._created = span.created
        return first_unsaid(self._link.note.events.get(self._event.name), created=span.created, newest=span.newest)

    async def _follow(self, behind: int) -> None:
        # When a stream is sent from its beginning, it is unknown what was sent before.
        is_resumed = behind > 0
        async with aclosing(self._uplink.events(self._event, node=self._runtime.node, behind=behind)) as items:
            async for item in items:
                if item is Mark.RESET:
                    return
                if not isinstance(item, Delivery):
                    continue
                if is_resumed and item.sequence > behind + 1:
                    self._note_gap(item.sequence - behind - 1)
                behind = item.sequence
                await self._say(item)

    async def _say(self, delivery: Delivery) -> None:
        attempt = 0
        while True:
            await self._link.joined.wait()
            try:
                acknowledged = await self._store(delivery)
            except ContractError as err:
                self._pass_over(delivery, err.message)
                return
            except HubRefused as err:
                if err.is_for_good:
                    self._pass_over(delivery, err.message)
                    return
                if attempt == 0:
                    get_logger().error(
                        "event.refused", subject=delivery.subject, error=err.message, next_step=err.next_step
                    )
                await self._runtime.clock.sleep(full_jitter(attempt, least_s=1.0, most_s=_REFUSED_MOST_S))
                attempt += 1
            except PeerUnavailable as err:
                self._link.said.labels(self._event.name, "unanswered").inc()
                self._link.lose(err)
            else:
                before = self._link.note.events.get(self._event.name)
                if (
                    before is not None
                    and not acknowledged.is_duplicate
                    and acknowledged.sequence <= before.hub_sequence
                ):
                    # The hub's stream was reset: what it had must be sent again, from the position
                    # in the note.
                    self._link.lose(AmbiguousWrite(f"the hub's stream {self._event.stream} has gone back"))
                    continue
                self._link.said.labels(self._event.name, "duplicate" if acknowledged.is_duplicate else "written").inc()
                self._advance(delivery, acknowledged.sequence)
                return

    async def _store(self, delivery: Delivery) -> Acknowledged:
        """Store an event, even when another sender has used its id. The hub then reports a
        duplicate, although the newest message under the event's own subject is older.
        """
        ending = self._link.note.id_ending
        acknowledged = await self._uplink.store_event(self._event, delivery, id_ending=ending)
        if not acknowledged.is_duplicate:
            return acknowledged
        newest = await self._uplink.sequence_at_hub(self._event, **event_parts(self._event, delivery.subject))
        if newest >= acknowledged.sequence:
            return acknowledged
        get_logger().warning(
            "event.id-taken",
            subject=delivery.subject,
            sequence=acknowledged.sequence,
            next_step="see who else writes to this stream at the hub",
        )
        return await self._uplink.store_event(self._event, delivery, id_ending=f"{ending}.{new_token()}")

    def _pass_over(self, delivery: Delivery, why: str) -> None:
        self._link.said.labels(self._event.name, "refused").inc()
        get_logger().error("event.passed-over", subject=delivery.subject, sequence=delivery.sequence, error=why)
        self._advance(delivery, 0)

    def _advance(self, delivery: Delivery, hub_sequence: int) -> None:
        event, created = self._event.name, self._created
        self._link.change_note(
            lambda note: advanced(
                note,
                event,
                created=created,
                sequence=delivery.sequence,
                subject=delivery.subject,
                hub_sequence=hub_sequence,
            )
        )

    def _note_gap(self, count: int) -> None:
        self._link.lost_events.labels(self._event.name).inc(count)
        get_logger().error(
            "events.lost",
            noun=self._event.name,
            count=count,
            reason="the node's own server dropped them, its bound being reached, before the hub was there",
            next_step="give its streams more room (nats.store_mib of the node's services)",
        )
