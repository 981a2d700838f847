"""Copies to the hub what this node's own server stores: the states as they are now, and every event
once.

`hub_copies` writes the states, `event_follower` sends the events, and a note at the hub records how
far they are. After a lost connection, and after a restart of this process, of the node's server or
of the hub (even with an older or an empty store), the relay reads what the hub has before it
writes. Source: docs/adr/0030.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec.structs import replace

from topobus.bus.connection.reply_inbox import new_token
from topobus.bus.failures import AmbiguousWrite
from topobus.bus.server_config.up_subjects import OLDEST_LEAF, up_nouns
from topobus.bus.streams.uplink import Delivery, Mark, Uplink, event_parts, state_change, written_by
from topobus.formats.messages.catalogue import LINK, RELAY
from topobus.formats.messages.nouns import Event, State
from topobus.formats.messages.relay_messages import LinkRequest, NodeRelay
from topobus.process.backoff import full_jitter
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.relay.config import RelaySettings
from topobus.relay.event_follower import EventFollower
from topobus.relay.hub_copies import HubCopies
from topobus.relay.hub_link import HubLink
from topobus.relay.rules.positions import is_kept, without_position
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable

__all__ = ["serve", "serve_node"]

# Events come in bursts, so the note is written after a burst and not after each event. Events that
# are sent again after a crash in between have the same ids, and the hub's stream drops them (for
# two minutes).
_NOTE_AFTER_S = 0.25


async def serve(settings: RelaySettings, runtime: Runtime) -> None:
    """Keep the hub's copies of this node until cancelled.

    Errors: raises ConfigError when the node's own server is older than the relay supports.
    """
    if runtime.bus.server_version < OLDEST_LEAF:
        version = ".".join(map(str, runtime.bus.server_version))
        raise ConfigError(
            f"nats.url is a node's own server, and it is {version}: before 2.10 an acknowledged write is not "
            "on the disk, and the node keeps the only ledger",
            next_step="use nats-server 2.10 or later on the node, or one central server "
            "(docs/how-to/choose-a-nats-shape.md)",
        )
    await serve_node(settings, runtime)


async def serve_node(settings: RelaySettings, runtime: Runtime) -> None:
    """Do what `serve` does without checking the server's version."""
    uplink = runtime.bus.uplink()
    link = HubLink(runtime)
    # The note is written only to the hub.
    states = tuple(noun for noun in up_nouns() if isinstance(noun, State) and noun.name != RELAY.name)
    events = tuple(noun for noun in up_nouns() if isinstance(noun, Event))
    copies = HubCopies(states, link, uplink, runtime, forget_after_s=settings.forget_after_s)

    async def tell(_: LinkRequest) -> NodeRelay:
        return link.note

    await runtime.bus.answer(LINK, tell, node=runtime.node)
    async with asyncio.TaskGroup() as tasks:
        for state in states:
            tasks.create_task(_keep(state, copies, uplink, runtime.node), name=f"keep-{state.name}")
        await _Relay(settings, runtime, events, copies, link, uplink, tasks).run()


async def _keep(state: State[Any], copies: HubCopies, uplink: Uplink, node: str) -> None:
    """Pass each value of a state that the node's server has to the copies."""
    async with aclosing(uplink.values(state, node=node)) as items:
        async for item in items:
            if item is Mark.RESET:
                copies.reset(state)
            elif item is Mark.CAUGHT_UP:
                copies.note_whole(state)
            elif isinstance(item, Delivery):
                try:
                    parts, data = state_change(state, item)
                except ContractError as err:
                    get_logger().warning("state.passed-over", subject=item.subject[:200], error=err.message)
                    continue
                copies.keep(state, state.key(**parts), data, written_by(item))


