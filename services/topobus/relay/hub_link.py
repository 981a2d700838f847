"""Tracks whether the hub is reachable, and the note that it stores for this node: how far its
copies of our events are.

Being cut off is a remark in the readiness report and never unreadiness: the node keeps working, and
what waits here is safe in the node's own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.formats.messages.relay_messages import NodeRelay
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.relay.metrics import JOINED, JOINS, LOST_EVENTS, SAID, WAITING
from topobus.values.errors import PeerUnavailable
from topobus.values.timestamps import rfc3339

__all__ = ["HubLink"]

_PART = "hub"


class HubLink:
    """What the relay's tasks share about the hub."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.joined = asyncio.Event()
        """Set while the hub is reachable and has the present note."""
        self.wake = asyncio.Event()
        """Set when there is something to do: a value, a note, a loss."""
        self.note = NodeRelay(node=runtime.node)
        self._cut_since = rfc3339(runtime.clock.now())
        self._why = "not reached yet"
        self.said = SAID.register(runtime.registry)
        self.joins = JOINS.register(runtime.registry)
        self.lost_events = LOST_EVENTS.register(runtime.registry)
        self._is_joined = JOINED.register(runtime.registry)
        self._waiting = WAITING.register(runtime.registry)
        self.set_remark(0, 0)

    def lose(self, err: PeerUnavailable) -> None:
        """Note that a request to the hub failed. All that is known of the hub is read again."""
        if self.joined.is_set():
            self._cut_since = rfc3339(self._runtime.clock.now())
            get_logger().warning(
                "hub.lost", error=err.message, next_step="nothing to do: what is stored here is sent when it is back"
            )
        self._why = err.message
        self.joined.clear()
        self._is_joined.set(0)
        self.wake.set()

    def join(self) -> None:
        """Note that the hub is reachable and has the present note."""
        self.joins.inc()
        get_logger().info("hub.joined", cut_off_since=self._cut_since)
        self.joined.set()
        self._is_joined.set(1)

    def change_note(self, change: Callable[[NodeRelay], NodeRelay]) -> None:
        """Change the note, and wake the task that writes it."""
        changed = change(self.note)
        if changed != self.note:
            self.note = changed
            self.wake.set()

    def set_remark(self, states: int, events: int) -> None:
        """Report in the readiness report how the hub is and what waits for it."""
        self._waiting.labels("state").set(states)
        self._waiting.labels("event").set(events)
        waits = f"{states} states and {events} events wait"
        if not self.joined.is_set():
            self._runtime.readiness.set(
                _PART, is_ready=True, why=f"cut off since {self._cut_since}: {self._why}; {waits}"
            )
        else:
            self._runtime.readiness.set(_PART, is_ready=True, why=waits if states or events else "")
