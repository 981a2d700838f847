"""Pull requests for a consumer's messages at an in-memory nats-server: each is served, sends idle
heartbeats, and expires.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from topobus.testing.nats.memory_streams import MemoryConsumer

if TYPE_CHECKING:
    from topobus.testing.nats.memory_server import MemoryNats

__all__ = ["Pull"]

_NANO = 1_000_000_000


class Pull:
    """One request for messages that waits: it serves messages, sends heartbeats, and ends."""

    def __init__(self, server: MemoryNats, consumer: MemoryConsumer, request: dict[str, Any], inbox: str) -> None:
        self.consumer = consumer
        self._server = server
        self._inbox = inbox
        self._left = int(request.get("batch", 1))
        self._expires_s = int(request.get("expires", 0)) / _NANO
        self._heartbeat_s = int(request.get("idle_heartbeat", 0)) / _NANO
        self._expiry: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._has_served = False
        self._waiting: list[Pull] = []

    def begin(self, waiting: list[Pull]) -> None:
        """Join the waiting requests."""
        self._waiting = waiting
        waiting.append(self)
        loop = asyncio.get_running_loop()
        if self._expires_s:
            self._expiry = loop.call_later(self._expires_s, self._expire)
        if self._heartbeat_s:
            self._heartbeat = loop.call_later(self._heartbeat_s, self._beat)

    def serve(self) -> None:
        """Deliver what there is. The last message of the batch ends the request without
        a status.
        """
        if not self._is_wanted():
            return
        while self._left and (delivery := self.consumer.next()) is not None:
            self._server.deliver(self.consumer, *delivery, self._inbox)
            self._left -= 1
            self._has_served = True
        if not self._left:
            self._end()

    def refuse(self, why: str) -> None:
        """End with the server's status that no message will come."""
        self._server.deliver_status(self._inbox, {"Status": "409", "Description": why})
        self._end()

    def _beat(self) -> None:
        if self not in self._waiting or not self._is_wanted():
            return
        if self._server.is_answering and not self._has_served:
            numbers = {
                "Nats-Last-Consumer": str(self.consumer.delivered),
                "Nats-Last-Stream": str(self.consumer.last_sequence),
            }
            self._server.deliver_status(self._inbox, {"Status": "100", "Description": "Idle Heartbeat", **numbers})
        self._has_served = False
        self._heartbeat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def _expire(self) -> None:
        if self in self._waiting:
            counts = {"Nats-Pending-Messages": str(self._left), "Nats-Pending-Bytes": "0"}
            self._server.deliver_status(self._inbox, {"Status": "408", "Description": "Request Timeout", **counts})
            self._end()

    def _is_wanted(self) -> bool:
        """Return whether consumer and asker still exist, and end the request if not."""
        stream = self.consumer.stream
        is_there = (
            self._server.streams.get(stream.name) is stream
            and stream.consumers.get(self.consumer.name) is self.consumer
        )
        if is_there and self._server.has_listener(self._inbox):
            return True
        self._end()
        return False

    def _end(self) -> None:
        if self in self._waiting:
            self._waiting.remove(self)
        for timer in (self._expiry, self._heartbeat):
            if timer is not None:
                timer.cancel()
