"""Limits browsers' connections: a request's head has a deadline, and one address may have half of
the connections.

A connection with half a request is ended at the deadline. When an address has too many, its oldest
connection that waits for a request is ended, so that a browser can connect beside a program that
only keeps connections open.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_S", "BoundedProtocol"]

HEAD_S = 10.0
"""Seconds until a request's head must be complete: a browser sends it in one packet, and the
services' own HTTP waits half as long."""


class BoundedProtocol(H11Protocol):
    """One connection of a browser.

    Half of the server's `limit_concurrency` is what an address may have: a proxy in front is
    one address, and has all pages.
    """

    _deadline: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """The browser's address. Empty when it is not known."""
        return self.client[0] if self.client is not None else ""

    @property
    def waits_for_a_request(self) -> bool:
        """Say whether no request is being answered on it."""
        return self.conn.their_state is h11.IDLE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request, and make room where the address has too many connections."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._await_head()
        own = [
            other for other in self.connections if isinstance(other, BoundedProtocol) and other.address == self.address
        ]
        if self.limit_concurrency is not None and len(own) > self.limit_concurrency // 2:
            waiting = [
                other
                for other in own
                if other.waits_for_a_request and other is not self and other._deadline is not None
            ]
            oldest = min(
                waiting, key=lambda other: other._deadline.when() if other._deadline is not None else 0.0, default=self
            )
            oldest.end()

    def data_received(self, data: bytes) -> None:
        """Receive bytes. The first byte of a request starts the deadline of its head."""
        super().data_received(data)
        if self.waits_for_a_request:
            self._await_head()
        else:
            self._end_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the deadline."""
        self._end_wait()
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection without an answer."""
        self.connections.discard(self)
        self._end_wait()
        self.transport.abort()

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.end)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