class _Relay:
    def __init__(
        self,
        settings: RelaySettings,
        runtime: Runtime,
        events: tuple[Event[Any], ...],
        copies: HubCopies,
        link: HubLink,
        uplink: Uplink,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._clock = runtime.clock
        self._events = {event.name: event for event in events}
        self._copies = copies
        self._link = link
        self._uplink = uplink
        self._tasks = tasks
        self._followers: list[asyncio.Task[None]] = []
        self._note_due_at = math.inf
        self._look_due_at = 0.0
        self._waiting_events = 0
        self._rotation = 0
        self._noted_ending = ""

    async def run(self) -> None:
        """Send what is due, check at times that the hub has it, and reconnect after a loss."""
        beat = self._runtime.beats.loop("relay")
        attempt = 0
        while True:
            beat.turn()
            self._link.wake.clear()
            try:
                await self._step()
                attempt = 0
                pause_s = max(min(self._look_due_at, self._note_due_at) - self._clock.monotonic(), 0.0)
            except PeerUnavailable as err:
                self._link.lose(err)
                # The request goes to the node's own server, which reports at once that the hub is
                # away. So a thousand nodes that look for the hub do not disturb it.
                pause_s = full_jitter(attempt, least_s=0.2, most_s=self._settings.retry_s)
                attempt += 1
                await self._count_waiting()
            self._link.set_remark(self._copies.waiting, self._waiting_events)
            beat.rest()
            if not self._link.joined.is_set():
                await self._clock.sleep(pause_s)
                continue
            await is_set_within(self._link.wake, self._clock.timeout(pause_s))

    async def _step(self) -> None:
        if not self._link.joined.is_set():
            await self._join()
        await self._copies.settle()
        now = self._clock.monotonic()
        if not self._copies.is_note_written:
            self._note_due_at = min(self._note_due_at, now + _NOTE_AFTER_S)
        if now >= self._note_due_at:
            self._note_due_at = math.inf
            await self._copies.write_note()
        if now >= self._look_due_at:
            self._look_due_at = now + self._settings.check_s * full_jitter(0, least_s=1.0, most_s=1.0)
            await self._look()
            await self._count_waiting()

    async def _join(self) -> None:
        """Read what the hub has.

        When the hub's note differs from ours, events are sent again from its position.
        """
        is_other = await self._copies.read_note()
        self._copies.doubt()
        await self._settle_ending()
        for name in tuple(self._link.note.events):
            if not await self._is_kept(name):
                self._link.change_note(partial(without_position, event=name))
                is_other = True
        if is_other or not self._followers:
            for follower in self._followers:
                follower.cancel()
            if self._followers:
                await asyncio.wait(self._followers)
            self._followers = [
                self._tasks.create_task(
                    EventFollower(event, self._link, self._uplink, self._runtime).run(), name=f"follow-{name}"
                )
                for name, event in self._events.items()
            ]
        self._link.join()

    async def _settle_ending(self) -> None:
        """Make the ending of our events' ids, and write it to the note before the first event is
        sent with it. A later relay of this node must send them with the same ending.
        """
        if not self._link.note.id_ending:
            self._link.change_note(lambda note: replace(note, id_ending=new_token()))
        if self._link.note.id_ending != self._noted_ending:
            await self._copies.write_note()
            self._noted_ending = self._link.note.id_ending

    async def _look(self) -> None:
        if not await self._copies.look():
            raise AmbiguousWrite("the hub has something else than it acknowledged")
        self._rotation += 1
        names = sorted(self._link.note.events)
        for name in names[self._rotation % len(names) :][:1] if names else ():
            if not await self._is_kept(name):
                raise AmbiguousWrite(f"the hub has no longer what it acknowledged of {name}")

    async def _is_kept(self, name: str) -> bool:
        """Return whether the hub's stream still has the last event that it acknowledged."""
        position, event = self._link.note.events[name], self._events.get(name)
        if event is None or not position.subject:
            return event is not None
        try:
            parts = event_parts(event, position.subject)
        except ContractError:
            return False
        return is_kept(position, await self._uplink.sequence_at_hub(event, **parts))

    async def _count_waiting(self) -> None:
        """Count the events that the hub has not acknowledged.

        A count that cannot be read keeps its previous value.
        """
        try:
            spans = {name: await self._runtime.bus.span(event) for name, event in self._events.items()}
        except PeerUnavailable:
            return
        positions = self._link.note.events
        self._waiting_events = sum(
            span.newest
            - (positions[name].sequence if name in positions and positions[name].created == span.created else 0)
            for name, span in spans.items()
        )
