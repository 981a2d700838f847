"""Detects for all feeds of a connection that their server stopped delivering, by the heartbeats of
one of them.

A consumer dies silently only with the server that keeps it, and all consumers that this server
keeps die with it. So of the feeds whose consumers are at the same server, one asks for heartbeats
(`Seat.takes_beats`), and when these stop, all feeds must make their consumers again. Of a consumer
that is deleted alone its feed learns from the server at once (status 409).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["BEAT_S", "Seat", "SharedHeartbeats"]

BEAT_S = 2
"""Seconds after which the server reports that nothing came. Less than the silence after which the
connection checks whether it is alive, so that beats also replace that check."""
# Silence is so many missed beats, and some slack for a busy machine, after which the messages in
# the socket have been read: 5 s in all.
_MISSED_BEATS = 2
_BUSY_S = 1.0


class SharedHeartbeats:
    """The feeds of one connection, grouped by the server that keeps their consumers."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def enter(self, server: str, restart: Callable[[str], None]) -> Seat:
        """Add a feed whose consumer is at a server.

        `restart` is called with the reason to make the consumer again: `silence`, or
        `heartbeats` when this feed must ask for them from now on.
        """
        return Seat(self._groups.setdefault(server, _Group()), restart)


class Seat:
    """One feed among those of its server, for the life of the feed's consumer."""

    def __init__(self, group: _Group, restart: Callable[[str], None]) -> None:
        self._group = group
        self.restart = restart
        self.is_waiting = False
        """Set by the feed while its reader waits for messages: only then does the server owe it
        heartbeats."""
        group.seats.append(self)

    def takes_beats(self) -> bool:
        """Return, at each pull, whether it must ask for heartbeats. If no feed does, this one
        begins to.
        """
        if self._group.beating is None:
            self._group.listen_to(self)
        return self._group.beating is self

    def note_message(self) -> None:
        """Note that a message came from the consumer, a heartbeat included."""
        if self._group.beating is self:
            self._group.wait_for_beat()

    def leave(self) -> None:
        """Remove the feed. If it asked for the heartbeats, another one does next."""
        if self in self._group.seats:
            self._group.seats.remove(self)
            if self._group.beating is self:
                self._group.hand_over()


class _Group:
    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.beating: Seat | None = None
        self._timer: asyncio.TimerHandle | None = None

    def listen_to(self, seat: Seat) -> None:
        self.beating = seat
        self.wait_for_beat()

    def wait_for_beat(self) -> None:
        self._set_timer(_MISSED_BEATS * BEAT_S, self._give_time)

    def hand_over(self) -> None:
        """Make a waiting feed ask for heartbeats. If none waits, the next one that pulls does."""
        self._set_timer(None)
        self.beating = None
        heir = next((seat for seat in self.seats if seat.is_waiting), None)
        if heir is not None:
            heir.restart("heartbeats")

    def _give_time(self) -> None:
        self._set_timer(_BUSY_S, self._judge)

    def _judge(self) -> None:
        self._set_timer(None)
        if self.beating is None or not self.beating.is_waiting:
            # No reader waits there, so the server owes it nothing.
            self.hand_over()
            return
        self.beating = None
        for seat in list(self.seats):
            seat.restart("silence")

    def _set_timer(self, delay_s: float | None, action: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if delay_s is None or action is None else asyncio.get_running_loop().call_later(delay_s, action)
        )
